"""
A language model in rare rounds
===============================

This page shows four workers that train a small GPT and exchange their models in every tenth step,
in low-rank messages.
"""

# %%
# Three ways to train
# -------------------
#
# The text is the source of Python's standard library, byte by byte. The baseline averages in every
# step. DiLoCo has rounds of ten steps with AdamW, then the mean of all models and a step of an
# outer optimizer. The third method has the same rounds, but neighbors on a ring exchange messages
# of rank 8 in place of their models.

import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import train

METHODS = {
    "all-reduce in every step": "optimizer=all-reduce",
    "DiLoCo": "optimizer=all-reduce learning=diloco local_steps=10",
    "DiLoCo over PowerGossip": (
        "optimizer=power-gossip optimizer_rank=8 optimizer_num_iterations=1"
        " learning=diloco local_steps=10"
    ),
}
COLORS = ["#0072B2", "#009E73", "#D55E00"]

# %%
# The preset `gpt/160k` has the optimizer's settings. A smaller model fits this page: two layers
# with 32 features and a context of 64 bytes.

SETTINGS = (
    "--config gpt/160k n_workers=4 num_epochs=4 max_steps_per_epoch=50 learning_rate=0.001"
    " task_options.sequence_length=64 task_options.hidden_size=32 task_options.num_layers=2"
    " task_options.num_heads=2 task_options.evaluation_tokens=16384 evaluate_workers=false"
    " final_merge=true"
)
PROMPT = "task_options.sample='def '"
folder = Path(tempfile.mkdtemp())
measured = {}
for name, method in METHODS.items():
    place = folder / name.replace(" ", "-")
    arguments = f"{SETTINGS} {method} log_verbosity=0 --output-dir {place}"
    with contextlib.redirect_stdout(io.StringIO()):  # without the table of the run
        train.main([*arguments.split(), PROMPT])
    rows = pd.read_json(place / "metrics.jsonl", lines=True)
    measured[name] = rows[(rows.name == "bits_per_byte") & (rows.split == "test_avg")]
    end = measured[name].iloc[-1]
    print(f"{name:26s}{end.value:.2f} bits per byte,{end.bits / 8e6:6.1f} MB sent by a worker")

# %%
# Bits against quality
# --------------------
#
# By steps, the three are close. By megabytes, they are far apart: a round in ten steps saves a
# factor of ten, and messages of low rank more than three. Bits per byte are the length of the test
# text if the mean model compresses it. With `final_merge=true`, the last point has the bits of the
# all-reduce that gives all workers this model.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
for (name, rows), color, marker in zip(measured.items(), COLORS, "os^", strict=True):
    left.plot(50 * rows.epoch, rows.value, color=color, marker=marker, label=name)
    right.semilogx(rows.bits / 8e6, rows.value, color=color, marker=marker)
left.set(xlabel="step", ylabel="bits per byte, mean model, test text")
right.set(xlabel="sent by a worker, MB")
left.legend()
plt.show()

# %%
# A sample
# --------
#
# The mean model of the last run continues "def ". After some seconds of training, it has learned
# indentation and some fragments of Python's words.

print((place / "sample.txt").read_text())

# %%
# A larger model trains for some minutes with `make language`. `Rounds, outer optimizers, and
# measurements of larger models <../language-models.html>`_.
