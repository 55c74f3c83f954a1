"""The experiment with a slow host, from rows to the table, and gradients of given lengths."""

import csv
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

import train
from experiments import slow_gradients, slow_host, study
from powergossip.checks import BadValue
from powergossip.runner.runner import Run
from powergossip.runs import metrics

EVALUATION = 3.0  # seconds
FIRST = {"synchronous": 0.2, "bounded, 1": 0.1, "asynchronous": 0.05}  # seconds of a step


def results(run: Run) -> pd.DataFrame:
    """Rows as they would be if the perplexity was 80, and 8 less with every epoch."""
    step = FIRST[run.labels["gossip"]]
    rows: list[dict[str, Any]] = []
    for epoch in range(1, run.values["num_epochs"] + 1):
        seconds = 40 * step * epoch + EVALUATION * epoch
        at = {"epoch": epoch, "seconds": seconds}
        phase = at | {"name": "phase_seconds"}
        rows += [
            at | {"name": "perplexity", "split": "test_avg", "value": 80 - 8.0 * epoch},
            phase | {"phase": "gradient", "value": 0.4 * epoch, "instances": 40 * epoch},
            phase | {"phase": "evaluation", "value": EVALUATION * epoch, "instances": epoch},
        ]
    return pd.DataFrame(rows)


@pytest.mark.long
def test_from_rows_to_the_table(tmp_path: Path) -> None:
    slow_host.experiment().report(results, tmp_path)
    rows = list(csv.reader((tmp_path / "table.csv").open()))[1:]
    assert len(rows) == 2 * 3
    for row in rows:
        step = FIRST[row[1]]
        assert float(row[2]) == pytest.approx(1 / step)
        assert float(row[3]) == pytest.approx(0.2 / step)
        assert float(row[4]) == pytest.approx(6 * 40 * step)  # all evaluations
        assert float(row[6]) == 32
        assert row[7] == "10"
    assert "asynchronous" in (tmp_path / "figure.svg").read_text()


def test_the_time_to_a_target_is_interpolated() -> None:
    curve = [1.0, 2.0, 4.0], [50.0, 40.0, 20.0]
    assert study.time_to(60.0, *curve) == 1.0
    assert study.time_to(25.0, *curve) == pytest.approx(3.5)
    with pytest.raises(ValueError, match="10"):
        study.time_to(10.0, *curve)


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["gossip=asynchronous"]])
def test_gradients_take_the_given_time(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    given = ["task_architecture=MLP", "n_workers=2", "num_epochs=1", "max_steps_per_epoch=4"]
    given += ["log_verbosity=0", "--output-dir", str(tmp_path / "run")]
    start = time.monotonic()
    slow_gradients.main(["pace=[0.02,0.1]", *given, *more])
    assert time.monotonic() - start >= 4 * 0.12
    assert not metrics.load(tmp_path / "run").empty


def test_without_a_pace() -> None:
    with pytest.raises(BadValue, match="pace"):
        slow_gradients.main(["task=Digits"])
