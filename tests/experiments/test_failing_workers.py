"""The experiments on workers that fail, on Digits and with a few methods."""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import EXPERIMENTS, a2cid2, failing_workers
from experiments.study import SEEDS
from powergossip.runner.runner import Experiment, Run
from tests.harness.training import trained

pytestmark = pytest.mark.usefixtures("fresh")

SMALL: dict[str, Any] = {
    "task": "Digits",
    "task_architecture": "MLP",
    "n_workers": 8,
    "num_epochs": 2,
    "batch_size": 32,
    "distributed_lr_warmup_epoch": 0.0,
    "reshuffle_data": False,
}


@cache
def _rows(identity: str, values: tuple[tuple[str, Any], ...]) -> pd.DataFrame:
    return trained(**{key: value for key, value in values if key != "task"})[1]  # Digits


def results(run: Run) -> pd.DataFrame:
    return _rows(run.identity, _Hashable(run.values.items()))


class _Hashable(tuple[tuple[str, Any], ...]):
    def __hash__(self) -> int:
        return 0


def reported(experiment: Experiment, folder: Path) -> list[Run]:
    (stage,) = experiment.stages
    runs = stage(results)
    experiment.report(results, folder)
    assert (folder / "figure.svg").stat().st_size > 1000
    assert len((folder / "table.csv").read_text().splitlines()) == 1 + len(methods(runs))
    return runs


def methods(runs: list[Run]) -> set[str]:
    return {run.labels["method"] for run in runs}


@pytest.mark.long
def test_runs_that_diverged_before_their_first_evaluation_are_in_the_table(tmp_path: Path) -> None:
    start = {"name": "workers", "value": 8, "epoch": 0, "bits": 0, "messages": 0, "seconds": 0.0}
    last = {"name": "accuracy", "split": "test_avg", "value": 0.5, "epoch": 5, "seconds": 9.0}

    def results(run: Run) -> pd.DataFrame:
        learns = run.labels["method"] == "D-PSGD"
        return pd.DataFrame(
            [start, last | {"epoch": run.values["num_epochs"]}] if learns else [start]
        )

    for made in (failing_workers.message_loss(), failing_workers.churn()):
        made.report(results, tmp_path)
        _, learned, *others = (tmp_path / "table.csv").read_text().splitlines()
        assert len(others) >= 3
        assert "diverged" not in learned
        assert all("diverged," in line and "±" not in line for line in others)


@pytest.mark.slow
def test_message_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        name: failing_workers.METHODS[name] for name in ("D-PSGD", "push-sum", "RelaySGD, chain")
    }
    monkeypatch.setattr(failing_workers, "METHODS", few)
    runs = reported(failing_workers.message_loss(SMALL), tmp_path)
    assert len(runs) == 3 * 5


@pytest.mark.slow
def test_late_exchanges(tmp_path: Path) -> None:
    runs = reported(failing_workers.late_exchanges(SMALL, seeds=(1,)), tmp_path)
    assert len(runs) == 4 * 3
    seconds = {run.labels["case"]: results(run)["seconds"].max() for run in runs[:3]}
    assert seconds["asynchronous"] < seconds["synchronous"] / 2
    assert seconds["asynchronous"] <= seconds["bounded, 4"] <= seconds["synchronous"]


@pytest.mark.long
def test_churn(tmp_path: Path) -> None:
    runs = reported(failing_workers.churn(SMALL, (1,), first=2.0, last=8.0), tmp_path)
    assert len(runs) == 4 * 2
    rows = results(runs[0])
    assert rows[rows["name"] == "workers"]["value"].iloc[-1] == 6


@pytest.mark.long
def test_a2cid2(tmp_path: Path) -> None:
    few = a2cid2.VALUES | SMALL | {"num_epochs": 1}
    made = a2cid2.experiment(few, rates=(1e-6, 0.1), seeds=(1,))
    tuned, _, compared = (stage(results) for stage in made.stages)
    assert len(tuned) == 2 * 2
    assert [run.values["learning_rate"] for run in compared] == [0.1, 0.1]
    made.report(results, tmp_path)
    header, *methods = (tmp_path / "table.csv").read_text().splitlines()
    assert (header.count("(%)"), len(methods)) == (2, 2)
    assert [float(results(run)["messages"].max()) > 0 for run in compared] == [True, True]


@pytest.mark.long
def test_runs_of_the_experiments_are_accepted() -> None:
    """A third of the cases, with the values of the command line."""
    from omegaconf import OmegaConf

    import train
    from powergossip.network import processes
    from powergossip.training.config_checks import checked

    for name in ("message_loss", "late_exchanges", "churn", "a2cid2"):
        stage, *_ = EXPERIMENTS[name].stages
        for run in stage(results)[:: 3 * len(SEEDS)]:
            config = OmegaConf.merge(OmegaConf.structured(train.Config), dict(run.values))
            checked(config, processes())  # type: ignore[arg-type]
