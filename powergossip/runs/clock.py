"""Elapsed time by phase."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The phases of a training step.
STEP_PHASES = ("data", "gradient", "update", "averaging", "communication")


@dataclass
class PhaseTime:
    """Seconds in a phase, over its instances."""

    instances: int = 0
    total: float = 0.0
    squares: float = 0.0  # the sum of the squared durations

    @property
    def mean(self) -> float:
        return self.total / self.instances

    @property
    def deviation(self) -> float:
        """Standard deviation over the instances."""
        return math.sqrt(max(0.0, self.squares / self.instances - self.mean**2))


def data_fraction(seconds: Mapping[Any, float]) -> float:
    """The fraction of the time of training steps that is spent on waiting for data.

    Args:
        seconds: Seconds by phase, since the start.
    """
    in_steps = sum(seconds.get(phase, 0.0) for phase in STEP_PHASES)
    return seconds.get("data", 0.0) / max(in_steps, 1e-9)


class Stopwatch:
    """Seconds of a run, without those lost in interruptions.

    Attributes:
        before: Seconds of the run until `start`.
    """

    def __init__(self) -> None:
        self.before = 0.0
        self._started = time.perf_counter()

    def start(self) -> None:
        """Count from now on."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._started


class Clock:
    """Seconds by phase. Time in a nested phase counts for the inner one only."""

    def __init__(self) -> None:
        self.phases: dict[str, PhaseTime] = {}
        self._inner = 0.0  # seconds in phases nested in the current one

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            duration = elapsed - self._inner
            self._inner = outer + elapsed
            phase_time = self.phases.setdefault(phase, PhaseTime())
            phase_time.instances += 1
            phase_time.total += duration
            phase_time.squares += duration**2
