"""Folders of runs, and their comparison, for tests of powergossip-compare."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from powergossip import compare
from powergossip.runs.metrics import FILE, MetricsLog

CONFIG = {
    **{"task": "Digits", "num_epochs": 3, "n_workers": 2, "seed": 1, "optimizer": "power-gossip"},
    **{"log_verbosity": 1, "overwrite": False},
}
ACCURACIES = (0.5, 0.75, 0.625)


def write_run(
    folder: Path,
    accuracies: Sequence[float] = ACCURACIES,
    bits: int = 8_000_000,
    name: str = "accuracy",
    progress: float | None = None,
    info: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run of train.py: worker 0 as good as the mean model, worker 1 worse by a tenth."""
    folder.mkdir(parents=True)
    values = {**CONFIG, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    done = len(accuracies) / values["num_epochs"] if progress is None else progress
    facts = {"state.progress": done, "metric": None, **(info or {})}
    (folder / "info.json").write_text(json.dumps(facts))
    log = MetricsLog(folder / FILE)
    for epoch, value in enumerate(accuracies, 1):
        numbers = {"epoch": epoch, "bits": bits * epoch, "messages": epoch, "seconds": 2.0 * epoch}

        def row(name: str, value: float, numbers: dict[str, Any] = numbers, **tags: Any) -> None:
            log.write(name, {"value": value, **numbers}, tags)

        for worker in range(2):
            row(name, value - 0.1 * worker, split="test", worker=worker)
        row(name, value, split="test_avg")
        row(name, 0.99, split="train")
        row("cross_entropy", 1 / epoch + 0.5, split="test", worker=0)
        row("cross_entropy", 1 / epoch, split="test_avg")
        row("cross_entropy", 2 / epoch, split="valid_avg")
        row("consensus_distance", 10.0**-epoch, type="params_only")
        row("consensus_distance", 5.0, type="full_state_vector")
        row("phase_seconds", 1.0, phase="data")
        row("phase_seconds", 2.0, phase="gradient")
    log.close()
    return folder


def write_sweep(folder: Path, seed: int = 42) -> Path:
    """A run of gossip_run.py: one algorithm, and one with two settings."""
    folder.mkdir(parents=True)
    config = {"n_workers": 4, "seed": seed, "algorithm": "all", "diffusion_rate": None}
    config |= {"log_verbosity": 1, "overwrite": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "info.json").write_text(json.dumps({"state.progress": 1.0}))
    log = MetricsLog(folder / FILE)
    for errors, tags in (
        ([8.0, 4.0, 2.0], {"algorithm": "plain"}),
        ([8.0, 1.0, 6.0], {"algorithm": "signs", "diffusion_rate": "0.5"}),
        ([8.0, 7.0, 7.0], {"algorithm": "signs", "diffusion_rate": "1.0"}),
    ):
        for step, error in enumerate(errors):
            numbers = {"epoch": step, "bits": 800 * step, "messages": step, "seconds": 0.1 * step}
            log.write("error", {"value": error, **numbers}, tags)
    log.close()
    return folder


def compared(*folders: Path, **options: Any) -> list[compare.Section]:
    return compare.sections([run for folder in folders for run in compare.read(folder)], **options)


def columns(section: compare.Section) -> dict[str, list[str]]:
    return {header: list(cells) for header, *cells in zip(*section.table(), strict=True)}
