"""Whether workers learn of each other by messages only.

All workers of a benchmark are in one process, where a method could read the models and gradients of
others. So it makes some steps with zeros in place of all messages, twice: a change of worker 0 must
then not change the others. powergossip.training.trials does so with aggregations.
"""

from collections.abc import Callable
from functools import partial

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
STEPS, SILENT_STEPS = 10, 3


def probe(own: Values, topology: Topology) -> None:
    """Try the averaging rule of a setting.

    Raises BadInput if a step fails, if it does not change x, or if workers learn of each other in
    another way than by messages.
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
    network, x = Network(topology, Processes()), _rows(topology, 0.0)
    trial = make(network, x.clone())
    silent = [
        (make(trials.SilentNetwork(topology, Processes()), rows), gradient * rows.clone())
        for rows in (_rows(topology, change) for change in (0.0, 1.0))
    ]
    try:
        after = _steps(trial, gradient * x, STEPS * local_steps)
        first, second = (_steps(*of, SILENT_STEPS * local_steps)[1:] for of in silent)
    except Exception as error:
        raise BadInput(f"a step of {name} fails: {type(error).__name__}: {error}") from error
    if gradient == 0 and torch.equal(after, x):
        raise BadInput(f"{name} does not change x; a step changes it in place")
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise BadInput(
            f"{name} changes a worker's model by that of another one, without a message; the rows "
            "of x are the models of different workers"
        )


def _steps(trial: trials.Trial, gradient: Tensor, number: int) -> Tensor:
    torch.manual_seed(1)
    for _ in range(number):
        trial.step(gradient)
    return trial.tensors[0]


def _rows(topology: Topology, change: float) -> Tensor:
    """Vectors of the workers [worker, D], where that of worker 0 is another one by `change`."""
    x = torch.randn(topology.n_workers, SIZE**2, generator=torch.Generator().manual_seed(1))
    x[0] += change
    return x


def averaging(own: Values, network: Network, size: int) -> algorithms.Averaging:
    """The averaging rule of a setting for square matrices."""
    options = {k.removeprefix(OPTION): v for k, v in own.items() if k.startswith(OPTION)}
    return algorithms.make(own["optimizer"], network, Layout([(size, size)]), **options)
