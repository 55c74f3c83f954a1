"""The presets: they load, are accepted, and have the published values."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import gossip_run
import train
from powergossip import algorithms, presets, tasks
from powergossip.consensus.grids import num_steps
from powergossip.consensus.sweep import Sweep
from powergossip.network import Processes
from powergossip.runs import configuration, metrics
from powergossip.runs.configuration import plain
from powergossip.tasks import language_models
from powergossip.training import schedule
from powergossip.training.config_checks import checked
from tests.harness.small_data import write_cifar

FOLDER = presets.FOLDER
BASES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
COMBINATIONS = [
    (base, path.stem if path else None)
    for base in BASES
    for path in [None, *sorted((FOLDER / base).glob("*.yaml"))]
]
# Files that are used on top of another file of the same folder.
ADDITIONS = {("cifar10_resnet20", "dgc-half-precision"): "dgc", ("consensus", "faces"): "choco"}


def module_of(base: str) -> Any:
    return gossip_run if base == "consensus" else train


def arguments(base: str, method: str | None) -> list[str]:
    below = ADDITIONS.get((base, method or ""))
    stack = [below, method] if below else [method]
    names = [f"{base}/{name}" for name in stack if name] or [base]
    return [part for name in names for part in ("--config", name)]


@cache
def loaded(base: str, method: str | None) -> Any:
    config = OmegaConf.structured(module_of(base).Config)
    configuration.read_command_line(config, arguments(base, method), "")
    return config


@pytest.mark.long
def test_presets_are_accepted_and_every_optimizer_has_one() -> None:
    published = {"wikitext2_lstm": 16, "cifar10_resnet20": 8, "cifar10_vgg11": 16, "consensus": 8}
    as_base = ("dpsgd", "wm0", "mm", "resnet20", "160k")  # which state a value of their base
    optimizers, texts = set[str](), dict[str, str]()
    for base, method in COMBINATIONS:
        name, config, processes = f"{base}/{method}", loaded(base, method), Processes()
        optimizers.add(config.get("optimizer"))
        if str(config.get("optimizer")).startswith("ddp-"):
            processes.size = config.n_workers  # one worker per process
        check = gossip_run.checked if base == "consensus" else checked
        found = check(config, processes)
        assert found.topology == "ring" or base == "cifar10_vgg11", name
        assert found.n_workers == published.get(base, 1), name
        text = configuration.changed(plain(config), module_of(base).Config)
        assert text != texts.setdefault(base, "" if method else text) or method in (None, *as_base)
    # sparta has settings for tasks of the library.
    assert optimizers >= {*algorithms.AVERAGING, "powersgd", "dgc", "ddp-powersgd"} - {"sparta"}


PIXELS = {"pixel_mean": [0.4914, 0.4822, 0.4465], "pixel_deviation": [0.2023, 0.1994, 0.2010]}


def test_cifar10_is_as_published() -> None:
    of_gossip = {  # the factor of the warm-up and γ
        "dpsgd": (11.3, 1.308),
        "power-gossip": (11.3, 1.308),
        "power-gossip-2-iterations": (11.3, 1.308),
        "power-gossip-random": (11.3, 1.308),
        "power-gossip-2-iterations-random": (11.3, 1.308),
        "choco-sign": (16, 0.45),
        "choco-sign-untuned": (11.3, 1.308),
        "choco-top-1": (11.3, 0.0375),
        "deepsqueeze": (4.8, 0.01),
        "moniqua": (4, 0.005),
    }
    for method in [*of_gossip, "all-reduce", "powersgd-rank-4", "dgc", "dgc-warmup-5"]:
        c, (factor, rate) = loaded("cifar10_resnet20", method), of_gossip.get(method, (11.3, None))
        assert (c.distributed_lr_warmup_factor, c.optimizer_diffusion_rate) == (factor, rate)
        assert (c.batch_size, c.num_epochs, c.momentum, c.nesterov) == (128, 300, 0.9, True)
        assert (c.weight_decay, c.reshuffle_data, c.drop_last) == (1e-4, True, False)
        assert c.task_options == {"initialization": "fan-out", **PIXELS}
        rates = [schedule.learning_rate(c, epoch) for epoch in (0, 5, 149, 150, 225)]
        expected = [0.1, 0.1 * factor, 0.1 * factor, 0.01 * factor, 0.001 * factor]
        assert rates == pytest.approx(expected)


def test_the_defaults_of_the_published_program_are_a_preset_and_those_of_its_task() -> None:
    c = loaded("cifar10_resnet18", None)
    assert (c.task, c.optimizer, c.topology, c.n_workers) == ("Cifar", "all-reduce", "ring", None)
    assert (c.distributed_lr_warmup_epoch, c.distributed_lr_warmup_factor) == (5, 1)
    assert c.task_options == PIXELS
    alone = configuration_of("task=Cifar")
    for key in tasks.defaults("Cifar"):
        assert getattr(alone, key) == getattr(checked(c, Processes()), key), key
    assert (alone.task_architecture, alone.batch_size, alone.num_epochs) == ("ResNet18", 128, 300)
    assert alone.lr_schedule_milestones == [[150, 0.1], [250, 0.1]]
    assert (alone.learning_rate, alone.momentum, alone.weight_decay) == (0.1, 0.9, 1e-4)


def configuration_of(*given: str) -> Any:
    """The checked configuration of a command line."""
    config = OmegaConf.structured(train.Config)
    configuration.read_command_line(config, given, "")
    return checked(config, Processes())


# The published configurations of DGC.

DGC = {
    "optimizer": "dgc",
    "optimizer_keep_ratio": 0.001,
    "optimizer_sample_ratio": 0.01,
    "optimizer_compress_upper_bound": 1.3,
    "optimizer_compress_lower_bound": 0.8,
    "optimizer_max_adaptation_iterations": 10,
    "optimizer_momentum_masking": True,
    "optimizer_fp16_values": False,
    "optimizer_int32_indices": False,
    "optimizer_warmup_epochs": 0,
    "momentum": 0.9,
    "nesterov": False,
}
OF_CIFAR = {
    "batch_size": 128,
    "num_epochs": 200,
    "learning_rate": 0.1,
    "weight_decay": 1e-4,
    "lr_schedule": "cosine",
    "nesterov": False,
    "seed": 42,
    "drop_last": False,
}
OF_IMAGENET = {
    "num_epochs": 90,
    "lr_schedule": "milestones",
    "lr_schedule_milestones": [[30, 0.1], [60, 0.1], [80, 0.1]],
    "task_options": {"image_size": 224, "zero_init_residual": True},
}
IN_BITS = {"optimizer_fp16_values": True, "optimizer_int32_indices": True}
WARM = {"optimizer_warmup_epochs": 5}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("cifar/resnet110 dgc/wm0", OF_CIFAR | DGC | {"task_architecture": "ResNet110"}),
        ("cifar/resnet20 dgc/wm5 dgc/fp16 dgc/int32", OF_CIFAR | DGC | WARM | IN_BITS),
        (
            "cifar/resnet20 dgc/wm5o dgc/nm",
            DGC
            | WARM
            | {"optimizer_warmup_ratios": [1, 1, 1, 1, 1], "optimizer_momentum_masking": False},
        ),
        ("imagenet/resnet18", OF_IMAGENET | {"batch_size": 64, "weight_decay": 5e-5}),
        ("imagenet/resnet50 dgc/wm0", OF_IMAGENET | DGC | {"weight_decay": 1e-4}),
        (
            "imagenet/vgg16_bn imagenet/cosine",
            {"task_architecture": "VGG16BN", "lr_schedule": "cosine", "learning_rate": 0.0125},
        ),
    ],
)
def test_configurations_of_dgc_compose_as_published(names: str, wanted: dict[str, Any]) -> None:
    files = [part for name in names.split() for part in ("--config", name)]
    c = configuration_of(*files, "n_workers=4")
    values = c.as_dict()
    assert {key: values[key] for key in wanted} == wanted
    # From the rate of one worker to that of all of them, in five epochs.
    rates = [schedule.learning_rate(c, epoch) for epoch in (0, 2.5, 5)]
    assert rates == pytest.approx([c.learning_rate * factor for factor in (1, 2.5, 4)])


def test_wikitext2_is_as_published() -> None:
    c = loaded("wikitext2_lstm", None)
    assert (c.batch_size, c.num_epochs, c.momentum, c.weight_decay) == (64, 90, 0, 0)
    assert c.gradient_clipping == 0.4
    assert c.task_options == {
        "dataset": "wikitext2",
        "tokenizer": "spacy",
        "lower": True,
        "evaluation": "validation",
        "padding": True,
        "sequence_length": 30,
        "hidden_size": 650,
        "num_layers": 3,
        "dropout": 0.4,
    }
    assert c.drop_last is False
    assert c.distributed_lr_warmup_epoch == 5
    rates = [schedule.learning_rate(c, epoch) for epoch in (59, 60, 80)]
    assert rates == pytest.approx([47.5, 4.75, 0.475])
    for path in (FOLDER / "wikitext2_lstm").glob("power-gossip-rank-*.yaml"):
        c = loaded("wikitext2_lstm", path.stem)
        assert c.optimizer_rank * c.optimizer_num_iterations == 32
        assert c.optimizer_rank == int(path.stem.rpartition("-")[2])


@pytest.mark.long
@pytest.mark.parametrize("path", sorted((FOLDER / "gpt").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_gpt_has_as_many_parameters_as_its_preset_says(path: Path) -> None:
    (written,) = re.findall(r"([\d,]+) parameters", path.read_text("utf-8"))
    asked = {**loaded("gpt", path.stem).task_options}
    _, _, tokens = asked.pop("tokenizer").partition("-")
    shape = int(tokens or 256), asked.pop("sequence_length")
    with torch.device("meta"):
        model = language_models.GPT(shape, **asked)
    assert sum(p.numel() for p in model.parameters()) == int(written.replace(",", ""))


def test_consensus_grids_are_as_published() -> None:
    sweep = Sweep(loaded("consensus", "all"), Processes())
    counts = {name: len(settings) for name, settings in sweep.settings.items()}
    assert counts["power_gossip"] == counts["uncompressed"] == 1
    assert (counts["sign_choco"], counts["moniqua"]) == (20, 100)
    rates = [setting["diffusion_rate"] for setting in sweep.settings["sign_choco"]]
    assert (min(rates), max(rates)) == pytest.approx((1e-4, 1.308))


def test_relay_sgd_is_as_published() -> None:
    rates = {  # after the warm-up, for Dirichlet 0.1
        "all-reduce": 0.1,
        "relay-sgd": 0.6,
        "relay-sgd-momentum": 0.3,
        "relay-sgd-chain": 2.0,
        "relay-sgd-chain-momentum": 0.5,
        "dpsgd": 0.1,
        "quasi-global-momentum": 0.025,
        "exact-diffusion": 0.2,
        "push-sum-momentum": 0.1,
    }
    for method, rate in rates.items():
        c = loaded("cifar10_vgg11", method)
        assert (c.n_workers, c.batch_size, c.num_epochs, c.nesterov) == (16, 32, 200, True)
        assert (c.momentum, c.weight_decay) == (0.9 if "momentum" in method else 0, 1e-4)
        assert (c.reshuffle_data, c.overlapping, c.task_options.plain) == (False, False, True)
        if c.learning == "relay-sgd":
            assert c.learning_options == {"correction": 1}
            assert c.topology == ("chain" if "chain" in method else "double-binary-tree")
        found = [schedule.learning_rate(c, epoch) for epoch in (5, 149, 150, 180)]
        assert found == pytest.approx([rate, rate, 0.1 * rate, 0.01 * rate])


@pytest.mark.slow
def test_a_preset_of_relay_sgd_trains_on_files_of_cifar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "data", 10, n_train=160)
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", None)
    small = ["n_workers=2", "batch_size=4", "num_epochs=1", "max_steps_per_epoch=1"]
    small += [f"data_dir={tmp_path / 'data'}", "log_verbosity=0"]
    folder = tmp_path / "run"
    train.main(
        [*arguments("cifar10_vgg11", "relay-sgd-momentum"), *small, "--output-dir", str(folder)]
    )
    rows = metrics.load(folder)
    assert rows[(rows["name"] == "accuracy") & (rows["split"] == "test")]["value"].notna().all()


def test_consensus_steps_are_as_published() -> None:
    """The program is consensus_2.py: 5000 and 1000 steps, and factors by algorithm."""
    names = ("sign_choco", "uncompressed", "power_gossip_random", "topk_choco", "moniqua")
    for method, published in (
        ("all", (5000, 500, 5000, 5000, 5000)),
        ("faces", (1000, 100, 3000, 2000, 1000)),
    ):
        c = gossip_run.checked(loaded("consensus", method), Processes())
        assert tuple(num_steps(c, name) for name in names) == published


# They run, on small data.


@pytest.mark.long
def test_a_consensus_preset_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_run, "config", OmegaConf.structured(gossip_run.Config))
    monkeypatch.setattr(gossip_run, "output_dir", None)
    small = ["num_steps=20", "matrix_size=10", "log_verbosity=0"]
    gossip_run.main([*arguments("consensus", None), *small, "--output-dir", f"{tmp_path}/run"])
    errors = metrics.load(tmp_path / "run")
    of_all = errors[(errors["name"] == "error") & (errors["algorithm"] == "uncompressed")]["value"]
    assert of_all.iloc[-1] < 0.01 * of_all.iloc[0]
