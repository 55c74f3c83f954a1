"""The presets: they load, are accepted, and have the published values."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

import gossip_run
import train
from powergossip import algorithms, presets
from powergossip.consensus import Sweep
from powergossip.network import Processes
from powergossip.runs import configuration, metrics
from powergossip.training import local_optimizers

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
    files = [FOLDER / f"{base}.yaml", *(FOLDER / base / f"{name}.yaml" for name in stack if name)]
    return [part for file in files for part in ("--config", str(file))]


def loaded(base: str, method: str | None, *more: str) -> DictConfig:
    config = OmegaConf.structured(module_of(base).Config)
    configuration.read_command_line(config, [*arguments(base, method), *more], "")
    return config


def test_there_are_presets_of_all_three_experiments() -> None:
    assert BASES == ["cifar10_resnet20", "consensus", "wikitext2_lstm"]
    found = {path.parent.name for path in FOLDER.glob("*/*.yaml")}
    assert found == set(BASES), "a folder of methods for each, no others"


@pytest.mark.parametrize(("base", "method"), COMBINATIONS)
def test_a_preset_is_accepted(base: str, method: str | None) -> None:
    config = loaded(base, method)
    processes = Processes()
    if str(config.get("optimizer")).startswith("ddp-"):
        processes.size = config.n_workers  # one worker per process
    checked = module_of(base).checked(config, processes)
    assert checked.topology == "ring"
    assert checked.n_workers == (16 if base == "wikitext2_lstm" else 8)
    text = configuration.changed(config)
    if method:
        assert text != configuration.changed(loaded(base, None)) or method == "dpsgd"


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: file.stem)
def test_a_preset_names_its_source(file: Path) -> None:
    comment = [line for line in file.read_text("utf-8").splitlines() if line.startswith("#")]
    assert "Source" in "\n".join(comment)
    assert max(map(len, file.read_text("utf-8").splitlines())) <= 100


@pytest.mark.parametrize("name", [*algorithms.AVERAGING, "powersgd", "dgc", "ddp-powersgd"])
def test_every_optimizer_has_a_preset(name: str) -> None:
    assert name in optimizers_of_presets()


@cache
def optimizers_of_presets() -> set[str]:
    return {loaded(*combination).get("optimizer") for combination in COMBINATIONS}


# f and γ of ALGORITHMS.md's table, and what else the row says.
@pytest.mark.parametrize(
    ("method", "factor", "rate", "more"),
    [
        ("all-reduce", 11.3, None, {}),
        ("dpsgd", 11.3, 1.308, {}),
        ("power-gossip", 11.3, 1.308, {"optimizer_rank": 1, "optimizer_num_iterations": 1}),
        (
            "power-gossip-2-iterations",
            11.3,
            1.308,
            {"optimizer_rank": 1, "optimizer_num_iterations": 2},
        ),
        ("choco-sign", 16, 0.45, {"optimizer_compressor": "sign-and-norm"}),
        ("choco-sign-untuned", 11.3, 1.308, {"optimizer_compressor": "sign-and-norm"}),
        ("choco-top-1", 11.3, 0.0375, {"optimizer_keep_ratio": 0.01}),
        ("deepsqueeze", 4.8, 0.01, {"optimizer_compressor": "sign-and-norm"}),
        ("moniqua", 4, 0.005, {"optimizer_theta": 0.25}),
        ("power-gossip-random", 11.3, 1.308, {"optimizer_warm_start": False}),
        ("power-gossip-2-iterations-random", 11.3, 1.308, {"optimizer_warm_start": False}),
        ("powersgd-rank-4", 11.3, None, {"optimizer_rank": 4}),
        ("dgc", 11.3, None, {"optimizer_keep_ratio": 0.001, "optimizer_warmup_epochs": 0}),
        ("dgc-warmup-5", 11.3, None, {"optimizer_keep_ratio": 0.001}),
        ("dgc-half-precision", 11.3, None, {"optimizer": "dgc", "optimizer_fp16_values": True}),
    ],
)
def test_cifar10_is_as_published(
    method: str, factor: float, rate: float | None, more: dict[str, Any]
) -> None:
    c = loaded("cifar10_resnet20", method)
    assert c.distributed_lr_warmup_factor == factor
    assert c.optimizer_diffusion_rate == rate
    assert {key: c[key] for key in more} == more
    assert (c.batch_size, c.num_epochs, c.momentum, c.nesterov) == (128, 300, 0.9, True)
    assert (c.weight_decay, c.reshuffle_data) == (1e-4, True)
    epochs = (0, 5, 149, 150, 225)
    expected = [0.1, 0.1 * factor, 0.1 * factor, 0.01 * factor, 0.001 * factor]
    assert [local_optimizers.learning_rate(c, epoch) for epoch in epochs] == pytest.approx(expected)


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
    rates = [local_optimizers.learning_rate(c, epoch) for epoch in (59, 60, 80)]
    assert rates == pytest.approx([47.5, 4.75, 0.475])
    for path in (FOLDER / "wikitext2_lstm").glob("power-gossip-rank-*.yaml"):
        c = loaded("wikitext2_lstm", path.stem)
        assert c.optimizer_rank * c.optimizer_num_iterations == 32
        assert c.optimizer_rank == int(path.stem.rpartition("-")[2])


def test_consensus_grids_are_as_published() -> None:
    c = gossip_run.checked(loaded("consensus", "all"), Processes())
    assert (c.hyperparameter_range_min, c.hyperparameter_range_max) == (1e-4, 1.308)
    sweep = Sweep(loaded("consensus", "all"), Processes())
    counts = {name: len(settings) for name, settings in sweep.settings.items()}
    assert counts["power_gossip"] == counts["uncompressed"] == 1
    assert (counts["sign_choco"], counts["moniqua"]) == (20, 100)


# They run, on small data.


@pytest.mark.parametrize(
    "method", ["power-gossip", "choco-sign", "powersgd-rank-2", "dgc-warmup-5"]
)
def test_a_cifar10_preset_learns_digits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["task=Digits", "task_architecture=MLP", "batch_size=16", "num_epochs=2"]
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", None)
    gentle = ["distributed_lr_warmup_factor=1", "log_verbosity=0"]
    train.main(
        [*arguments("cifar10_resnet20", method), *small, *gentle, "--output-dir", f"{tmp_path}/run"]
    )
    rows = metrics.load(tmp_path / "run")
    accuracy = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]["value"]
    assert accuracy.iloc[-1] > 0.5


def test_a_consensus_preset_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_run, "config", OmegaConf.structured(gossip_run.Config))
    monkeypatch.setattr(gossip_run, "output_dir", None)
    small = ["num_steps=20", "matrix_size=10", "log_verbosity=0", "--suffix", ".small"]
    gossip_run.main([*arguments("consensus", None), *small, "--output-dir", f"{tmp_path}/run"])
    errors = metrics.load(tmp_path / "run.small")
    of_all = errors[(errors["name"] == "error") & (errors["algorithm"] == "uncompressed")]["value"]
    assert of_all.iloc[-1] < 0.01 * of_all.iloc[0]
