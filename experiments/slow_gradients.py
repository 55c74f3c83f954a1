"""train.py with gradients of given lengths, as on hosts with processors of different speeds::

    mpirun -np 4 python experiments/slow_gradients.py pace=[0.05,0.05,0.05,0.2] …

`pace` has the seconds of a gradient for each worker. The other arguments are those of train.py.
The gradient is computed, and its process then sleeps for the rest of these seconds, so that other
processes have the core. Where processes share cores, a gradient takes as long as on a host of its
own, as long as it is computed within its seconds: the rows `phase_seconds` have the mean time of
the computation as the phase `gradient`.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from powergossip.checks import BadValue
from powergossip.runs import configuration
from powergossip.training import construction
from powergossip.training.gradients import Gradients


class PacedGradients(Gradients):
    """Gradients that take `pace[worker]` seconds, or those of the computation if these are more."""

    pace: Sequence[float] = ()

    def __call__(self, *step: Any) -> dict[str, Tensor]:
        seconds = sum(self.pace[worker] for worker in self._network.workers)
        with _lasting(seconds):
            return super().__call__(*step)

    def of_worker(self, worker: int, *step: Any) -> dict[str, Tensor]:
        with _lasting(self.pace[worker]):
            return super().of_worker(worker, *step)


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """A block that takes this time at least."""
    until = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, until - time.monotonic()))


def main(arguments: list[str]) -> None:
    """Train with `pace=[…]` and the keys of train.py. Raises BadValue without a pace."""
    found = [a.removeprefix("pace=") for a in arguments if a.startswith("pace=")]
    if len(found) != 1:
        raise BadValue("pace", found, "the seconds of a gradient for each worker: pace=[0.1,0.4]")
    usual, PacedGradients.pace = construction.Gradients, json.loads(found[0])
    construction.Gradients = PacedGradients  # type: ignore[misc]
    try:
        train.main([a for a in arguments if not a.startswith("pace=")])
    finally:
        construction.Gradients = usual  # type: ignore[misc]


if __name__ == "__main__":
    configuration.run_entry_point(main)
