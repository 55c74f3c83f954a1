"""Runs of train.py in this process, and their rows. Digits and a small MLP; a run takes 0.2 s."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip.network import Processes, processes
from powergossip.runs.metrics import Hooks
from powergossip.training import recorder
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer

TINY: dict[str, Any] = {
    "task_architecture": "MLP",
    "n_workers": 4,
    "num_epochs": 1,
    "log_verbosity": 0,
}


def trained(who: Any = None, **changes: Any) -> tuple[Trainer, pd.DataFrame]:
    """A run after training, and its rows; it leaves no files. who: see `built`."""
    rows: list[dict[str, Any]] = []
    run = built(recording(rows), who=who, **changes)
    run.train()
    return run, pd.DataFrame(rows)


def recording(rows: list[dict[str, Any]]) -> Hooks:
    """Hooks that add each row of metrics to a list."""

    def keep(name: str, values: Any, tags: Any) -> None:
        rows.append({"name": name, **values, **tags})

    return Hooks(log_metric=keep)


def built(
    hooks: Hooks | None = None,
    task: Any = None,
    who: Processes | None = None,
    resume_from: Path | None = None,
    **changes: Any,
) -> Trainer:
    """A run before its first step, in all processes of the test unless others are given."""
    config: Any = OmegaConf.merge(OmegaConf.structured(train.Config), TINY, changes)
    who = processes() if who is None else who
    return Trainer(checked(config, who), who, hooks, task=task, resume_from=resume_from)


def select(rows: pd.DataFrame, name: str, **tags: Any) -> pd.DataFrame:
    chosen = rows["name"] == name
    for key, value in tags.items():
        chosen &= rows[key] == value if key in rows else False
    return rows[chosen]


def value(rows: pd.DataFrame, name: str, **tags: Any) -> float:
    """The only row's value."""
    (found,) = select(rows, name, **tags)["value"]
    return float(found)


def reproducible(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of metrics without times, as dictionaries; what a row lacks is None."""
    kept = rows[rows["name"] != "phase_seconds"].drop(columns="seconds")
    records = kept.astype(object).where(kept.notna(), None).to_dict("records")
    return [{str(column): value for column, value in record.items()} for record in records]


def configured(**changes: Any) -> Any:
    config = OmegaConf.structured(train.Config)
    values = {"n_workers": 4, "task_architecture": "MLP", "log_verbosity": 0}
    for key, value in (values | changes).items():
        config[key] = value
    return config


def after_steps(steps: int = 24, **changes: Any) -> Trainer:
    """A run of one process after so many steps."""
    run = Trainer(checked(configured(**changes), Processes()), Processes())
    for t in range(steps):
        epoch, step = divmod(t, run.task.steps_per_epoch)
        run.execution.train_step(epoch, step)
    return run


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Call train.main(). Returns the rows that log_metric gets."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", None)
    default = train.log_metric
    with monkeypatch.context() as patch:

        def log_metric(name: str, values: Any, tags: Any) -> None:
            rows.append({"name": name, **values, **tags})
            default(name, values, tags)

        patch.setattr(train, "log_metric", log_metric)
        train.main(list(arguments))
    return rows


def run(folder: Path, changes: dict[str, Any]) -> None:
    """Run `train` in this process. Its configuration stays as it was for later tests."""
    torch.set_num_threads(1)
    config = OmegaConf.structured(train.Config)
    for key, value in changes.items():
        config[key] = value
    # A table and a figure take twice as long as these runs.
    with (
        patch.object(train, "config", config),
        patch.object(train, "output_dir", str(folder)),
        patch.object(recorder, "report"),
    ):
        train.main()
