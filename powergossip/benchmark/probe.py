"""Whether workers learn of each other by messages only.

All workers of a benchmark are in one process, where a method could read the models and gradients of
others. So it makes some steps with zeros in place of all messages: a change of some workers must
then not change the others. Aggregations are not tried: their mean is equal in all workers, so that
one process may compute it once.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from powergossip import algorithms
from powergossip.benchmark.tasks import OPTION, Values
from powergossip.errors import BadInput
from powergossip.network import Conversation, Exchange, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology
from powergossip.training.config import Settings
from powergossip.training.methods import make_method
from powergossip.trees import map_tensors

SIZE = 16  # rows and columns of the matrices
STEPS, SILENT_STEPS = 10, 3

# Makes steps from models in which those of some workers are others. Returns rows of the workers.
Try = Callable[[Network, Tensor, int], Tensor]


class SilentNetwork(Network):
    """A network whose workers receive zeros in place of all messages."""

    def start(self, conversation: Conversation) -> Exchange:
        """Send the first messages of a conversation."""
        return super().start(_with_zeros(conversation))


def _with_zeros(conversation: Conversation) -> Conversation:
    received = None
    while True:
        try:
            messages = conversation.send(received)
        except StopIteration:
            return
        received = map_tensors(torch.zeros_like, (yield messages))


def probe(own: Values, topology: Topology) -> None:
    """Try the averaging rule of a setting.

    Raises BadInput if a step fails, if it does not change x, or if workers learn of each other in
    another way than by messages.
    """
    if own["optimizer"] in algorithms.AVERAGING:
        _check(own["optimizer"], topology, partial(_of_averaging, own), changes_x=True)


def probe_learning(c: Settings, topology: Topology) -> None:
    """Try a learning rule as `probe` does."""
    if c.optimizer in algorithms.AVERAGING and not c.by_edges:
        _check(c.learning, topology, partial(_of_learning, c))


def _check(name: str, topology: Topology, attempt: Try, changes_x: bool = False) -> None:
    n = topology.n_workers

    def made(kind: type[Network], changed: Tensor, steps: int) -> Tensor:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        try:
            return attempt(kind(topology, Processes()), _rows(changed), steps)
        except ValueError:  # of options
            raise
        except Exception as error:
            raise BadInput(f"{name} fails: {type(error).__name__}: {error}") from error

    nobody = torch.zeros(n, dtype=torch.bool)
    if changes_x and torch.equal(made(Network, nobody, STEPS), _rows(nobody)):
        raise BadInput(f"{name} does not change x in {STEPS} steps; a step changes it in place")
    as_they_are = made(SilentNetwork, nobody, SILENT_STEPS)
    for changed in _halves(n):
        others = made(SilentNetwork, changed, SILENT_STEPS)[~changed]
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


def _of_averaging(own: Values, network: Network, x: Tensor, steps: int) -> Tensor:
    rule = averaging(own, network, SIZE)
    for _ in range(steps):
        network.run(rule.step(x))
    return x


def averaging(own: Values, network: Network, size: int) -> algorithms.Averaging:
    """The averaging rule of a setting for square matrices."""
    options = {k.removeprefix(OPTION): v for k, v in own.items() if k.startswith(OPTION)}
    return algorithms.make(own["optimizer"], network, Layout([(size, size)]), **options)


def _of_learning(c: Settings, network: Network, x: Tensor, steps: int) -> Tensor:
    parameters = Parameters([nn.Linear(SIZE, SIZE, bias=False) for _ in network.workers])
    parameters.x.copy_(x)
    method = make_method(c, network, parameters, STEPS)
    for _ in range(steps * c.local_steps):
        method.at_epoch(0.0)
        method.rule.start()
        parameters.grad += x
        method.rule.finish()
    return parameters.x
