"""Whether workers learn of each other by messages only.

All workers of a benchmark are in one process, where a method could read the models and gradients of
others. So it makes some steps with zeros in place of all messages: a change of some workers must
then not change the others. powergossip.training.trials does so with aggregations.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from powergossip import algorithms
from powergossip.benchmark.tasks import OPTION, Values
from powergossip.errors import BadInput
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology
from powergossip.training import trials
from powergossip.training.config import Settings
from powergossip.training.methods import make_method

SIZE = 16  # rows and columns of the matrices
STEPS = 10


def probe(own: Values, topology: Topology) -> None:
    """Try the averaging rule of a setting.

    Raises BadInput if a step fails, if it does not change x, if nothing is sent, or if workers
    learn of each other in another way than by messages.
    """
    if own["optimizer"] in algorithms.AVERAGING:
        make = partial(trials.of_averaging, lambda network, _: averaging(own, network, SIZE))
        _check(own["optimizer"], topology, make)


def probe_learning(c: Settings, topology: Topology) -> None:
    """Try a learning rule as `probe` does."""
    if c.optimizer in algorithms.AVERAGING and not c.by_edges:
        make = partial(trials.of_learning, partial(make_method, c, steps_per_epoch=STEPS))
        _check(c.learning, topology, make, c.local_steps, gradient=1.0)


def _check(
    name: str,
    topology: Topology,
    make: Callable[[Network, Tensor], trials.Trial],
    local_steps: int = 1,
    gradient: float = 0.0,
) -> None:
    def after(kind: type[Network], changed: Tensor, steps: int) -> trials.Trial:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        rows = _rows(changed)
        try:
            trial = make(kind(topology, Processes()), rows.clone())
            for _ in range(steps * local_steps):
                trial.step(gradient * rows)
        except ValueError:  # of options
            raise
        except Exception as error:
            raise BadInput(f"{name} fails: {type(error).__name__}: {error}") from error
        return trial

    nobody = torch.zeros(topology.n_workers, dtype=torch.bool)
    trial = after(Network, nobody, STEPS)
    if torch.equal(trial.tensors[0], _rows(nobody)) or not trial.network.bits.any():
        trial = after(Network, nobody, trials.MOST)
    if gradient == 0 and torch.equal(trial.tensors[0], _rows(nobody)):
        raise BadInput(f"{name} does not change x; a step changes it in place")
    if not trial.network.bits.any():
        raise BadInput(f"{name} sends no messages; a step yields them")
    as_they_are = after(trials.SilentNetwork, nobody, STEPS).tensors[0]
    for changed in _halves(topology.n_workers):
        others = after(trials.SilentNetwork, changed, STEPS).tensors[0][~changed]
        if not torch.allclose(others, as_they_are[~changed], rtol=1e-3, atol=1e-5, equal_nan=True):
            raise BadInput(
                f"{name} changes a worker's model by that of another one, without a message; the "
                "rows of x are the models of different workers"
            )


def _halves(n: int) -> Iterator[Tensor]:
    """Sets of workers, bool [worker]: of any two workers, each is without the other in one."""
    workers = torch.arange(n)
    for bit in range((n - 1).bit_length()):
        for value in (0, 1):
            yield (workers >> bit & 1) == value


def _rows(changed: Tensor) -> Tensor:
    """Vectors of the workers [worker, D], where those of some workers are others."""
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, len(changed), SIZE**2, generator=generator).unbind()
    return x + other * changed[:, None]


def averaging(own: Values, network: Network, size: int) -> algorithms.Averaging:
    """The averaging rule of a setting for square matrices."""
    options = {k.removeprefix(OPTION): v for k, v in own.items() if k.startswith(OPTION)}
    return algorithms.make(own["optimizer"], network, Layout([(size, size)]), **options)
