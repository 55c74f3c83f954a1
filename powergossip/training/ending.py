"""Agreement of the processes on the end of a run: by a signal, or because it has diverged."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from signal import Signals

import numpy as np
import torch
from torch import Tensor

from powergossip.errors import Diverged, Interrupted
from powergossip.formatting import listed
from powergossip.network import Processes
from powergossip.training.live_models import AliveWorkers
from powergossip.training.measurements import divergence

PATIENCE = 5.0  # seconds after SIGTERM until all processes must agree, except under MPI
INTERVAL = 0.05  # seconds between agreements, by the clock of process 0
LONGEST = 2.0  # the same, where their results arrive late. Twice as long is less than PATIENCE
WAITING = 0.01  # fraction of an interval that process 0 may wait for a result
_MOST_STEPS = 50  # between agreements


class Agreement:
    """Carries a signal, or the first value that is not finite, to all processes.

    A process that sees such a value continues to train, as the others wait for its messages. NaN
    spreads meanwhile. About 20 times a second, and at least every 50 steps, the processes start a
    non-blocking maximum of two flags, and read it when they start the next one. On links of high
    latency, and behind long messages in flight, it has not arrived by then: the intervals become
    longer, up to two seconds. If a flag is set, they exchange the details and all act on them after
    the same step.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        self._first: tuple[int, int, str] | None = None  # step, worker, text
        # On their way from a GPU to the host: their arrival, and the call that notes them.
        self._unread: list[tuple[torch.cuda.Event, Callable[[], None]]] = []
        self._pending: Callable[[], np.ndarray] | None = None
        self._next = 0  # the step after which a maximum is read, and the next one is started
        self._last = 0, time.perf_counter()  # step and time of the last start
        self._interval = INTERVAL  # seconds

    @property
    def has_noted(self) -> bool:
        """True if this process has recorded a value that is not finite."""
        self._read()
        return self._first is not None

    def note(self, worker: int, name: str, value: float, step: int, epoch: int) -> None:
        """Record a value that is infinite or NaN, if it is the first one. `epoch` is from 1."""
        if not math.isfinite(value):
            found = step, worker, divergence(worker, name, value, step, epoch)
            self._first = min(self._first or found, found)

    def note_all(
        self, workers: Sequence[int], name: str, values: Tensor, step: int, epoch: int
    ) -> None:
        """`note` for values [worker].

        Those on a GPU are read after the step. To read them now would be to wait while the GPU has
        no further work.
        """
        if values.device.type == "cuda":
            on_host, arrival = values.to("cpu", non_blocking=True), torch.cuda.Event()
            arrival.record()
            read = partial(self.note_all, workers, name, on_host, step, epoch)
            self._unread.append((arrival, read))
            return
        for worker, value in zip(workers, values.tolist(), strict=True):
            self.note(worker, name, value, step, epoch)

    def _read(self) -> None:
        """Record the values that are on their way."""
        for arrival, read in self._unread:
            arrival.synchronize()
            read()
        self._unread.clear()

    def note_norms(self, workers: Sequence[int], x: Tensor, step: int, epoch: int) -> None:
        """Record parameters x [worker, D] that are not finite, if they are the first values."""
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        self.note_all(workers, "parameter norm", norms, step, epoch)

    def after_step(self, step: int, signal: int | None) -> int | None:
        """Return a signal that some process received, in all processes after the same step.

        Args:
            step: Number of steps so far.
            signal: Signal received by this process, or None.

        Raises:
            Diverged: In all processes, if one of them has noted a value.
        """
        self._read()
        if self._processes.size == 1:
            return self.agree(signal)
        if step < self._next:
            return None
        began, steps = time.perf_counter(), 1
        if self._pending is not None:
            ends, steps = map(int, self._pending())
            self._pending = None
            if ends:
                return self.agree(signal)
        self._next = step + steps
        ends = signal is not None or self._first is not None
        after_next = self._steps_after_next(step, time.perf_counter() - began)
        self._pending = self._processes.start_max(np.array([ends, after_next]))
        return None

    def between_steps(
        self, step: int, epoch: int, ends: bool, view: AliveWorkers, signal: int | None
    ) -> int | None:
        """`after_step`, with a look at the parameters where the epoch or the run ends.

        Args:
            epoch: Epoch, from 1.
            ends: True if this was the last step of the epoch.
        """
        number = self.after_step(step, signal)
        if number is not None or ends:
            self.note_norms(view.workers, view.x, step, epoch)
            number = self.agree(number or signal)
        return number

    def agree(self, signal: int | None = None) -> int | None:
        """Agree now, as `after_step` does. All processes call it at the same time: it blocks."""
        if self._pending is not None:
            self._pending()
            self._pending = None
        self._read()
        found = self._processes.gather((self._first, signal))
        values = [first for first, _ in found if first is not None]
        if values:
            raise Diverged(min(values)[2])
        return next((number for _, number in found if number is not None), None)

    def _steps_after_next(self, step: int, waited: float) -> int:
        """The number of steps from the next start to the one after it. Process 0's number counts.

        Args:
            waited: Seconds for the result that was read now.
        """
        now, (last_step, last_time) = time.perf_counter(), self._last
        self._last = step, now
        if self._processes.rank > 0:
            return 0
        elapsed = now - last_time
        late = waited > WAITING * elapsed
        self._interval = (
            min(LONGEST, 2 * max(self._interval, elapsed))
            if late
            else max(INTERVAL, 0.97 * self._interval)
        )
        per_step = (elapsed - waited) / max(1, step - last_step)
        return max(1, min(_MOST_STEPS, int(self._interval / max(per_step, 1e-9))))


def interrupted(number: int, step: int, epoch: int, missing: Sequence[int]) -> Interrupted:
    """The error of a run that a signal ends after this number of steps. `epoch` is from 1.

    Args:
        missing: Lost workers.
    """
    text = f"stopped by {Signals(number).name} after step {step} (epoch {epoch}){_without(missing)}"
    return Interrupted(text, number)


def complete_without(missing: Sequence[int], n_workers: int) -> str:
    """The end of a run that has lost workers."""
    present = sorted(set(range(n_workers)) - set(missing))
    return f"complete with workers {listed(present)}{_without(missing)}"


def _without(missing: Sequence[int]) -> str:
    """The end of a sentence, with the lost workers if there are some."""
    return f", without workers {listed(missing)}, which were lost" if missing else ""
