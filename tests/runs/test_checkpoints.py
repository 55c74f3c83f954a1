"""A run that was killed resumes as if nothing had happened."""

import json
import random
import shlex
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip import network
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.compressors import COMPRESSORS
from powergossip.errors import BadInput, Interrupted
from powergossip.network import Processes
from powergossip.runs import checkpoints, metrics
from powergossip.runs.checkpoints import Checkpoints
from powergossip.tasks import models
from powergossip.training import recorder
from powergossip.training.ending import Agreement
from tests.harness.checkpoints import assert_same, end_of, entry_of
from tests.harness.helpers import DAMAGES, damage
from tests.harness.launch import Completed, python
from tests.harness.training import run

SMALL: dict[str, Any] = {
    "n_workers": 4,
    "task_architecture": "MLP",
    "batch_size": 64,
    "drop_last": True,
    "num_epochs": 4,
    "checkpoint_interval": 1,
    "log_verbosity": 0,
    "distributed_lr_warmup_epoch": 1.0,
    "lr_schedule_milestones": [[3, 0.1]],
}  # 5 steps an epoch
STEPS = 20
# Each kind of state once. A new averaging rule or aggregation has its case without further ado; in
# tests/training, test_trials.py and test_elastic.py have the state of each.
LOSSY = {"optimizer_keep_ratio": 0.1, "optimizer_diffusion_rate": 0.1}
COMPRESSED: dict[str, list[str]] = {  # optimizer: compressors
    "choco": ["random-k"],  # positions from a random stream
    "deepsqueeze": ["qsgd"],  # rounding from a random stream
}
CASES: list[dict[str, Any]] = [
    {"optimizer": "power-gossip"},
    *(
        {"optimizer": name, "optimizer_compressor": compressor, **LOSSY}
        for name, compressors in COMPRESSED.items()
        for compressor in compressors
    ),
    {
        "optimizer": "ef-sgd",
        "optimizer_compressor": "random-k",
        "optimizer_keep_ratio": 0.1,
        "optimizer_momentum_before_compression": True,
    },
    # a step of several batches, whose mean is compressed; an increasing ratio
    {"optimizer": "dgc", "optimizer_num_batches_per_step": 2, "optimizer_warmup_epochs": 1},
    {"topology": "round-robin", "optimizer_num_iterations": 1},  # neighbors depend on the step
    {"local_optimizer": "adamw", "learning_rate": 0.003},
    {"local_optimizer": "muon", "learning_rate": 0.003},
    {"optimizer": "sparse-loco", "local_steps": 3, "local_optimizer": "adamw"},  # within a round
    {"local_steps": 3, "gradient_clipping": 0.5, "overlapping": False},
    # buffers of batch norm, also whole numbers
    {"task_architecture": "ResNet20", "n_workers": 2, "max_steps_per_epoch": 3},
    {
        "task": "LSTM",
        "task_architecture": "LSTM",  # carries its hidden state from batch to batch; dropout
        "task_options": {"hidden_size": 16, "num_layers": 2, "min_count": 20},
        "n_workers": 2,
        "batch_size": 16,
        "max_steps_per_epoch": 3,
        "gradient_clipping": 0.4,
        "optimizer": "choco",
        "optimizer_diffusion_rate": 0.1,
    },
]
OTHER_CASES: list[dict[str, Any]] = [
    *({"optimizer": name} for name in AVERAGING if name not in ("power-gossip", *COMPRESSED)),
    *({"optimizer": name, "optimizer_keep_ratio": 0.1} for name in AGGREGATIONS),
    *(
        {"optimizer": name, "optimizer_compressor": compressor, **LOSSY}
        for name, covered in COMPRESSED.items()
        for compressor in COMPRESSORS
        if compressor not in covered
    ),
    {"optimizer": "all-reduce", "optimizer_bits": 2, "learning": "diloco", "local_steps": 3},
    {"optimizer": "powersgd", "optimizer_num_iterations": 3, "gradient_clipping": 1.0},
    {"optimizer": "powersgd", "optimizer_rank": 2, "optimizer_num_batches_per_step": 3},
    {"optimizer_rank": 2, "optimizer_num_iterations": 1},
    {"optimizer_rank": 4, "optimizer_warm_start": False},
    {"optimizer_round_weights": True, "topology": "star"},
    {"optimizer": "moniqua", "topology": "one-peer-exponential"},
]
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_CASES)]


def label(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def killed(folder: Path, changes: dict[str, Any], point: str, count: int) -> None:
    """Train in a process that kills itself; see tests/harness/failing.py."""
    event = {"process": 0, "point": point, "count": count, "signal": "SIGKILL"}
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    plan = json.dumps({"events": [event], "report": False})
    ended = python("tests/harness/failing.py", plan, folder, *words)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows, without times."""
    lines = (folder / metrics.FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["seconds"]
    return [row for row in rows if row["name"] != "phase_seconds"]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Rows and the last checkpoint, to the bit."""
    assert rows_of(one) == rows_of(other)
    assert_same(end_of(one), end_of(other))


@pytest.mark.parametrize("case", ALL_CASES, ids=label)
def test_a_run_that_is_stopped_within_an_epoch_resumes_to_the_bit(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = SMALL | {"num_epochs": 2, "lr_schedule_milestones": [[1, 0.1]]} | case
    run(tmp_path / "whole", changes)
    steps = int(end_of(tmp_path / "whole")["step"]) // 2  # of an epoch
    stop = random.Random(label(case)).choice([n for n in range(1, 2 * steps) if n != steps])
    with monkeypatch.context() as patch:
        ended = lambda agreement, step, received: signal.SIGUSR1 if step == stop else None  # noqa: E731
        patch.setattr(Agreement, "after_step", ended)
        with pytest.raises(Interrupted, match=f"SIGUSR1 after step {stop} "):
            run(tmp_path / "stopped", changes)
    assert entry_of(tmp_path / "stopped")["step"] == stop
    run(tmp_path / "stopped", changes | {"resume": True})
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("finished")
    run(folder, SMALL)
    return folder


@pytest.mark.parametrize("point", ["save", "publish"])
def test_killed_while_a_checkpoint_is_written(point: str, finished: Path, tmp_path: Path) -> None:
    """The one before is used, and the half one is removed."""
    killed(tmp_path, SMALL, point, 2)
    assert entry_of(tmp_path)["step"] < STEPS
    run(tmp_path, SMALL | {"resume": True})
    assert_equal_runs(tmp_path, finished)
    kept = {path.name for path in (tmp_path / checkpoints.FOLDER).iterdir()}
    index = json.loads((tmp_path / checkpoints.FOLDER / "index.json").read_text())
    entries = [index[name] for name in ("last", "best", "before") if index[name]]
    assert kept == {"index.json", *(entry["folder"] for entry in entries)}
    assert len(kept) == 3


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    finished: Path, tmp_path: Path
) -> None:
    """Rows of another run without checkpoints are kept."""
    changes = SMALL | {"evaluation_interval": 1, "checkpoint_interval": 4}
    killed(tmp_path, changes, "step", 12)
    assert not (tmp_path / checkpoints.FOLDER).exists()
    assert rows_of(tmp_path)
    assert "topology=star" in rejected(tmp_path, topology="star")
    run(tmp_path, SMALL | {"resume": True})
    assert rows_of(tmp_path) == rows_of(finished)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    """A mistyped name does not begin another run."""
    assert "resume=true" in rejected(tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()
    (tmp_path / "notes.txt").write_text("mine")
    assert str(tmp_path) in rejected(tmp_path)
    assert "resume=always" in rejected(tmp_path, resume="always")


def test_a_finished_run_can_be_prolonged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With resume=auto, a job that is put back into the queue needs one command only."""
    run(tmp_path, SMALL | {"num_epochs": 2, "resume": "auto"})
    short, before = rows_of(tmp_path), metrics.load(tmp_path)
    run(tmp_path, SMALL | {"resume": "auto"})
    assert rows_of(tmp_path) == rows_of(finished)
    assert rows_of(tmp_path)[: len(short)] == short
    after = metrics.load(tmp_path)  # the times continue
    assert after["seconds"].is_monotonic_increasing
    for phase in ("gradient", "averaging", "communication"):
        elapsed = after[(after["name"] == "phase_seconds") & (after["phase"] == phase)]["value"]
        assert elapsed.is_monotonic_increasing
        assert elapsed.iloc[-1] > before[before["phase"] == phase]["value"].iloc[-1]
    capsys.readouterr()
    run(tmp_path, SMALL | {"resume": True})  # nothing is left to do
    assert f"{tmp_path} was complete" in capsys.readouterr().out
    assert rows_of(tmp_path) == rows_of(finished)
    assert "num_epochs=1" in rejected(tmp_path, num_epochs=1)


# --- Signals, and other layouts -------------------------------------------------------------------


def command(folder: Path, *more: str) -> list[str]:
    changes = [f"{key}={value}".replace(" ", "") for key, value in SMALL.items()]
    return ["train.py", *changes, "--output-dir", str(folder), *more]


def error_of(ended: Completed) -> str:
    """The only sentence of a program, which has no traceback."""
    assert "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    return line


DRIVER = """
import os, signal, time
import train
from powergossip.runs import configuration
from powergossip.training.stepping import Together
original = Together.gradient
def gradient(run, epoch, step):
    last = run.view.processes.rank == run.view.processes.size - 1
    if run.step == 7 and last and not run.run.config.resume:
        os.kill(os.getpid(), signal.{name})
    time.sleep(0.05)  # not done before process 0 asks the others
    return original(run, epoch, step)
Together.gradient = gradient
configuration.run_entry_point(train.main)
"""


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("SIGTERM", 2, 1),
        pytest.param("SIGUSR1", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_ended_by_a_signal_resumes_in_another_layout(
    name: str, before: int, after: int, finished: Path, tmp_path: Path
) -> None:
    """In the middle of an epoch. A signal to one process of several stops all."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(name=name))
    folder = tmp_path / "stopped"
    result = python(driver, *command(folder)[1:], processes=before)
    assert result.returncode == 128 + getattr(signal, name), result.stderr
    assert name in error_of(result)
    assert 8 <= entry_of(folder)["step"] < STEPS
    words = shlex.split(error_of(result).partition("resume with: ")[2])
    launcher = ["mpirun", "-np", str(before), "python"]
    assert words[: len(launcher)] == launcher
    if after == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "config", OmegaConf.structured(train.Config))
            patch.setattr(recorder, "report", lambda *_: None)
            train.main(words[len(launcher) + 1 :])
    else:
        again = python(*words[len(launcher) :], processes=after)
        assert again.returncode == 0, again.stderr
    ours, whole = end_of(folder), end_of(finished)
    torch.testing.assert_close(ours["x"], whole["x"], atol=1e-4, rtol=1e-4)
    assert torch.equal(ours["network"]["bits"], whole["network"]["bits"])
    for row, expected in zip(rows_of(folder), rows_of(finished), strict=True):
        assert row == expected | {"value": pytest.approx(expected["value"], rel=1e-2, abs=1e-4)}


# --- Bad input ------------------------------------------------------------------------------------


def rejected(folder: Path, **changes: Any) -> str:
    """The error of a resumed run, which must not change the folder."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput) as caught:
        run(folder, SMALL | {"resume": True} | changes)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value)


def test_a_run_cannot_resume_with_another_configuration_or_model_or_without_them(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rejected(finished, topology="star", learning_rate=0.3)
    for words in ("learning_rate=0.3", "0.02", "topology=star", "ring"):
        assert words in text
    wider = partial(models.MLP, hidden=130)
    with monkeypatch.context() as patch:
        patch.setitem(models.ARCHITECTURES, "MLP", lambda shape, n_labels: wider(shape, n_labels))
        text = rejected(finished)
    assert "26122" in text
    assert "26790" in text
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    assert "config.yaml" in rejected(tmp_path / "run", task_architecture="CNN")
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", None)
    train.config.resume = True
    with pytest.raises(BadInput, match=r"resume=true: .*--output-dir"):
        train.main()


def test_the_configuration_of_a_resumed_run_repeats_the_run(tmp_path: Path) -> None:
    """Permissions of one command are not those of a later one."""
    run(tmp_path / "first", SMALL | {"num_epochs": 1, "overwrite": True})
    run(tmp_path / "first", SMALL | {"num_epochs": 2, "resume": True, "allow_lost_rows": True})
    written: Any = OmegaConf.load(tmp_path / "first" / "config.yaml")
    assert not any(written[key] for key in ("resume", "allow_lost_rows", "overwrite"))
    again: Any = OmegaConf.to_container(written)
    run(tmp_path / "again", {str(key): value for key, value in again.items()})
    rows = [metrics.load(tmp_path / name) for name in ("first", "again")]
    accuracy, repeated = (r[(r["name"] == "accuracy") & (r["epoch"] == 2)] for r in rows)
    assert accuracy["value"].tolist() == repeated["value"].tolist()


class _Forged:
    """An object that writes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "")


def test_a_forged_checkpoint_is_not_executed(tmp_path: Path) -> None:
    kept, trace = Checkpoints(tmp_path, Processes()), tmp_path / "trace"
    kept.save(1, range(1), {"x": torch.zeros(1), "y": _Forged(trace)}, {})
    for read in (lambda: kept.load(range(1)), lambda: kept.visit(Mock())):
        with pytest.raises(BadInput, match=r"part-0\.pt contains more than tensors") as caught:
            read()
        assert "weights_only" not in str(caught.value)
    assert not trace.exists()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 3 epochs."""
    folder: Path = tmp_path_factory.mktemp("three")
    run(folder, SMALL | {"num_epochs": 3})
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_goes_on_from_an_intact_checkpoint(
    kind: str, three: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one sentence. Its rows are those of a run without damage."""
    folder = tmp_path / "run"
    shutil.copytree(three, folder)
    damage(folder / "checkpoints" / "step-000015" / "part-0.pt", kind)
    run(folder, SMALL | {"resume": True})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "part-0.pt" in line]
    assert line.endswith("the run goes on from the checkpoint of step 10")
    assert_equal_runs(folder, finished)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_run_is_rejected_and_kept(kind: str, three: Path, tmp_path: Path) -> None:
    """If all checkpoints are damaged, or their index. No advice removes a checkpoint."""
    for number, damaged in enumerate([["index.json"], ["part-0.pt"]]):
        folder = tmp_path / str(number)
        shutil.copytree(three, folder)
        for file in [*(folder / "checkpoints").rglob(damaged[0])]:
            damage(file, kind)
        text = rejected(folder)
        assert damaged[0] in text
        assert "remove" not in text


def test_a_run_goes_back_to_its_best_checkpoint(tmp_path: Path) -> None:
    """Later ones continue from there. If it is damaged, the run goes on, without it."""
    changes = SMALL | {"momentum": 0.0, "lr_schedule_milestones": [[2, 150]]}
    back, damaged = tmp_path / "back", tmp_path / "damaged"
    run(back, changes)
    shutil.copytree(back, tmp_path / "whole")
    rows = metrics.load(back)
    mean = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
    row = mean.sort_values("value", kind="stable").iloc[-1]
    best, last = entry_of(back, "best"), entry_of(back)
    assert best["score"] == row["value"]
    assert best["step"] == 5 * row["epoch"] < last["step"] == STEPS
    assert Checkpoints(back, Processes()).load(range(2, 3), "best")["x"].shape[0] == 1

    shutil.copytree(back, damaged)
    damage(damaged / "checkpoints" / best["folder"] / "part-0.pt", "flipped")
    run(damaged, changes | {"resume": True, "checkpoint": "best"})
    assert entry_of(damaged, "best") == entry_of(damaged) == last
    killed(back, changes | {"resume": True, "checkpoint": "best"}, "step", best["step"])
    assert entry_of(back) == best
    assert OmegaConf.load(back / "config.yaml").checkpoint == "last"
    run(back, changes | {"resume": "auto"})
    assert_equal_runs(back, tmp_path / "whole")


def test_a_run_resumes_although_its_info_is_damaged(
    three: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(three, folder)
    (folder / "info.json").write_bytes(bytes(99))
    arguments = ["--output-dir", str(folder), "resume=auto", "num_epochs=4"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(train, "config", OmegaConf.structured(train.Config))
        patch.setattr(recorder, "report", lambda *_: None)
        train.main(arguments)
    assert rows_of(folder) == rows_of(finished)
    assert OmegaConf.load(folder / "config.yaml") == OmegaConf.load(finished / "config.yaml")


def test_a_run_cannot_resume_without_the_rows_before_its_checkpoint(tmp_path: Path) -> None:
    """Unless that is allowed, once: the next checkpoint is of the rows that are left."""
    run(tmp_path, SMALL | {"num_epochs": 2})
    rows = (tmp_path / metrics.FILE).read_bytes()
    (tmp_path / metrics.FILE).unlink()
    assert metrics.FILE in rejected(tmp_path)
    for left in (b"", rows[:-1], rows[: len(rows) // 2]):
        (tmp_path / metrics.FILE).write_bytes(left)
        assert "allow_lost_rows=true" in rejected(tmp_path)
    run(tmp_path, SMALL | {"num_epochs": 2, "resume": True, "allow_lost_rows": True})
    kept = (tmp_path / metrics.FILE).read_bytes()
    assert kept == left[: left.rfind(b"\n") + 1]
    run(tmp_path, SMALL | {"resume": True})
    assert [row["epoch"] for row in rows_of(tmp_path)][kept.count(b"\n") :][0] == 3
    assert entry_of(tmp_path)["step"] == STEPS


LIMITED = """
import resource, signal
import train
from powergossip.runs import configuration
from powergossip.training.trainer import Trainer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
original = Trainer.{method}
def limited(run, *rest, **more):
    if "{method}" == "train" or run.step == 15:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
    original(run, *rest, **more)
Trainer.{method} = limited
configuration.run_entry_point(train.main)
"""


@pytest.mark.parametrize(
    ("method", "size", "processes", "named"),
    [("_save", 40_000, None, "part-0.pt"), ("train", 3_000, 2, "run")],
    ids=["checkpoint", "rows"],
)
def test_a_full_disk_is_a_sentence_and_keeps_what_was_before(
    method: str, size: int, processes: int | None, named: str, finished: Path, tmp_path: Path
) -> None:
    """The checkpoint before is intact, from which the run resumes; and so are rows."""
    driver, folder = tmp_path / "driver.py", tmp_path / "run"
    driver.write_text(LIMITED.format(method=method, size=size))
    result = python(driver, *command(folder)[1:], processes=processes)
    assert result.returncode == 2, result.stderr
    assert named in error_of(result)
    assert "File too large" in error_of(result)
    assert not metrics.load(folder).empty
    if method == "_save":
        assert entry_of(folder)["step"] == 10
        run(folder, SMALL | {"resume": True})
        assert rows_of(folder) == rows_of(finished)


# --- The class Checkpoints ------------------------------------------------------------------------


def test_a_first_checkpoint_that_is_interrupted_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts are those of the time when all parts are written. A part has the rows of its workers
    alone, although torch.save writes the whole storage of a tensor."""
    kept, row = Checkpoints(tmp_path, network.Processes()), torch.zeros(1000, 1000)[:1]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "sync_folder", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            kept.save(1, range(1), {"x": row}, {})
    assert kept.describe() is None
    left = len(list(tmp_path.rglob("part-*.pt")))
    kept.save(2, range(1), {"x": row}, lambda: {"parts": len(list(tmp_path.rglob("part-*.pt")))})
    names = {path.name for path in (tmp_path / checkpoints.FOLDER).iterdir()}
    assert names == {"index.json", "step-000002"}
    assert entry_of(tmp_path)["facts"] == {"parts": left + 1}
    (part,) = tmp_path.rglob("part-0.pt")
    assert part.stat().st_size < 2 * 4 * row.numel()


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
    best, last = entry_of(shared, "best"), entry_of(shared)
    assert (best["step"], best["facts"], best["score"]) == (1, {"fact": 1}, 2.0)
    assert (last["step"], last["facts"], last["score"]) == (2, {"fact": 2}, 1.0)
    for wanted in (range(8), range(3, 5), workers):
        loaded = kept.load(wanted)
        assert loaded["rows"][:, 0].tolist() == list(wanted)
        assert loaded["deep"][0]["a"].tolist() == [2 * i for i in wanted]
        assert loaded["deep"][1:4] == ["word", None, 3]
        assert loaded["deep"][4] == 7


@pytest.mark.parallel(nprocs=[1, 2, 4])
@pytest.mark.parametrize("kind", DAMAGES)
def test_processes_agree_on_an_intact_checkpoint(kind: str, tmp_path: Path) -> None:
    """Whatever part is damaged, also of several that one process reads. The one before is kept if
    the last one is the best."""
    who = network.processes()
    shared = Path(who.broadcast(str(tmp_path)))
    kept, alone = Checkpoints(shared, who), Checkpoints(shared, network.Processes())
    for step, score in enumerate((1.0, 2.0, 3.0)):
        kept.save(step, range(who.rank, who.rank + 1), {"x": torch.zeros(1)}, {}, score)
    assert kept.intact("last")[0] == alone.intact("last")[0] == "last"
    who.gather(None)
    victim = who.size // 2
    if who.rank == victim:
        damage(shared / "checkpoints" / "step-000002" / f"part-{who.index}.pt", kind)
    who.gather(None)
    for readers in (kept, alone):
        with pytest.raises(BadInput, match=f"part-{victim}.pt"):
            readers.intact("last")
        name, entry = readers.intact("last", others=True)
        assert (name, entry["step"]) == ("before", 1)
    who.gather(None)
    if who.rank == 0:
        kept.return_to(name)
    who.gather(None)
    kept = Checkpoints(shared, who)
    kept.save(3, range(who.rank, who.rank + 1), {"x": torch.zeros(1)}, {}, 0.5)
    assert kept.intact("best")[1]["step"] == 1


def test_a_changed_index_is_rejected(tmp_path: Path) -> None:
    """By one sentence, also if it is JSON of another shape."""
    kept = Checkpoints(tmp_path, network.Processes())
    for step in range(2):
        kept.save(step, range(1), {"x": torch.zeros(1)}, {"bytes": 77, "a": {10: 1, 9: [2]}}, 0.5)
    assert kept.describe() is not None
    index = tmp_path / "checkpoints" / "index.json"
    for was in ('"bytes": 77', '"score": 0.5', '"step": 1', '"part-0.pt"'):
        whole = index.read_text()
        assert was in whole
        index.write_text(whole.replace(was, f"{was[:-1]}0{was[-1]}", 1))
        with pytest.raises(BadInput, match=r"index\.json is damaged"):
            kept.describe()
        index.write_text(whole)
    for text in ("[" * 10**5, "[]", "5", '{"version": 1, "last": 5}', '{"version": 1, "last": {}}'):
        index.write_text(text)
        with pytest.raises(BadInput, match=r"index\.json"):
            kept.describe()
