"""A process of two ends or is stopped at any system call of its output and checkpoints.

Both take the same steps as in train.py. The other one regards it as lost and completes the run. A
process that was stopped continues afterwards, without a notice that it was dropped.
"""

import json
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import pytest
import torch
from omegaconf import OmegaConf

from powergossip.errors import Dropped
from powergossip.network import Processes
from powergossip.runs import files, output
from powergossip.runs.checkpoints import FOLDER, Checkpoints
from powergossip.runs.metrics import FILE, Hooks
from powergossip.training.asynchronous.rows import SharedRows
from tests.harness.system_calls import moments

T = TypeVar("T")

EPOCHS = 3
CONFIG = OmegaConf.create({"overwrite": False, "tensorboard": False})


class Pair(Processes):
    """Processes 0 and 1. The other one is lost when the connection ends or `stopped` is readable.

    A process that was lost continues alone until the next collective operation, which raises
    Dropped.
    """

    can_be_lost = True

    def __init__(self, index: int, connection: socket.socket, stopped: int):
        super().__init__()
        self._index, self._connection, self._stopped = index, connection, stopped
        self.rank, self.size = index, 2
        self.is_dropped = False

    @property
    def index(self) -> int:
        return self._index

    def gather(self, value: T) -> list[T]:
        if self.is_dropped:
            raise Dropped("dropped")
        if self.size == 1:
            return [value]
        try:
            self._connection.sendall(pickle.dumps(value))
            own = self._connection.fileno()
            ready, _, _ = select.select([own, self._stopped], [], [], 60)
            received = self._connection.recv(100_000) if own in ready else b""
        except ConnectionError:
            received = b""
        if not received:
            self.rank, self.size = 0, 1
            return [value]
        found = [value, pickle.loads(received)]
        return found if self.index == 0 else found[::-1]

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]


def state(epoch: int) -> dict[str, Any]:
    return {"x": torch.full((1, 2), float(epoch)), "epoch": epoch}


def take_steps(folder: Path, group: Pair, at: Callable[[int], None] = lambda moment: None) -> None:
    """Write the files of a run, as train.py does. at: called at the moments after its start."""
    found: list[output.Output] = []

    def take_over(rows: Any, process: int) -> None:
        found.append(output.take_over(folder, CONFIG, rows, process))

    hooks = Hooks(
        log_metric=lambda *row: found[-1].write(*row),
        log_info=lambda facts: found[-1].add_info(facts),
        take_over=take_over,
    )
    counted = torch.zeros(1)
    network: Any = SimpleNamespace(processes=group, bits=counted, messages=counted)
    rows = SharedRows(hooks, network, lambda: 0.0)
    if group.index == 0:
        found.append(output.Output(str(folder), CONFIG, process=0))
    group.gather(None)
    with moments(at):
        _take_steps_of(folder, group, rows, hooks, found)


def _take_steps_of(
    folder: Path, group: Pair, rows: SharedRows, hooks: Hooks, found: list[output.Output]
) -> None:
    checkpoints = Checkpoints(folder, group)

    def facts() -> dict[str, Any]:
        rows.take_over()
        return {"metrics_bytes": found[-1].rows.offset()}

    worker = group.index
    for epoch in range(1, EPOCHS + 1):
        rows("accuracy", 0.1 * epoch, epoch, split="test_avg")
        rows("phase_seconds", 1.0, epoch, phase="gradient", instances=10 * epoch + worker)
        if rows.are_written:
            hooks.log_info({"state.progress": epoch})
        score = [0.3, 0.2, 0.5][epoch - 1]
        checkpoints.save(epoch, range(worker, worker + 1), state(epoch), facts, score)
    done = False
    while not done:
        first = group.rank == 0
        if first:
            rows.take_over()
            found[-1].close(output.COMPLETE)
        done = any(group.gather(first))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of the run, without parts of a lost process, which no index names."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    index = json.loads((folder / FOLDER / "index.json").read_text())
    entries = [entry for entry in index.values() if isinstance(entry, dict)]
    named = {(entry["folder"], part["file"]) for entry in entries for part in entry["parts"]}
    places = {file: (file.parent.name, file.name) for file in files if file.suffix == ".pt"}
    left_out = [file for file, place in places.items() if place not in named]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f not in left_out}


def check(folder: Path) -> None:
    """The invariants of a run that is complete."""
    rows = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    order = [(row["epoch"], row["name"]) for row in rows]
    epochs = range(1, EPOCHS + 1)
    assert order == [(e, name) for e in epochs for name in ("accuracy", "phase_seconds")]
    info = json.loads((folder / files.INFO_FILE).read_text())
    assert info[output.ENDING] == output.COMPLETE
    checkpoints = Checkpoints(folder, Processes())
    for which in ("last", "best"):
        entry = checkpoints.describe(which)
        assert entry is not None
        assert entry["step"] == EPOCHS
        assert entry["facts"]["metrics_bytes"] == (folder / FILE).stat().st_size
        parts: list[Any] = []
        checkpoints.visit(lambda _, part, parts=parts: parts.append(part), which)  # type: ignore[misc]
        assert [part["epoch"] for part in parts] == [EPOCHS] * len(entry["parts"])


def run(folder: Path, moment: int, stops: bool) -> bool:
    """Let process 0 end or stop at a moment, and the other one complete the run.

    Returns whether there was such a moment.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    stopped, has_stopped = os.pipe()
    wake, waker = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(waker)
        _end_or_stop(folder, Pair(0, theirs, wake), moment, wake if stops else None, has_stopped)
    theirs.close()
    os.close(has_stopped)
    take_steps(folder, Pair(1, ours, stopped))
    check(folder)
    before = contents(folder)
    ours.close()
    os.close(waker)
    _, status = os.waitpid(pid, 0)
    assert contents(folder) == before
    os.close(stopped)
    os.close(wake)
    return status != 0


def _end_or_stop(
    folder: Path, group: Pair, moment: int, wake: int | None, has_stopped: int
) -> NoReturn:
    """Take the steps, and end or stop until `wake` is closed."""

    def at(count: int) -> None:
        if count == moment and wake is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif count == moment and wake is not None:
            group.is_dropped = True
            os.write(has_stopped, b"x")
            os.read(wake, 1)

    code = 1
    try:
        take_steps(folder, group, at)
        code = 0
    except Dropped:
        code = 75
    finally:
        os._exit(code)


@pytest.mark.long
@pytest.mark.parametrize("stops", [False, True], ids=["ended", "stopped"])
@pytest.mark.parametrize(
    "stride", [41, pytest.param(1, marks=pytest.mark.slow)], ids=["a_few", "all"]
)
def test_a_process_is_lost_at_any_system_call(tmp_path: Path, stops: bool, stride: int) -> None:
    for moment in range(0, 10**4, stride):
        try:
            happened = run(tmp_path / str(moment), moment, stops)
        except Exception as error:
            error.add_note(f"at moment {moment}")
            raise
        if not happened:
            assert moment > 100
            break
