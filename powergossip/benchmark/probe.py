"""Whether workers learn of each other by messages only.

All workers of a benchmark are in one process, where a method could read the models and gradients of
others. So it makes some steps with zeros in place of all messages, twice: a change of worker 0 must
then not change the others. Aggregations are not tried: their mean is equal in all workers, so that
one process may compute it once.
"""

from collections.abc import Callable
from functools import partial

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

Steps = Callable[[int], Tensor]  # makes steps and returns rows of the workers


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


def _check(
    name: str, topology: Topology, make: Callable[[Network, float], Steps], changes_x: bool = False
) -> None:
    network = Network(topology, Processes())
    steps = make(network, 0.0)
    silent = [make(SilentNetwork(topology, Processes()), change) for change in (0.0, 1.0)]
    try:
        x, first, second = steps(STEPS), *(of(SILENT_STEPS)[1:] for of in silent)
    except Exception as error:
        raise BadInput(f"a step of {name} fails: {type(error).__name__}: {error}") from error
    if changes_x and torch.equal(x, _rows(network, 0.0)):
        raise BadInput(f"{name} does not change x; a step changes it in place")
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise BadInput(
            f"{name} changes a worker's model by that of another one, without a message; the rows "
            "of x are the models of different workers"
        )


def _rows(network: Network, change: float) -> Tensor:
    """Vectors of the workers [worker, D], where that of worker 0 is another one by `change`."""
    x = torch.randn(network.rows, SIZE**2, generator=torch.Generator().manual_seed(1))
    x[0] += change
    return x


def _of_averaging(own: Values, network: Network, change: float) -> Steps:
    rule, x = averaging(own, network, SIZE), _rows(network, change)

    def steps(number: int) -> Tensor:
        torch.manual_seed(1)
        for _ in range(number):
            network.run(rule.step(x))
        return x

    return steps


def averaging(own: Values, network: Network, size: int) -> algorithms.Averaging:
    """The averaging rule of a setting for square matrices."""
    options = {k.removeprefix(OPTION): v for k, v in own.items() if k.startswith(OPTION)}
    return algorithms.make(own["optimizer"], network, Layout([(size, size)]), **options)


def _of_learning(c: Settings, network: Network, change: float) -> Steps:
    parameters = Parameters([nn.Linear(SIZE, SIZE, bias=False) for _ in network.workers])
    parameters.x.copy_(_rows(network, change))
    method = make_method(c, network, parameters, STEPS)

    def steps(number: int) -> Tensor:
        torch.manual_seed(1)
        for _ in range(number * c.local_steps):
            method.at_epoch(0.0)
            method.rule.start()
            parameters.grad += _rows(network, change)
            method.rule.finish()
        return parameters.x

    return steps
