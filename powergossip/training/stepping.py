"""How the workers of a process take their steps: all together, or each at its own time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from powergossip.algorithms.difference_code import DifferenceCode
from powergossip.network import Network
from powergossip.parameters import Parameters
from powergossip.runs.clock import Clock, Stopwatch
from powergossip.runs.metrics import Hooks
from powergossip.runs.signals import Signals
from powergossip.state_trees import Stateful
from powergossip.tasks import Task
from powergossip.training.config import Settings
from powergossip.training.ending import Agreement
from powergossip.training.gradients import Gradients
from powergossip.training.live_models import AliveWorkers
from powergossip.training.measurements import Rows
from powergossip.training.methods import Learner
from powergossip.training.schedule import learning_rate


class Position(NamedTuple):
    """A place in a run.

    Attributes:
        step: Step in the epoch.
        sums: Sums of metrics over the steps of the epoch so far, each [worker].
    """

    epoch: int = 0
    step: int = 0
    sums: dict[str, Tensor] = {}  # noqa: RUF012 replaced, never changed


# Between steps, when all processes know the same: where a run that ends now resumes, and the signal
# that some process has received, or None.
Moment = tuple[Position, int | None]


class Computation(NamedTuple):
    """The parts of a run that a step needs."""

    config: Settings
    network: Network
    task: Task
    parameters: Parameters
    gradients: Gradients
    agreement: Agreement
    clock: Clock
    steps_per_epoch: int


class Execution:
    """How the workers of this process take their steps. The base of the classes that do.

    Args:
        view: The workers that are alive.

    Attributes:
        step: Step of the run, so far.
        watch: Stopwatch with the seconds of the run, of the real clock.
        parts: Parts with their own state, by their names in a checkpoint.
        run: Parts of a run that trains.
        local, rule: The local optimizer and the learning rule of all hosted workers, or None.
        time_is_virtual: True if `seconds` are not the real clock's.
        is_away: True if this process comes back to a run that goes on.
    """

    time_is_virtual = False
    is_away = False
    run: Computation
    rule: Any = None
    local: Any = None

    def __init__(self, view: AliveWorkers):
        self.view, self.watch = view, Stopwatch()
        self.step = 0
        self.parts: Mapping[str, Stateful] = {}

    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return self.watch.seconds

    def rows(self, hooks: Hooks, network: Network) -> Rows:
        """The rows of the run, for the hooks."""
        return Rows(hooks, network, self.seconds)

    def facts(self) -> dict[str, Any]:
        """Facts about the method, for info.json."""
        return {"start_iteration": getattr(self.rule, "start_iteration", None)}

    @property
    def codes(self) -> Sequence[DifferenceCode]:
        """The codes of messages of few bits of this process' workers."""
        return []

    @property
    def missing(self) -> list[int]:
        """The workers that were lost, as of the last collective operation."""
        return []

    def restore(self, alive: Sequence[int]) -> None:
        """Record which workers the checkpoint contains, before its evaluation."""

    def enter(self, position: Position) -> Position:
        """The position of this process in the run: a later one if it comes back to it."""
        return position

    def train_step(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Train one step of the hosted workers. Returns the batches' metrics, each [worker]."""
        raise NotImplementedError

    def gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        """Add the hosted workers' gradients to parameters.grad. Returns metrics, each [worker]."""
        raise NotImplementedError

    def epoch(self, position: Position, signals: Signals) -> Iterator[Moment]:
        """Train from this position to the end of its epoch. Raises Diverged, in all processes."""
        epoch, first, sums = position
        for step in range(first, self.run.steps_per_epoch):
            sums = _added(sums, self.train_step(epoch, step))
            ends = step + 1 == self.run.steps_per_epoch
            number = self.run.agreement.between_steps(
                self.step, epoch + 1, ends, self.view, signals.received
            )
            yield Position(epoch, step + 1, sums), number

    def end(self, last: Callable[[], None]) -> None:
        """Call a last action, such as a figure, in one process, and wait for it."""
        if self.view.processes.writes:
            last()

    def close(self) -> None:
        """End what works in the background."""


class AtRest(Execution):
    """The workers of a checkpoint, for an evaluation. They take no steps.

    Args:
        varies: True if some of them may be lost.
    """

    def __init__(self, network: Network, parameters: Parameters, varies: bool):
        self._alive: Sequence[int] = range(network.n_workers)
        alive: Callable[[], Sequence[int]] | None = (lambda: self._alive) if varies else None
        super().__init__(AliveWorkers(network, parameters, alive))

    def restore(self, alive: Sequence[int]) -> None:
        self._alive = alive


class Together(Execution):
    """All workers take each step together."""

    def __init__(self, run: Computation, method: Learner):
        super().__init__(AliveWorkers(run.network, run.parameters))
        self.local, self.rule, self._at_epoch = method
        self.parts = {"optimizer": self.local, "algorithm": self.rule}
        self.run = run

    @property
    def codes(self) -> Sequence[DifferenceCode]:
        return getattr(self.rule, "codes", [])

    def train_step(self, epoch: int, step: int) -> dict[str, Tensor]:
        per_epoch = self.run.steps_per_epoch
        self.local.rate = learning_rate(self.run.config, epoch + (step + 1) / per_epoch)
        self._at_epoch(epoch + step / per_epoch)
        with self.run.clock("averaging"):
            self.rule.start()
            metrics = self.gradient(epoch, step)
            self.rule.finish()
        self.step += 1
        return metrics

    def gradient(self, epoch: int, step: int) -> dict[str, Tensor]:
        return self.run.gradients(epoch, step, self.step)


def _added(sums: Mapping[str, Tensor], metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of metrics, with another step's added."""
    new = {k: sums[k] + values if k in sums else values for k, values in metrics.items()}
    return {**sums, **new}
