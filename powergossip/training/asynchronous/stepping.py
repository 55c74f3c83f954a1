"""Executions where every worker takes its steps at its own time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.events.virtual_clock import VirtualClock
from powergossip.events.wall_clock import WallClock
from powergossip.network import Network
from powergossip.network.resilient.worker_messages import Links
from powergossip.runs.metrics import Hooks
from powergossip.runs.signals import Signals
from powergossip.training.asynchronous.rows import SharedRows
from powergossip.training.asynchronous.workers import EdgeWorkers, as_bytes, from_bytes
from powergossip.training.live_models import AliveWorkers
from powergossip.training.measurements import Rows
from powergossip.training.stepping import Computation, Execution, Moment, Position


class OnVirtualClock(Execution):
    """All workers are in this process. A clock lets them live in the order of virtual time.

    Args:
        workers: Workers of this process.
        clock: Clock that lets them live.
    """

    time_is_virtual = True

    def __init__(self, run: Computation, workers: EdgeWorkers, clock: VirtualClock):
        super().__init__(AliveWorkers(run.network, run.parameters, lambda: clock.alive))
        self.workers, self.clock, self.run = workers, clock, run
        self.parts = {"events": self}

    @property
    def codes(self) -> Sequence[DifferenceCode]:
        return self.workers.codes

    def seconds(self) -> float:
        return self.clock.now

    def train_step(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Train until the workers alive have taken one more step on average.

        Returns the sums over an epoch at its end, each [worker], and nothing before.
        """
        with self.run.clock("averaging"):
            self.step += 1
            self.clock.run(self.step)
        if self.step % self.workers.steps_per_epoch:
            return {}
        return self.workers.take_sums()

    def state_dict(self) -> dict[str, Any]:
        """Everything but x, as the bytes of a file: events uint8 [1, bytes]."""
        state = {
            "clock": self.clock.state_dict(),
            "workers": {index: self.workers.state_of(index) for index in self.clock.workers},
            "sums": self.workers.sums,
            "last": self.workers.last,
        }
        return {"events": as_bytes(state)[None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        whole = from_bytes(state["events"][0], self.view.device)
        self.clock.load_state_dict(whole["clock"])
        for index, of_worker in whole["workers"].items():
            self.workers.load(index, of_worker)
        self.workers.sums, self.workers.last = whole["sums"], whole["last"]


class AcrossProcesses(Execution):
    """The workers of this process among others, in real time. Processes may be lost meanwhile.

    Args:
        links: Links for messages between workers.
        workers: Workers of this process.
        clock: Clock that lets them live.
    """

    def __init__(self, run: Computation, links: Links, workers: EdgeWorkers, clock: WallClock):
        super().__init__(AliveWorkers(run.network, run.parameters, lambda: clock.everybody))
        self.links, self.workers, self.clock, self.run = links, workers, clock, run
        self.parts = {"events": self}
        self.is_away = links.is_away
        self._epoch = 0
        clock.of_run = lambda: {
            "epoch": self._epoch,
            "step": self.step,
            "seconds": self.watch.seconds,
            "metrics": {
                name: float(values.mean())
                for name, values in (dict(workers.last) | workers.means()).items()
            },
        }

    @property
    def codes(self) -> Sequence[DifferenceCode]:
        return self.workers.codes

    @property
    def missing(self) -> list[int]:
        return self.links.missing

    def rows(self, hooks: Hooks, network: Network) -> Rows:
        return SharedRows(hooks, network, self.seconds)

    # --- End ---

    def end(self, last: Callable[[], None]) -> None:
        """The process that writes calls it. If that is lost meanwhile, the next one does."""
        done = False
        while not done:
            writes = self.links.group.writes
            if writes:
                last()
            done = any(self.links.group.gather(writes))
        self.links.finish()

    def close(self) -> None:
        self.links.close()

    # --- Epochs ---

    def enter(self, position: Position) -> Position:
        if not self.links.is_away:
            return position
        print("this machine is back; it enters the run when the others have reached it", flush=True)
        of_run = self.clock.enter()
        self.step, self.watch.before = of_run["step"], of_run["seconds"]
        self.workers.begin_with(of_run["metrics"])
        print(f"it is in the run again after step {self.step}", flush=True)
        return Position(of_run["epoch"])

    def epoch(self, position: Position, signals: Signals) -> Iterator[Moment]:
        """Train an epoch, in stages between which all processes synchronize."""
        self._epoch = position.epoch
        epoch, per_epoch = position.epoch, self.workers.steps_per_epoch
        first, end = epoch * per_epoch, (epoch + 1) * per_epoch
        step, complete = first, False

        def asked() -> bool:
            return signals.received is not None or self.run.agreement.has_noted

        while not complete:
            with self.run.clock("averaging"):
                complete = self.clock.run(end, asked)
            taken = self.links.group.gather(self._steps_between(first, end))
            self.step = step = end if complete else first + min(taken)
            self.run.agreement.note_norms(self.view.workers, self.view.x, step, epoch + 1)
            number = self.run.agreement.agree(signals.received)
            yield Position(epoch, step - first), number
        yield Position(epoch, per_epoch, self.workers.take_sums()), None

    def _steps_between(self, first: int, end: int) -> int:
        """The steps of this process' workers after `first`, on average, fewer than to the end."""
        steps = [worker.steps for worker in self.clock.workers.values()]
        return max(0, min(sum(steps) // len(steps), end - 1) - first)

    # --- State ---

    def state_dict(self) -> dict[str, Any]:
        """Everything but x, as the bytes of files: events uint8 [worker, bytes].

        Rows are padded to the longest of all processes.
        """
        files, of_clock = [], self.clock.state_dict()
        for index, row in self.workers.rows.items():
            sums = {name: pairs[row] for name, pairs in self.workers.sums.items()}
            own = self.workers.state_of(index)
            files.append(as_bytes({"clock": of_clock[index], "worker": own, "sums": sums}))
        longest = max(self.run.network.processes.gather(max(map(len, files))))
        padded = torch.zeros(len(files), longest, dtype=torch.uint8)
        for row_of_bytes, file in zip(padded, files, strict=True):
            row_of_bytes[: len(file)] = file
        return {"events": padded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, after x."""
        if "begin" in state:
            self._begin_anew(state)
            return
        device, rows = self.view.device, self.workers.rows
        found = {w: from_bytes(state["events"][row], device) for w, row in rows.items()}
        self.clock.load_state_dict({w: of_worker["clock"] for w, of_worker in found.items()})
        for index, of_worker in found.items():
            self.workers.load(index, of_worker["worker"])
        self.workers.sums = _joined([of_worker["sums"] for of_worker in found.values()])

    def _begin_anew(self, state: Mapping[str, Any]) -> None:
        """Begin with new edges after a number of steps, see asynchronous/resizing.py."""
        self.clock.begin_at(state["begin"])
        for index in self.workers.rows:
            if index in state["locals"]:
                self.workers.load_local(index, state["locals"][index])


def _joined(sums: Sequence[Mapping[str, list[float]]]) -> dict[str, list[list[float]]]:
    """Sums by worker as sums by name. A worker without a step has none."""
    names = {name for of_worker in sums for name in of_worker}
    return {name: [of_worker.get(name, [0.0, 0]) for of_worker in sums] for name in names}
