"""A run that was killed goes on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

import train
from powergossip import network
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.compressors import COMPRESSORS
from powergossip.errors import BadInput, Interrupted
from powergossip.network import Processes
from powergossip.runs import checkpoints, metrics
from powergossip.runs.checkpoints import Checkpoints
from tests.launch import python

# Children begin as copies of a process that has imported everything: a start takes no seconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train"])

SMALL: dict[str, Any] = {
    "n_workers": 4,
    "task_architecture": "MLP",
    "batch_size": 64,
    "num_epochs": 4,
    "checkpoint_interval": 1,
    "log_verbosity": 0,
    "distributed_lr_warmup_epoch": 1.0,
    "lr_schedule_milestones": [[3, 0.1]],
}  # 5 steps an epoch
STEPS = 20
CASES: list[dict[str, Any]] = [
    *({"optimizer": name} for name in AVERAGING if name not in ("choco", "deepsqueeze")),
    *({"optimizer": name, "optimizer_keep_ratio": 0.1} for name in AGGREGATIONS),
    {"optimizer": "powersgd", "optimizer_num_iterations": 3, "gradient_clipping": 1.0},
    {"optimizer": "powersgd", "optimizer_rank": 2, "optimizer_num_batches_per_step": 3},
    {"optimizer": "dgc", "optimizer_num_batches_per_step": 2, "optimizer_warmup_epochs": 1},
    *(
        {
            "optimizer": name,
            "optimizer_compressor": compressor,
            "optimizer_keep_ratio": 0.1,
            "optimizer_diffusion_rate": 0.1,
        }
        for name in ("choco", "deepsqueeze")
        for compressor in COMPRESSORS
    ),
    {"optimizer_rank": 2, "optimizer_num_iterations": 1},
    {"optimizer_rank": 4, "optimizer_warm_start": False},
    {"optimizer_round_weights": True, "topology": "star"},
    {"topology": "round-robin", "optimizer_num_iterations": 1},
    {"optimizer": "moniqua", "topology": "one-peer-exponential"},
    {"local_optimizer": "adamw", "learning_rate": 0.003},
    {"local_steps": 3, "gradient_clipping": 0.5, "overlapping": False},
    {"task_architecture": "ResNet20", "batch_size": 179, "num_epochs": 3},
    {
        "task": "LSTM",
        "task_architecture": "LSTM",  # carries its hidden state from batch to batch; dropout
        "task_options": {"hidden_size": 16, "num_layers": 2},
        "gradient_clipping": 0.4,
        "optimizer": "choco",
        "optimizer_diffusion_rate": 0.1,
    },
]


WITHIN_AN_EPOCH = [
    {},
    {"local_steps": 3, "topology": "round-robin", "optimizer_num_iterations": 1},
    next(case for case in CASES if case.get("task") == "LSTM"),
]


def label(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def run(folder: Path, changes: dict[str, Any], kill: Callable[[], None] | None = None) -> None:
    """Train in this process; `kill` is called before it starts."""
    if kill is not None:
        kill()
    torch.set_num_threads(1)
    train.config = OmegaConf.structured(train.Config)
    for key, value in changes.items():
        train.config[key] = value
    train.output_dir = str(folder)
    train.main()


def killed(folder: Path, changes: dict[str, Any], kill: Callable[[], None]) -> None:
    """Train in a process that `kill` arranges the end of, by SIGKILL."""
    child = processes.Process(target=run, args=(folder, changes, kill))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


class AtStep:
    """Die in the middle of a step."""

    def __init__(self, step: int):
        self.step = step

    def __call__(self) -> None:
        original = train._Run._gradient

        def gradient(run: Any, epoch: int, step: int) -> Any:
            found = original(run, epoch, step)
            if run.step == self.step:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        train._Run._gradient = gradient  # type: ignore[method-assign,assignment]


class WhileWriting:
    """Die in the second checkpoint: in a part of it, or when only the index is missing."""

    def __init__(self, what: str):
        self.what = what

    def __call__(self) -> None:
        count = 0
        original = getattr(checkpoints, self.what)

        def die(path: Path, *arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                if self.what == "_write_part":
                    path.write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path, *arguments)

        setattr(checkpoints, self.what, die)


def end_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint."""
    state: dict[str, Any] = Checkpoints(folder, Processes()).load(range(4))
    return state


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Without what the clock says."""
    lines = (folder / metrics.FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["seconds"]
    return [row for row in rows if row["name"] != "phase_seconds"]


def assert_same(one: Any, other: Any) -> None:
    """To the bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key not in ("seconds", "phases"):
                assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_killed_run_goes_on_to_the_bit(case: dict[str, Any], tmp_path: Path) -> None:
    changes = SMALL | case
    run(tmp_path / "whole", changes)
    steps = end_of(tmp_path / "whole")["step"]
    step = random.Random(label(case)).randrange(int(steps // 3), int(steps))
    killed(tmp_path / "killed", changes, AtStep(step))
    before = rows_of(tmp_path / "killed")
    assert len(before) < len(rows_of(tmp_path / "whole"))
    run(tmp_path / "killed", changes | {"resume": True})
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert_same(end_of(tmp_path / "killed"), end_of(tmp_path / "whole"))


@pytest.mark.parametrize("case", WITHIN_AN_EPOCH, ids=label)
def test_a_run_that_is_stopped_within_an_epoch_goes_on_to_the_bit(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = SMALL | case
    run(tmp_path / "whole", changes)
    with monkeypatch.context() as patch:
        at_eight = lambda run: signal.SIGUSR1 if run.step == 8 else None  # noqa: E731
        patch.setattr(train._Run, "_asked_to_stop", at_eight)
        with pytest.raises(Interrupted, match="stopped by SIGUSR1 after step 8 "):
            run(tmp_path / "stopped", changes)
    found = Checkpoints(tmp_path / "stopped", Processes()).describe()
    assert found is not None
    assert found["step"] == 8
    run(tmp_path / "stopped", changes | {"resume": True})
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")
    assert_same(end_of(tmp_path / "stopped"), end_of(tmp_path / "whole"))


@pytest.mark.parametrize("what", ["_write_part", "_sync"])
def test_killed_while_a_checkpoint_is_written(what: str, tmp_path: Path) -> None:
    """The one before is used, and the half one is removed."""
    run(tmp_path / "whole", SMALL)
    killed(tmp_path / "killed", SMALL, WhileWriting(what))
    found = Checkpoints(tmp_path / "killed", Processes()).describe()
    assert found is not None
    assert found["step"] < STEPS
    run(tmp_path / "killed", SMALL | {"resume": True})
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert_same(end_of(tmp_path / "killed"), end_of(tmp_path / "whole"))
    kept = {path.name for path in (tmp_path / "killed" / checkpoints.FOLDER).iterdir()}
    index = json.loads((tmp_path / "killed" / checkpoints.FOLDER / "index.json").read_text())
    assert kept == {"index.json", index["last"]["folder"], index["best"]["folder"]}


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", SMALL)
    killed(tmp_path / "killed", SMALL, AtStep(2))
    run(tmp_path / "killed", SMALL | {"resume": True})
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


def test_rows_of_another_run_without_checkpoints_are_kept(tmp_path: Path) -> None:
    killed(tmp_path, SMALL | {"evaluation_interval": 1, "checkpoint_interval": 4}, AtStep(12))
    assert not (tmp_path / checkpoints.FOLDER).exists()
    assert rows_of(tmp_path)
    text = refused(tmp_path, topology="star")
    assert "cannot go on with topology=star (was ring)" in text


def test_resume_where_nothing_is_begins(tmp_path: Path) -> None:
    """So that a job that is put back into the queue needs one command only."""
    run(tmp_path / "new", SMALL | {"resume": True})
    run(tmp_path / "whole", SMALL)
    assert rows_of(tmp_path / "new") == rows_of(tmp_path / "whole")


def test_a_finished_run_can_be_prolonged(tmp_path: Path) -> None:
    run(tmp_path / "whole", SMALL)
    run(tmp_path / "short", SMALL | {"num_epochs": 2})
    short = rows_of(tmp_path / "short")
    run(tmp_path / "short", SMALL | {"resume": True})
    assert rows_of(tmp_path / "short") == rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "short")[: len(short)] == short
    run(tmp_path / "short", SMALL | {"resume": True})  # nothing is left to do
    assert rows_of(tmp_path / "short") == rows_of(tmp_path / "whole")


def test_time_goes_on_too(tmp_path: Path) -> None:
    run(tmp_path, SMALL | {"num_epochs": 2})
    before = metrics.load(tmp_path)
    run(tmp_path, SMALL | {"resume": True})
    after = metrics.load(tmp_path)
    assert after["seconds"].is_monotonic_increasing
    for phase in ("gradient", "averaging", "communication"):
        spent = after[(after["name"] == "phase_seconds") & (after["phase"] == phase)]["value"]
        assert spent.is_monotonic_increasing
        assert spent.iloc[-1] > before[before["phase"] == phase]["value"].iloc[-1]


def test_the_best_is_kept(tmp_path: Path) -> None:
    run(tmp_path, SMALL | {"momentum": 0.0, "lr_schedule_milestones": [[2, 60]]})
    rows = metrics.load(tmp_path)
    mean = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
    best = mean.sort_values("value", kind="stable").iloc[-1]
    found = Checkpoints(tmp_path, Processes())
    entry, last = found.describe("best"), found.describe("last")
    assert entry is not None
    assert last is not None
    assert entry["score"] == best["value"]
    assert entry["step"] == 5 * best["epoch"] < last["step"] == STEPS
    assert found.load(range(2, 3), "best")["x"].shape[0] == 1


# --- Signals, and other layouts -------------------------------------------------------------------


def command(folder: Path, *more: str) -> list[str]:
    changes = [f"{key}={value}".replace(" ", "") for key, value in SMALL.items()]
    return ["train.py", *changes, "--output-dir", str(folder), *more]


DRIVER = """
import os, signal, time
import train
from powergossip.runs import configuration
original = train._Run._gradient
def gradient(run, epoch, step):
    if run.step == 7 and run.who.rank == run.who.size - 1 and not run.config.resume:
        os.kill(os.getpid(), signal.{name})
    time.sleep(0.05)  # not done before process 0 asks the others
    return original(run, epoch, step)
train._Run._gradient = gradient
configuration.run_entry_point(train.main)
"""


@pytest.mark.parametrize(("name", "layout"), [("SIGTERM", 1), ("SIGUSR1", 2), ("SIGUSR1", 4)])
def test_a_signal_ends_a_run_that_goes_on_in_another_layout(
    name: str, layout: int, tmp_path: Path
) -> None:
    """In the middle of an epoch. A signal to one process of several is known to all."""
    run(tmp_path / "whole", SMALL)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(name=name))
    arguments = command(tmp_path / "stopped")[1:]
    result = python(driver, *arguments, processes=layout)
    assert result.returncode == 128 + getattr(signal, name)
    assert f"error: stopped by {name} after step" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: stopped by") == 1
    stopped = Checkpoints(tmp_path / "stopped", Processes()).describe()
    assert stopped is not None
    assert 8 <= stopped["step"] < STEPS
    again = python(*command(tmp_path / "stopped", "resume=true"), processes=4 // layout)
    assert again.returncode == 0, again.stderr
    ours, whole = end_of(tmp_path / "stopped"), end_of(tmp_path / "whole")
    torch.testing.assert_close(ours["x"], whole["x"], atol=1e-4, rtol=1e-4)
    assert torch.equal(ours["network"]["bits"], whole["network"]["bits"])
    for row, expected in zip(
        rows_of(tmp_path / "stopped"), rows_of(tmp_path / "whole"), strict=True
    ):
        assert row == expected | {"value": pytest.approx(expected["value"], rel=1e-2, abs=1e-4)}


# --- Bad input ------------------------------------------------------------------------------------


def refused(folder: Path, **changes: Any) -> str:
    """What a run that goes on says; nothing of the folder may change."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput) as caught:
        run(folder, SMALL | {"resume": True} | changes)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("finished")
    run(folder, SMALL)
    return folder


def test_another_config(finished: Path) -> None:
    text = refused(finished, topology="star", learning_rate=0.3)
    assert "cannot go on with learning_rate=0.3 (was 0.05), topology=star (was ring)" in text
    assert "n_workers=8 (was 4)" in refused(finished, n_workers=8)


def test_another_model(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powergossip.tasks import models

    class Wider(models.MLP):
        def __init__(self, shape: Any, n_labels: int, **options: Any) -> None:
            super().__init__(shape, n_labels, hidden=130)

    monkeypatch.setitem(models.ARCHITECTURES, "MLP", Wider)
    text = refused(finished)
    assert "is of another model: its workers have 26122 numbers (x), not 26790" in text


def test_no_folder() -> None:
    train.config = OmegaConf.structured(train.Config)
    train.config.resume = True
    train.output_dir = None
    with pytest.raises(BadInput, match="resume=true: say with --output-dir which run"):
        train.main()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "index"])
def test_a_damaged_checkpoint(damage: str, tmp_path: Path) -> None:
    run(tmp_path, SMALL)
    (part,) = {path for path in tmp_path.rglob("part-0.pt") if "000020" in str(path)}
    octets = part.read_bytes()
    if damage == "cut":
        part.write_bytes(octets[:1000])
        assert f"has 1000 bytes, not {len(octets)}" in refused(tmp_path)
    elif damage == "changed":
        part.write_bytes(octets[:2000] + bytes([octets[2000] ^ 1]) + octets[2001:])
        assert "its SHA-256 is another" in refused(tmp_path)
    elif damage == "missing":
        part.unlink()
        assert "cannot be read: No such file" in refused(tmp_path)
    else:
        (tmp_path / "checkpoints" / "index.json").write_text('{"version": 1, "la')
        assert "index.json is damaged" in refused(tmp_path)


def test_rows_that_are_not_of_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, SMALL)
    (tmp_path / metrics.FILE).write_text("")
    assert "it is not the file of this run" in refused(tmp_path)


def test_a_run_is_not_overwritten_for_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(BadInput, match=r"already holds a run \(checkpoints\)"):
        run(tmp_path, SMALL)
    run(tmp_path, SMALL | {"overwrite": True, "num_epochs": 1})
    found = Checkpoints(tmp_path, Processes()).describe()
    assert found is not None
    assert found["step"] == 5


LIMITED = """
import resource, signal, sys
import train
from powergossip.runs import configuration
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
original = train._Run._save
def save(run, position, score=None):
    if position[0] == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    original(run, position, score)
train._Run._save = save
configuration.run_entry_point(train.main)
"""


def test_no_space_left(tmp_path: Path) -> None:
    """One clear sentence, and the checkpoint before is as it was."""
    driver = tmp_path / "driver.py"
    driver.write_text(LIMITED)
    result = python(driver, *command(tmp_path / "run")[1:])
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "part-0.pt cannot be written: File too large; make room" in line
    assert "Traceback" not in result.stderr
    found = Checkpoints(tmp_path / "run", Processes()).describe()
    assert found is not None
    assert found["step"] == 10
    run(tmp_path / "run", SMALL | {"resume": True})
    run(tmp_path / "whole", SMALL)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


ROWS_LIMITED = """
import resource, signal
import train
from powergossip.runs import configuration
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
original = train._Run.train
def limited(run):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))
    original(run)
train._Run.train = limited
configuration.run_entry_point(train.main)
"""


@pytest.mark.parametrize("n_processes", [None, 2])
def test_no_space_left_for_rows(n_processes: int | None, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(ROWS_LIMITED)
    result = python(driver, *command(tmp_path / "run")[1:], processes=n_processes)
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert f"output folder {tmp_path / 'run'}: File too large; what is there is kept" in line
    assert "Traceback" not in result.stderr
    assert not metrics.load(tmp_path / "run").empty


# --- By itself ------------------------------------------------------------------------------------


@pytest.mark.parallel(nprocs=[1, 2, 4])
def test_workers_find_their_rows_in_any_layout(tmp_path: Path) -> None:
    who = network.processes()
    shared = Path(who.broadcast(str(tmp_path)))
    hosted = 8 // who.size
    workers = range(who.rank * hosted, (who.rank + 1) * hosted)
    mine = torch.tensor(workers)
    state = {
        "rows": mine[:, None] * torch.ones(3),
        "deep": [{"a": mine * 2}, "word", None, 3, torch.tensor(7.0)],
    }
    kept = Checkpoints(shared, who)
    assert kept.describe() is None
    kept.save(1, workers, state, {"fact": 1}, score=2.0)
    kept.save(2, workers, state, {"fact": 2}, score=1.0)
    best, last = kept.describe("best"), kept.describe()
    assert best is not None
    assert last is not None
    assert (best["step"], best["facts"], best["score"]) == (1, {"fact": 1}, 2.0)
    assert (last["step"], last["facts"], last["score"]) == (2, {"fact": 2}, 1.0)
    for wanted in (range(8), range(3, 5), workers):
        loaded = kept.load(wanted)
        assert loaded["rows"][:, 0].tolist() == list(wanted)
        assert loaded["deep"][0]["a"].tolist() == [2 * i for i in wanted]
        assert loaded["deep"][1:4] == ["word", None, 3]
        assert loaded["deep"][4] == 7
