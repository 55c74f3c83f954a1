"""evaluate_only=true: a checkpoint of a run is evaluated again, and the run stays as it is."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from powergossip.errors import BadInput
from powergossip.runs import metrics
from tests.harness.checkpoints import entry_of
from tests.harness.training import main, run

# The learning rate grows in the last epoch: the best checkpoint is an earlier one.
RUN: dict[str, Any] = {
    "task_architecture": "MLP",
    "n_workers": 4,
    "num_epochs": 3,
    "checkpoint_interval": 1,
    "log_verbosity": 0,
    "gradient_clipping": 1,
    "lr_schedule_milestones": [[2, 100]],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("run")
    run(folder, RUN)
    return folder


def times_below(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an evaluation, without times and empty tags."""
    kept = [r for r in rows if r["name"] != "phase_seconds" and r.get("split") != "train"]
    return [
        {key: value for key, value in row.items() if key != "seconds" and value == value}
        for row in kept
    ]


@pytest.mark.long
@pytest.mark.parametrize("which", ["last", "best"])
def test_the_rows_are_those_of_training_and_no_file_changes(
    which: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = times_below(finished)
    arguments = ["--output-dir", str(finished), "evaluate_only=true", f"checkpoint={which}"]
    rows = main(monkeypatch, *arguments)
    assert times_below(finished) == before
    entry = entry_of(finished, which)
    epoch = 3 * entry["step"] // entry_of(finished)["step"]
    assert (which == "last") == (epoch == 3)
    logged = metrics.load(finished)
    of_epoch = logged[logged["epoch"] == epoch].to_dict("records")
    assert comparable(rows) == comparable(of_epoch)
    assert len(comparable(rows)) == len(rows) > 10
    (mean,) = [r for r in rows if r["name"] == "accuracy" and r["split"] == "test_avg"]
    table = capsys.readouterr().out
    assert f"{mean['value']:.2%}" in table
    assert f"step {entry['step']}\n" in table


def test_other_data_may_be_evaluated(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = times_below(finished)
    keys = ["evaluate_only=true", "evaluate_training_data=true"]
    rows = main(monkeypatch, "--output-dir", str(finished), *keys)
    assert len([r for r in rows if r.get("split") == "train_full" and r["name"] == "accuracy"]) == 4
    assert times_below(finished) == before


@pytest.mark.parametrize("key", ["seed=2", "checkpoint=first"])
def test_what_cannot_be_evaluated_is_rejected(
    key: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = times_below(finished)
    with pytest.raises(BadInput, match=key):
        main(monkeypatch, "--output-dir", str(finished), "evaluate_only=true", key)
    assert times_below(finished) == before


@pytest.mark.parametrize("which", ["last", "best"])
def test_no_checkpoint_takes_the_place_of_a_damaged_one(
    which: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "checkpoints" / entry_of(folder, which)["folder"] / "part-0.pt").write_bytes(b"")
    with pytest.raises(BadInput, match=r"part-0\.pt is damaged"):
        main(monkeypatch, "--output-dir", str(folder), "evaluate_only=true", f"checkpoint={which}")
