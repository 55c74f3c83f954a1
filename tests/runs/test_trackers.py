"""Laws of trackers: they get the rows of metrics.jsonl by epoch, a resumed run continues, a tracker
that fails does not end the run. Those that are installed are tested for real."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

import train
from powergossip.errors import BadInput
from powergossip.runs import metrics, trackers
from powergossip.runs.output import Output
from powergossip.runs.trackers import Resumed, Scalar, Trackers


class Recorder:
    """A tracker that keeps what it gets. `broken`: the call that fails."""

    made: list["Recorder"] = []  # noqa: RUF012 for the test that reads it
    broken = ""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: Resumed | None):
        self.config, self.resumed = config, resumed
        self.steps: list[tuple[int, Sequence[Scalar]]] = []
        self.closed: bool | None = None
        self.facts: dict[str, Any] = {"id": f"run{len(Recorder.made)}"}
        if resumed is not None and "recorder" in resumed.facts:
            self.facts = dict(resumed.facts["recorder"])
        Recorder.made.append(self)
        self._fail("init")

    def _fail(self, call: str) -> None:
        if call == Recorder.broken:
            raise RuntimeError("no connection\nand more")

    def write(self, step: int, rows: Sequence[Scalar]) -> None:
        self._fail("write")
        self.steps.append((step, rows))

    def close(self, complete: bool) -> None:
        self._fail("close")
        self.closed = complete


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(trackers.TRACKERS, "recorder", (Recorder, "json", "loads", "recorder"))
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(Recorder, "broken", "")
    return Recorder


def config(*names: str, **more: Any) -> Any:
    values = {"overwrite": False, "tensorboard": False, "trackers": list(names), "seed": 1}
    values |= {"log_verbosity": 1, "n_workers": 1}  # of each run
    return {**values, **more}


def row(value: float, epoch: float) -> dict[str, float]:
    counts = {"bits": 8 * int(epoch), "messages": 1}
    return {"value": value, "epoch": epoch, "seconds": 2 * epoch, **counts}


def values_in(folder: Path) -> list[float]:
    return [json.loads(line)["value"] for line in (folder / metrics.FILE).read_text().splitlines()]


# --- All trackers ---------------------------------------------------------------------------------


def test_rows_of_an_epoch_are_passed_on_together(tmp_path: Path, recorder: type[Recorder]) -> None:
    output = Output(str(tmp_path), config("recorder"))
    (mine,) = recorder.made
    assert mine.config["seed"] == 1
    output.write("accuracy", row(0.5, 1), {"split": "test", "worker": 0})
    output.write("loss", row(2.0, 1), {})
    assert mine.steps == []
    output.add_info({"state.progress": 0.5})
    names = ["accuracy/split-test/worker-0", "loss"]
    assert [(step, [name for name, _ in rows]) for step, rows in mine.steps] == [(1000, names)]
    output.write("loss", row(1.0, 1.5), {})
    output.write("loss", row(0.5, 2), {})
    assert mine.steps[-1] == (1500, [("loss", row(1.0, 1.5))])
    output.close("complete")
    assert mine.steps[-1] == (2000, [("loss", row(0.5, 2))])
    assert mine.closed is True
    assert values_in(tmp_path) == [0.5, 2.0, 1.0, 0.5]


@pytest.mark.parametrize("ending", ["Diverged", "Interrupted"])
def test_a_resumed_run_is_the_same_run_of_the_tracker(
    tmp_path: Path, recorder: type[Recorder], ending: str
) -> None:
    first = Output(str(tmp_path), config("recorder"))
    first.write("loss", row(1.0, 1), {})
    offset = first.rows.offset()
    first.write("loss", row(0.5, 2), {})
    first.close(ending)
    info = json.loads((tmp_path / "info.json").read_text())
    assert info == {"trackers": {"recorder": {"id": "run0"}}, "state.ending": ending}
    again = Output(str(tmp_path), config("recorder"), offset)
    again.add_info({})
    assert recorder.made[0].closed is False
    resumed = recorder.made[1].resumed
    assert resumed is not None
    assert (resumed.epoch, resumed.facts) == (1.0, {"recorder": {"id": "run0"}})
    info = json.loads((tmp_path / "info.json").read_text())
    assert info == {"trackers": {"recorder": {"id": "run0"}}}
    again.close()


@pytest.mark.parametrize("broken", ["write", "close"])
def test_a_failing_tracker_does_not_end_the_run(
    tmp_path: Path, recorder: type[Recorder], broken: str
) -> None:
    recorder.broken = broken
    output = Output(str(tmp_path), config("recorder"))
    output.write("loss", row(1.0, 1), {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in (2, 3):
            output.write("loss", row(1.0, epoch), {})
        output.close("complete")
    (warning,) = caught
    assert "recorder" in str(warning.message)
    assert "no connection" in str(warning.message)
    assert values_in(tmp_path) == [1.0, 1.0, 1.0]


def test_a_tracker_that_cannot_begin_is_bad_input_and_changes_nothing(
    tmp_path: Path, recorder: type[Recorder]
) -> None:
    Output(str(tmp_path), config("recorder")).close("complete")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    recorder.broken = "init"
    with pytest.raises(ValueError, match=r"^trackers=\[recorder\]: no connection$"):
        Output(str(tmp_path), config("recorder", overwrite=True))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_tensorboard_true_is_an_alias() -> None:
    assert list(trackers.configured(config("wandb", tensorboard=True))) == ["tensorboard", "wandb"]
    assert list(trackers.configured(config("tensorboard", tensorboard=True))) == ["tensorboard"]
    assert trackers.configured({"tensorboard": False}) == {}


@pytest.mark.parametrize(
    ("key", "module", "package"),
    [
        ("tensorboard=true", "torch.utils.tensorboard", "tensorboard"),
        ("trackers=[tensorboard]", "torch.utils.tensorboard", "tensorboard"),
        ("trackers=[wandb]", "wandb", "wandb"),
        ("trackers=[mine]", "no_tracker", "no-tracker"),
    ],
)
def test_a_missing_package_is_bad_input_before_data_are_loaded(
    key: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder of the name is none: Weights & Biases itself makes a folder `wandb`, which
    Python can import."""
    (tmp_path / "no_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    mine = (Recorder, "no_tracker", "init", "no-tracker")
    monkeypatch.setitem(trackers.TRACKERS, "mine", mine)
    if module != "no_tracker":
        monkeypatch.setitem(sys.modules, module, None)  # the import then fails
    monkeypatch.setattr("powergossip.tasks.make", None)
    folder = tmp_path / "run"
    with pytest.raises(BadInput) as caught:
        train.main(["n_workers=2", key, "--output-dir", str(folder)])
    assert str(caught.value).startswith(f"{key}: ")
    assert f"pip install {package}" in str(caught.value)
    assert not folder.exists()


# --- Each tracker ---------------------------------------------------------------------------------


def test_tensorboard_gets_the_scalars_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = Trackers(tmp_path, config("tensorboard"))
    for epoch in (1, 1.5, 2):
        log.write("accuracy", row(epoch / 4, epoch), {"split": "test", "worker": 0})
    log.close(complete=False)
    log = Trackers(tmp_path, config("tensorboard"), Resumed(1.5, {}))
    log.write("accuracy", row(0.75, 2), {"split": "test", "worker": 0})
    log.close(complete=True)
    accumulator = accumulators.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    scalars = accumulator.Scalars("accuracy/split-test/worker-0")
    assert [(s.step, s.value) for s in scalars] == [(1000, 0.25), (1500, 0.375), (2000, 0.75)]


def test_wandb_continues_its_run_with_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the epoch on the horizontal axis. Offline, there is nothing to continue."""
    wandb = Mock()
    wandb.init.return_value.configure_mock(id="abc", url="https://x")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = Trackers(tmp_path / "run", config("wandb"))
    facts = log.facts
    assert facts == {"wandb": {"id": "abc", "url": "https://x"}}
    log.write("loss", row(0.5, 1), {})
    log.write("loss", row(0.25, 2), {"split": "test"})
    log.close(complete=False)
    calls = wandb.init.return_value.log.call_args_list
    axes = {"epoch": 1, "seconds": 2, "bits": 8, "messages": 1}
    assert calls[0] == call({"loss": 0.5, **axes}, step=1000, commit=True)
    assert calls[1].args[0]["loss/split-test"] == 0.25
    wandb.init.return_value.finish.assert_called_once_with(exit_code=1)
    for mode, resume in (("online", "allow"), ("offline", None)):
        monkeypatch.setenv("WANDB_MODE", mode)
        resumed = Resumed(1.0, facts)
        Trackers(tmp_path / "run", config("wandb"), resumed).close(complete=True)
        given = wandb.init.call_args.kwargs
        assert (given["id"], given["resume"], given["name"]) == ("abc", resume, "run")
        assert (given["project"], given["config"]["seed"]) == ("powergossip", 1)
