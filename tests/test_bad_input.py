"""Bad input of each program: one sentence, exit code 2, and no file changes.

A row has arguments, and words of the sentence. Many rows of train.py are also tried in two
processes, where a driver tries them one after the other under one mpirun.
"""

import json
import re
import runpy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gossip_run
import train
from powergossip import compare, prediction
from tests.harness import launch
from tests.harness.compared_runs import write_run
from tests.harness.helpers import files_below

Row = tuple[str, ...]

TINY = ["n_workers=4", "task_architecture=MLP", "num_epochs=1", "log_verbosity=0"]
CHOCO = "optimizer=choco optimizer_compressor"
RELAY = "learning=relay-sgd optimizer=dpsgd"
LSTM = "task=LSTM task_architecture=LSTM"
A2CID2 = "optimizer=dpsgd gossip=a2cid2 topology=chain"

OF_KEYS: list[Row] = [
    ("toplogy=ring", "toplogy", "topology"),
    ("xyz=1", "xyz", "--help"),
    ("optimizer_num_local_steps=4", "optimizer_num_local_steps", "did you mean local_steps?"),
    ("optimizer_beta=0.4", "optimizer_beta", "did you mean", "functools.partial", "your own"),
    ("learning_rate.x=3", "learning_rate.x", "did you mean learning_rate?"),
    ("=3", '"=3"', "key=value"),
    ("resume=3", "resume=3:", "true, false or a string"),
    ("n_workers=2.5", "n_workers=2.5:", "null"),
    ("n_workers=yes", "n_workers=yes:", "null"),
    ("seed=abc", "seed=abc:"),
    ("seed=null", "seed=null:"),
    ("seed=1:30", "seed=1:30:"),
    ("batch_size=true", "batch_size=true:"),
    ("learning_rate=fast", "learning_rate=fast:"),
    ("learning_rate=[1]", "learning_rate=[1]:"),
    ("learning_rate=[1", "learning_rate=[1:", "YAML"),
    ("learning_rate", '"learning_rate"', "key=value"),
    ("overlapping=maybe", "overlapping=maybe:", "true or false"),
    ("overlapping=3", "overlapping=3:", "true or false"),
    ("overlapping=0.5", "overlapping=0.5:", "true or false"),
    ("nesterov=3", "nesterov=3:", "true or false"),
    ("optimizer=ddp-powersgd optimizer_start_iteration=[1]", "iteration=[1]: use a whole number"),
    ("topology=[ring]", "topology=['ring']:"),
    ("lr_schedule_milestones=5", "lr_schedule_milestones=5:", "list"),
    ("spectrum_logging_epochs=[a]", "spectrum_logging_epochs=['a']:", "list"),
    ("spectrum_logging_params=weight", "spectrum_logging_params=weight:", "list"),
    ("topology_options=4", "topology_options=4:", "{name: value, ...}"),
    ("topology_options=" + 600 * "[", "topology_options=[", "levels"),
    ("--nope", "--nope", "--config", "--output-dir", "--suffix", "key=value"),
    ("--output", "--output"),  # abbreviations are not accepted
    ("--output-dir", "--output-dir"),
    ("--output-dir ''", "--output-dir"),
    ("--suffix", "--suffix"),
    ("--suffix=a/b", "--suffix=a/b:"),
    ("--suffix=../b", "--suffix=../b:"),
    (r"'--suffix=a\b'", "--suffix=a\\b:"),
    ("--suffix={date}", "--suffix={date}:"),
    ("--suffix .e500 resume=true", "--output-dir"),
    ("--config no.yaml", "no.yaml"),
    ("--config data", "data"),
    ("--config mine.yaml", "optimizer_theta=0.5: optimizer=power-gossip"),
    ("--config old/config.yaml", "old/config.yaml, line 2", "num_epochs"),
    ("trackers=[bord]", "trackers=[bord]:", "tensorboard, wandb"),
]
# Of folders: run/ is a run, data/ is empty, file is a file.
OF_FOLDERS: list[Row] = [
    ("resume=true", "resume=true:", "--output-dir"),
    ("resume=true --output-dir old", "old/config.yaml, line 2", "num_epochs"),
    ("checkpoint=best", "evaluate_only=true"),
    ("evaluate_only=true", "--output-dir"),
    ("evaluate_only=true --output-dir data", "data"),
    ("--output-dir run", "run", "--output-dir", "overwrite=true"),
    ("--output-dir file/run", "file/run", "Not a directory"),
    ("--output-dir file", "--output-dir file is a file", "folder"),
    ("--output-dir /proc/self", "/proc/self"),
]
OF_VALUES: list[Row] = [
    ("n_workrs=4", "n_workrs", "did you mean n_workers?"),
    ("n_workers=many", "n_workers=many", "whole number"),
    ("seed=${nothing}", "nothing", "seed"),
    ("seed=???", "seed"),
    ("seed=100000000000000000000000", "seed=100000000000000000000000:"),
    ("num_epochs=9223372036854775808", "num_epochs=9223372036854775808:"),
    ("num_epochs=0", "num_epochs=0", "1"),
    ("n_workers=0", "n_workers=0", "1"),
    ("n_workers=2000", "2000", "n_workers"),
    ("n_workers=100000000", "n_workers=100000000", "1000000"),
    ("batch_size=0", "batch_size=0:", "1 or more"),
    ("batch_size=1000", "batch_size=1000", "359"),
    ("learning_rate=.nan", "learning_rate=nan", "0"),
    ("weight_decay=.inf", "weight_decay=inf", "0"),
    ("weight_decay=1e300", "weight_decay=1e+300:"),
    ("momentum=1", "momentum=1", "below 1"),
    ("adam_beta1=0.5", "adam_beta1=0.5", "local_optimizer=adamw"),
    ("log_verbosity=7", "log_verbosity=7", "0, 1 or 2"),
    ("gradient_clipping=1e-300", "gradient_clipping=1e-300:"),
    ("lr_schedule=linear", "lr_schedule=linear:"),
    ("lr_schedule_milestones=[5]", "lr_schedule_milestones", "[epoch, factor]"),
    ("'lr_schedule_milestones=[[1, 1e300]]'", "lr_schedule_milestones="),
    ("distributed_lr_warmup_epoch=.inf", "distributed_lr_warmup_epoch=inf"),
    ("distributed_lr_warmup_factor=all", "distributed_lr_warmup_factor=all:"),
    ("device=abacus", "abacus", "auto", "cpu", "cuda"),
    ("cuda_aware=perhaps", "cuda_aware=perhaps", "auto", "on", "off"),
    ("precision=fp16", "precision=fp16:", "fp32 or bf16"),
    ("batched_gradients=on torch_compile=true", "batched_gradients=on:", "auto or off"),
    (f"batched_gradients=on {LSTM}", "batched_gradients=on:", "auto or off"),
    ("validation_ratio=1e-4", "validation_ratio=0.0001"),
    ("validation_ratio=0.9999", "validation_ratio=0.9999"),
    ("validation_ratio=-0.1", "validation_ratio=-0.1"),
    ("validation_ratio=1", "validation_ratio=1"),
    (f"validation_ratio=1e-5 {LSTM}", "validation_ratio=1e-05"),
    ("evaluate_workers=false evaluate_test_data=false", "evaluate_test_data=false: use true"),
    ("evaluate_workers=false evaluate_average_model=false", "evaluate_workers=false: use true"),
    ("spectrum_logging_params=[conv9]", "conv9", "hidden1.weight"),
    ("'spectrum_logging_worker_pairs=[[0, 4]]'", "spectrum_logging_worker_pairs", "[[0, 4]]", "3"),
    ("'spectrum_logging_worker_pairs=[[0, 1.0]]'", "logging_worker_pairs", "[0, 1.0]", "3"),
]
OF_DATA: list[Row] = [
    ("task=Digit", "task", "Digit", "Digits", "FashionMNIST", "LSTM"),
    ("task_architecture=VGG", "VGG", "CNN", "MLP"),
    *[(f"'{option}'", "YAML needs a space after the colon") for option in (
        "task_options={width:3}", "topology_options={degree:2}", "learning_options={rate:1}")],
    ("'task_options={width: 3, depth: 4}'", '"depth", "width"', "normalization"),
    ("task_architecture=CNN task_options.normalization=batch", "ResNet20", "CNN", "normalization:"),
    ("task_options.normalization=batch", "ResNet20", "VGG11", "MLP", "task_options.normalization:"),
    ("task_options.normalization=layer", "task_options.normalization=layer:", "batch or group"),
    *[(f"task_options.pixel_mean={value}", "task_options.pixel_mean=")
      for value in ("[0.5,0.5]", "[]", "0.5", "[a]", "[.nan]")],
    ("task_options.pixel_deviation=[0.0]", "task_options.pixel_deviation="),
    ("data_dir=nowhere", "data_dir=nowhere"),
    ("task=FashionMNIST data_dir=data download=false", "data_dir=data", "train-images-idx3-ubyte"),
    ("decentralized_data_shuffled_ratio=0.5", "shuffled_ratio=0.5", "use_decentralized_data"),
    ("decentralized_data_shuffled_ratio=2", "decentralized_data_shuffled_ratio=2", "0", "1"),
    *[(f"use_decentralized_data=true decentralized_data_shuffled_ratio={value}",
       "decentralized_data_shuffled_ratio=", " 0 to 1") for value in ("-0.1", "1.1", ".nan")],
    *[(f"decentralized_data_dirichlet_alpha={value}", "_alpha=", "a number above 0")
      for value in ("0", "-1.0", ".nan", ".inf", "-.inf")],
    ("decentralized_data_dirichlet_alpha=1e-300", "_alpha=1e-300:"),
    ("use_decentralized_data=true decentralized_data_dirichlet_alpha=0.1", "_alpha=0.1:", "null"),
    ("decentralized_data_placement=best", "decentralized_data_placement=best:", "given or mixed"),
    ("decentralized_data_column=x", "decentralized_data_column=x:"),
    ("data_processes=2", "data_processes=2:"),
]  # fmt: skip
OF_TEXT: list[Row] = [
    ("task=LSTM task_architecture=CNN", 'task_architecture "CNN"', "LSTM, Transformer"),
    (f"decentralized_data_column=x {LSTM}", "decentralized_data_column=x:"),
    (f"data_processes=2 {LSTM}", "data_processes=2:"),
    (f"use_decentralized_data=true {LSTM}", "use_decentralized_data=true:", "false", "task=LSTM"),
    (f"reshuffle_data=true {LSTM}", "reshuffle_data=true:", "false", "task=LSTM"),
    (f"decentralized_data_dirichlet_alpha=0.1 {LSTM}", "dirichlet_alpha=0.1:", "null"),
    (f"data_of_lost=redistributed scenario={{}} {LSTM}", "data_of_lost=redistributed"),
    *[(f"task_options.{key} {LSTM}", f"task_options.{key.split('=')[0]}:", "dataset=wikitext2")
      for key in ("lower=true", "tokenizer=blanks", "evaluation=test")],
    (f"task_options.num_heads=2 {LSTM}", "task_options.num_heads:", "Transformer", "LSTM"),
    ("task=LSTM task_architecture=Transformer task_options.hidden_size=16 task_options.num_heads=3",
     "hidden_size=16:", "num_heads=3"),
    ("task=LSTM task_architecture=GPT task_options.hidden_size=16 task_options.num_heads=16",
     "hidden_size=16:", "a multiple of 32"),
    *[(f"task_options.{key}={value} {LSTM}", f"task_options.{key}=", f"use {accepted}")
      for key, value, accepted in (
          ("dataset", "wikitext", "topics or wikitext2 or ptb"),
          ("tokenizer", "space", "blanks or spacy"),
          ("evaluation", "valid", "test or validation"),
          ("lower", "'yes'", "true or false"),
          ("padding", "1", "true or false"),
          ("dataset", "2", "topics or wikitext2 or ptb"),
          ("sequence_length", "0", "a whole number, 1 or more"),
          ("hidden_size", "6.5", "a whole number, 1 or more"),
          ("num_layers", "true", "a whole number, 1 or more"),
          ("num_heads", '"\'4\'"', "a whole number, 1 or more"),
          ("min_count", "-1", "a whole number, 1 or more"),
          ("dropout", "2", "a number from 0 to below 1"),
          ("dropout", "1", "a number from 0 to below 1"),
          ("dropout", "-0.1", "a number from 0 to below 1"),
          ("dropout", ".nan", "a number from 0 to below 1"),
          ("dropout", "null", "a number from 0 to below 1"),
      )],
]  # fmt: skip
OF_METHODS: list[Row] = [
    ("optimizer=adam", "optimizer", "adam", "power-gossip", "dpsgd"),
    ("optimizer=dpsgd optimizer_theta=0.5",
     "optimizer_theta=0.5: optimizer=dpsgd", "diffusion_rate"),
    ("topology=rign", "topology", "rign", "ring", "torus"),
    ("'topology_options={degree: 4}'", "ring", "degree"),
    ("topology_options.rewiring=-1e-39", "topology_options.rewiring=-1e-39:"),
    ("topology=disconnected.txt", "disconnected.txt", "connect"),
    ("topology=triangle.txt", "triangle.txt", "3", "4"),
    ("topology=no.txt", "no.txt"),
    ("topology=unidirectional-ring", "directed", "undirected", "ring"),
    ("optimizer_rank=0", "optimizer_rank=0", "1"),
    ("optimizer_num_iterations=0", "optimizer_num_iterations=0", "1"),
    ("optimizer_rank=2 optimizer_round_weights=true", "rank=1"),
    ("optimizer_diffusion_rate=fast", "optimizer_diffusion_rate=fast", "auto"),
    ("optimizer_diffusion_rate=-1", "optimizer_diffusion_rate=-1", "auto"),
    (f"{CHOCO}=qsgd optimizer_levels=0", "optimizer_levels=0", "127"),
    (f"{CHOCO}=top-k optimizer_keep_ratio=0", "optimizer_keep_ratio=0", "above 0"),
    (f"{CHOCO}=top-k optimizer_keep_ratio=0.1 optimizer_rank=2", "keep_ratio=0.1", "rank=2"),
    (f"{CHOCO}=top-k optimizer_rank=0", "optimizer_rank=0", "1 or more"),
    ("optimizer=dgc optimizer_warmup_epochs=1 'optimizer_warmup_ratios=[0.5, 0.2]'",
     "optimizer_warmup_ratios=[0.5, 0.2]", "warmup_epochs=1"),
    ("optimizer=dgc optimizer_warmup_ratios=0.5", "warmup_ratios=0.5", "warmup_epochs=0"),
    ("optimizer=dpsgd optimizer_warm_start=true", "optimizer_warm_start=true:"),
    (RELAY, "topology=ring", "relay-sgd", "chain", "double-binary-tree"),
    ("learning=relay-sgd topology=chain", "optimizer=power-gossip", "optimizer=dpsgd"),
    (f"{RELAY} optimizer_diffusion_rate=0.5", "optimizer_diffusion_rate=0.5", "relay-sgd"),
    (f"{RELAY} 'learning_options={{beta: 0.9}}'",
     "learning_options.beta=0.9", "relay-sgd", "learning_options.correction"),
    (f"{RELAY} topology=chain learning_options.correction=0",
     "learning_options.correction=0", "above 0", "auto"),
    ("'learning_options={correction: 2}'", "correction=2"),
    ("learning=diloco learning_options.outer_rate=0", "learning_options.outer_rate=0", "above 0"),
    ("learning=diloco learning_options.outer_momentum=1", "outer_momentum=1", "below 1"),
    ("learning=diloco learning_options.outer_momentum=null",
     "learning_options.outer_momentum=", "a number"),
    ("learning=diloco learning_options.outer_momentum=-0.5 topology=star",
     "learning_options.outer_momentum=-0.5", "below 1"),
    ("learning=diloco learning_options.outer_rate=true", "learning_options.outer_rate=",
     "a number"),
    ("learning=diloco learning_options.fragments=true", "learning_options.fragments=", "whole"),
    ("optimizer=sparse-loco overlapping=true", "overlapping=", "false"),
    ("local_optimizer=adamw muon_rate=2", "muon_rate=2", "local_optimizer=muon"),
    ("learning=diloco 'learning_options={gradient_correction: true, correction_rate: 0}'",
     "learning_options.correction_rate=0", "above 0"),
    ("learning=diloco learning_options.correction_rate=0.5", "correction_rate=0.5",
     "gradient_correction=true"),
    ("learning=gasloc learning_options.gradient_correction=5", "correction=5", "true or false"),
    ("learning=diloco learning_options.gradient_correction=true optimizer=deepsqueeze",
     "learning_options.gradient_correction=true", "all-reduce", "choco"),
    ("learning=diloco local_steps=6 learning_options.fragments=4", "fragments=4", "local_steps=6"),
    ("learning=diloco local_steps=6 learning_options.fragments=1.5", "fragments=1.5", "whole"),
    ("learning=noloco learning_options.consensus_rate=-1", "consensus_rate=-1", "above 0"),
    ("learning=noloco optimizer=dpsgd overlapping=true", "overlapping=true", "noloco"),
    ("learning=diloco optimizer=all-reduce overlapping=true", "overlapping=true", "all-reduce"),
    ("learning=k-gt optimizer=dpsgd overlapping=true", "overlapping=true", "k-gt", "false"),
    ("learning=beer optimizer=choco overlapping=false", "overlapping=false", "beer", "true"),
    ("learning=beer optimizer=choco momentum=0.5", "momentum=0.5", "beer", "0"),
    ("learning=motef optimizer=choco nesterov=true", "nesterov=true", "motef", "false"),
    ("learning=quasi-global-momentum optimizer=all-reduce overlapping=true",
     "overlapping=true", "all-reduce", "false"),
    ("learning=gradient-tracking optimizer=dpsgd topology=epidemic",
     "topology=epidemic", "gradient-tracking", "one-peer-exponential"),
]  # fmt: skip
# Exchanges by edges.
OF_EVENTS: list[Row] = [
    ("gossip=never", "gossip=never"),
    (f"{A2CID2} optimizer=power-gossip", "optimizer=power-gossip"),
    (f"{A2CID2} learning=exact-diffusion", "learning=exact-diffusion"),
    (f"{A2CID2} local_optimizer=adamw", "local_optimizer=adamw"),
    (f"{A2CID2} overlapping=true", "overlapping="),
    (f"{A2CID2} local_steps=2", "local_steps=2"),
    (f"{A2CID2} topology=one-peer-exponential", "topology=one-peer-exponential"),
    (f"{A2CID2} topology=exponential", "topology=exponential"),
    ("max_delay=2", "max_delay=2"),
    ("gossip=bounded max_delay=-1", "max_delay=-1"),
    ("scenario=missing.yaml", "scenario=missing.yaml"),
    *[(f"'scenario={{{values}}}'", f"error: {key}=") for values, key in (
        ("speed: {}", "scenario"),
        ("speeds: {9: 1.0}", "scenario.speeds"),
        ("late: {fraction: 2}", "scenario.late.fraction"),
        ("loss: {ends: none}", "scenario.loss.ends"),
        ("loss: {to_bad: 0.1}", "scenario.loss"),
        ("late: {fraction: 0.5}", "scenario.late"),
        ("late: {seconds: 4}", "scenario.late"),
        ("loss: {ends: one}", "scenario.loss"),
        ("deaths: [{worker: 1}]", "scenario.deaths"),
        ("joins: [{worker: 1, at: 1}], deaths: [{worker: 1, at: 2}, {worker: 1, at: 3}]",
         "scenario.deaths"),
    )],
    *[(f"scenario={{}} {more}", f"error: {key}=") for more, key in (
        ("batched_gradients=on", "batched_gradients"),
        ("optimizer=moniqua", "optimizer"),
        ("data_of_lost=lost", "data_of_lost"),
        ("topology=one-peer-exponential", "topology"),
        ("optimizer_rank=0", "optimizer_rank"),
        ("optimizer=dpsgd learning=exact-diffusion learning_options.dual_rate=2",
         "learning_options.dual_rate"),
        ("on_worker_loss=continue", "on_worker_loss"),
    )],
    ("data_of_lost=redistributed", "data_of_lost=redistributed"),
    ("on_worker_loss=retry", "on_worker_loss=retry"),
    ("worker_timeout=0", "worker_timeout=0"),
    ("record_order=true", "record_order=true"),
]  # fmt: skip
IN_ONE: list[Row] = [
    ("rank=1", "rank=1:", "distributed_init_file"),
    ("distributed_init_file=new", "distributed_init_file=new:", "distributed_backend=gloo"),
    ("on_worker_loss=continue", "on_worker_loss=continue"),
    ("on_worker_loss=replace", "on_worker_loss=replace: use continue", "removed"),
    (
        "batched_gradients=on optimizer=ddp-powersgd n_workers=1",
        "batched_gradients=on:",
        "auto or off",
    ),
]
IN_TWO: list[Row] = [
    ("distributed_backend=gloo", "distributed_backend=gloo", "mpi"),
    ("n_workers=3", "n_workers=3", "2 processes", "multiple of 2", "-np 3"),
    ("optimizer=dpsgd scenario={}", "scenario:", "one process"),
]
# In one process and in two.
IN_ANY = OF_FOLDERS + OF_VALUES + OF_DATA + OF_METHODS
# Contents of a file given by --config.
OF_FILES: list[Row] = [
    ("", "empty", "key: value"),
    ("# nothing\n", "empty"),
    ("- 1\n- 2\n", "list", "key: value"),
    ("seed: 1\ntopology: [ring\nnum_epochs: 3\n", "line 3", "YAML"),
    ("seed: 1\n\tnum_epochs: 3\n", "line 2", "YAML"),
    ("seed: 1\nn_workrs: 4\n", "line 2", "n_workrs", "did you mean n_workers?"),
    ("# why\n\nseed: 1.5\n", "line 3", "seed=1.5:"),
    ("seed: 1\nnum_epochs: 2\nseed: 3\n", "line 3", '"seed"', "line 1"),
    ("topology_options:\n  degree: 4\n  degree: 5\n", "line 3", '"degree"', "line 2"),
    ("topology_options: {a: 1, a: 2}\n", "line 1", '"a"'),
    ("seed: 1\n---\nseed: 2\n", "line 2", "YAML"),
    ("seed: 1\nlearning_rate.x: 3\n", "line 2", "learning_rate.x", "did you mean"),
    ("5: 1\n", '"5"'),
    ("\x00\xff", "not"),
    ("topology_options: " + 100 * "[" + 100 * "]", "YAML", "levels"),
    ("topology_options: &a {b: *a}", "YAML", "line 1"),
]
OF_GOSSIP_RUN: list[Row] = [
    ("algorithm=choco", "algorithm=choco:", "sign_choco", "all"),
    ("algorithm=[moniqua,x]", "algorithm=x:", "sign_choco"),
    ("algorithm=[]", "algorithm=[]:", "all"),
    ("algorithm=3", "algorithm=3:", "all"),
    ("data_type=norml", "data_type=norml:", "log-normal"),
    ("topology=rign", "topology", "rign", "ring"),
    ("gossip=a2cid2", "gossip=a2cid2:", "asynchronous"),
    ("device=abacus", "device", "abacus", "auto, cpu"),
    ("theta=1", '"theta"', "--help"),
    ("compression_rank=0", "compression_rank=0:"),
    ("compression_rank=101", "compression_rank=101:", "1 to 100"),
    ("seed=100000000000000000000000", "seed=1000", "2^63"),
    ("hyperparameter_range_min=1e-300", "hyperparameter_range_min=1e-300:"),
    ("theta_range_max=1e300", "theta_range_max=1e+300:"),
    ("theta_num_samples=1000000000000", "theta_num_samples=1000", "1 to 1000"),
    ("matrix_size=1000000000000", "matrix_size=1000000000000:", "32768"),
    ("topology=star n_workers=100000", "n_workers=100000:"),
    ("topology=fully-connected n_workers=100000", "n_workers=100000:"),
    ("compression_num_iterations=0", "compression_num_iterations=0:"),
    ("compression_levels=0", "compression_levels=0:", "127"),
    ("num_steps=0", "num_steps=0:"),
    ("num_steps=1.5", "num_steps=1.5:", "1 or more"),
    ("'num_steps={others: 0}'", "num_steps={'others': 0}:", "1 or more"),
    ("'num_steps={choco: 5}'", "num_steps=choco:", "sign_choco", "others"),
    ("matrix_size=0", "matrix_size=0:"),
    ("hyperparameter_num_samples=0", "hyperparameter_num_samples=0:"),
    ("diffusion_rate=0", "diffusion_rate=0:", "auto", "null"),
    ("diffusion_rate=fast", "diffusion_rate=fast:", "auto", "null"),
    ("algorithm=[uncompressed,sign_choco] diffusion_rate=auto",
     "algorithm=sign_choco", "diffusion_rate=auto:", "choco.md"),
    ("algorithm=moniqua scenario={}", "algorithm=moniqua"),
    ("'scenario={late: {fraction: 2}}'", "scenario.late.fraction=2", "0 to 1"),
    ("'scenario={replay: order.jsonl}'", "scenario.replay=order.jsonl", "train.py"),
    ("hyperparameter_range_min=-1", "hyperparameter_range_min=-1"),
    ("hyperparameter_range_min=2", "hyperparameter_range_min=2", "hyperparameter_range_max=1.308"),
    ("theta_range_min=0", "theta_range_min=0"),
    ("theta_range_max=0.01", "theta_range_min=0.1:", "theta_range_max=0.01"),
    ("data_type=sparse matrix_size=2", "matrix_size=2:", "use 3 or more"),
    ("algorithm=all compression_rank=2", "compression_rank=2:", "power_gossip_signs", "use 1"),
    ("topology=unidirectional-ring", "algorithm=power_gossip", "unidirectional-ring"),
    ("topology=one-peer-exponential algorithm=sign_choco",
     "algorithm=sign_choco", "one-peer-exponential"),
    ("topology=one-peer-exponential algorithm=chebyshev",
     "algorithm=chebyshev", "one-peer-exponential", "ring"),
    ("topology=unidirectional-ring algorithm=finite_time",
     "algorithm=finite_time", "unidirectional-ring", "ring"),
    ("topology=unidirectional-ring algorithm=uncompressed diffusion_rate=auto",
     "diffusion_rate=auto", "directed"),
    ("--output-dir run", "run", "overwrite=true"),
]  # fmt: skip
OF_COMPARE: list[Row] = [
    ("", "folder"),
    ("a nowhere", "nowhere"),
    ("empty", "empty"),
    ("'x*'", "x*"),
    ("without-rows", "rows"),
    ("damaged", "info.json"),
    ("a --metric wishes", "--metric=wishes"),
    ("a --split valid", "--split=valid"),
    ("a --split tests", "--split"),
    ("a --metric phase_seconds", "phase_seconds"),
    ("a --speed", "--speed"),
    ("a --format docx --output x", "--format=docx"),
    ("a --format html", "--output"),
    ("a --format svg --output x.md", "markdown"),
    ("a --output a", "--output=a"),
    ("a --output file", "--output=file"),
    ("a --output file/x.md", "file/x.md"),
    ("a --output x.jpg", "--output=x.jpg"),
    ("a --output x.unknown", "--output=x.unknown"),
]
OF_PREDICT: list[Row] = [
    ("--rate fast", "--rate fast"),
    ("--rate 0mbit", "--rate 0mbit"),
    ("--rate 1mbit --latency 3", "--latency 3"),
    ("--rate 1mbit --hosts 3", "--hosts 3"),
    ("--rate 1mbit --workers 0", "--workers 0"),
    ("--rate 1mbit --model VGG", "--model VGG"),
    ("--rate 1mbit --method magic", "--method magic"),
    ("--rate 1mbit --method dpsgd:rank=1", "--method dpsgd:rank=1"),
    ("--rate 1mbit --method power-gossip:rank=2,rank=3", "--method power-gossip", "rank once"),
    ("--rate 1mbit --topology maze", "--topology maze"),
    ("--rate 1mbit --method power-gossip --topology exponential", "graph"),
    ("--rate 1mbit --wings 2", "--wings"),
    ("", "--rate"),
]
OF_EXPERIMENTS: list[Row] = [
    ("run questoin", "experiment=questoin:", "consensus,"),
    ("run", "run needs the name of an experiment"),
    ("run fashion_mnist --cores 0", "--cores=0:", "1"),
    ("run fashion_mnist --launcher slrum", "--launcher=slrum:", "mpirun"),
    ("run fashion_mnist --publish", "command=run:", "report with --publish"),
    ("report fashion_mnist --dry-run", "command=report:", "run with --dry-run"),
    ("report fashion_mnist", "run it first: python -m experiments run fashion_mnist"),
]
QUICK = ["--workers", "8", "--model", "30x20,20", "--no-measure", "--compute", "1ms"]


def run_experiments() -> None:
    runpy.run_module("experiments", run_name="__main__")


# Program, arguments before those of a row, and rows.
PROGRAMS: dict[str, tuple[Callable[[], None], list[str], list[Row]]] = {
    "train.py": (train.command, TINY, IN_ANY + OF_KEYS + OF_TEXT + OF_EVENTS + IN_ONE),
    "gossip_run.py": (gossip_run.command, ["n_workers=8"], OF_GOSSIP_RUN),
    "compare": (compare.command, [], OF_COMPARE),
    "predict": (prediction.command, QUICK, OF_PREDICT),
    "experiments": (run_experiments, [], OF_EXPERIMENTS),
}


def write_files(folder: Path) -> None:
    """The files that rows name."""
    for name in ("data", "empty"):
        (folder / name).mkdir()
    write_run(folder / "a")
    write_run(folder / "run")
    write_run(folder / "without-rows", ())
    write_run(folder / "damaged")
    for name, text in (
        ("damaged/info.json", "{"),
        ("file", "a file"),
        ("mine.yaml", "optimizer_theta: 0.5\n"),
        ("old/config.yaml", "seed: 3\nnum_epoch: 9\n"),
        ("disconnected.txt", "0 1\n2 3\n"),
        ("triangle.txt", "0 1\n1 2\n2 0\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def lacks(line: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in line]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name} {row[0][:70]}")
        for name, (_, _, rows) in PROGRAMS.items()
        for row in rows
    ],
)
def test_bad_input_is_one_sentence_and_changes_no_file(
    name: str, row: Row, tmp_path: Path, rejection: Callable[..., str]
) -> None:
    write_files(tmp_path)
    program, first, _ = PROGRAMS[name]
    arguments, *words = row
    assert lacks(rejection(program, *first, *shlex.split(arguments)), words) == []


@pytest.mark.parametrize("row", OF_FILES, ids=lambda row: row[0][:30])
def test_bad_files_of_keys_are_named(
    row: Row, tmp_path: Path, rejection: Callable[..., str]
) -> None:
    content, *words = row
    (tmp_path / "some.yaml").write_bytes(content.encode("latin1"))
    line = rejection(train.command, "--config", "some.yaml")
    assert lacks(line, ["some.yaml", *words]) == []


# --- Under mpirun ---

# Then one good run, with hooks: bad input leaves nothing behind, and hooks are process 0's.
TRY_ALL = """
import json
from omegaconf import OmegaConf
import train
from powergossip import errors, network
from powergossip.training import recorder

messages, rank = [], network.processes().rank
for arguments in json.load(open("bad_input.json")):
    train.config, train.output_dir = OmegaConf.structured(train.Config), None
    try:
        train.main([*TINY, *arguments])
        messages.append("accepted")
    except errors.BadInput as error:
        messages.append(f"error: {error}")
    except BaseException as error:
        messages.append(f"{type(error).__name__}: {error}")
json.dump(messages, open(f"messages-{rank}.json", "w"))

calls = []
train.log_metric = lambda *arguments: calls.append("metric")
train.log_info = lambda *arguments: calls.append("info")
train.log_runtime = lambda *arguments: calls.append("runtime")
recorder.report = lambda *_: calls.append("report")
train.config, train.output_dir = OmegaConf.structured(train.Config), "good"
train.main(TINY)
json.dump(sorted(set(calls)), open(f"calls-{rank}.json", "w"))
"""


def test_bad_input_is_rejected_in_all_processes_with_one_sentence(tmp_path: Path) -> None:
    """A run after it works, and calls hooks on process 0 only."""
    rows = IN_ANY + IN_TWO
    write_files(tmp_path)
    (tmp_path / "bad_input.json").write_text(json.dumps([shlex.split(row[0]) for row in rows]))
    (tmp_path / "driver.py").write_text(TRY_ALL.replace("TINY", repr(TINY)))
    before = files_below(tmp_path)
    ended = launch.python("driver.py", processes=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    after = files_below(tmp_path)
    messages, calls = (
        [json.loads(after.pop(f"{kind}-{rank}.json") or "") for rank in range(2)]
        for kind in ("messages", "calls")
    )
    assert calls == [["info", "metric", "report", "runtime"], []]
    assert {name: content for name, content in after.items() if "good" not in name} == before
    for (arguments, *words), *lines in zip(rows, *messages, strict=True):
        assert lines[0] == lines[1], arguments
        assert re.fullmatch("error: .*", lines[0]), arguments
        assert lacks(lines[0], words) == [], arguments


def of_program(text: str) -> str:
    """The output of the program, without that of mpirun when a process exits with an error."""
    text = re.sub(r"-{70,}\n(prterun|mpirun).*?-{70,}\n", "", text, flags=re.DOTALL)
    return re.sub(r"^\[.*PMIX ERROR: .*\n?", "", text, flags=re.MULTILINE).strip()


DRIVER = "import train\ntrain.config.topology='rign'\ntrain.main()"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([launch.ROOT / "train.py", "n_workrs=4"], "error: .*n_workrs.*n_workers.*"),
        (["driver.py"], "error: .*rign.*ring.*"),  # which does not catch BadInput
    ],
)
def test_bad_input_under_mpirun_is_printed_once_with_exit_code_2(
    words: list[str | Path], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = launch.python(*words, processes=2, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(sentence, of_program(ended.stderr))
    assert [file.name for file in tmp_path.iterdir()] == ["driver.py"]


@pytest.mark.parametrize("key", ["num_epochs=3", "distributed_backend=gloo"])
def test_processes_with_different_commands_end_with_one_sentence(key: str, tmp_path: Path) -> None:
    """Also for keys that change the number of messages, or the transport."""
    first = [str(launch.ROOT / "train.py"), "num_epochs=2"]
    second = [":", "-np", "1", *launch.stand_in(), *first, key]
    ended = launch.python(*first, *second, processes=1, cwd=tmp_path)
    name, _, value = key.partition("=")
    assert ended.returncode == 2
    sentence = f"error: {name}=.* in process 0 and {name}={value} in process 1: .*same command.*"
    assert re.fullmatch(sentence, of_program(ended.stderr)), ended.stderr
    assert list(tmp_path.iterdir()) == []
