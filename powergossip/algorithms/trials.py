"""Trial steps of the user's rows, before a run.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication. A run with a state that is not restored would resume as another one.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powergossip import registry_options as options
from powergossip.algorithms import aggregation, registry
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.averaging import Averaging
from powergossip.compressors import COMPRESSORS
from powergossip.network import Conversation, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.state_trees import map_tensors
from powergossip.topologies import Topology
from powergossip.user_functions import one_sentence, seeded, where

MOST = 1000  # a method has to average within so many steps
SIZE = 32  # rows and columns of the only matrix
LAYOUT = Layout([(SIZE, SIZE)])

# For x [worker, D] at the start: the tensor [worker, D] that steps change, the row, and a step with
# a displacement of x or a gradient [worker, D].
Begun = tuple[Tensor, Any, Callable[[Tensor], Any]]
Begin = Callable[[Network, Tensor], Begun]


class _Model(nn.Linear):
    """A matrix, also for Muon."""

    def hidden_matrices(self) -> list[str]:
        return ["weight"]


def are_needed(name: str, given: Mapping[str, Any]) -> bool:
    """True if the method of this name, or its compressor, is not of the library."""
    row = {**registry.AVERAGING, **aggregation.AGGREGATIONS}.get(name)
    return not options.are_of_library(row, COMPRESSORS.get(given.get("compressor", "")))


def try_averaging(
    name: str, topology: Topology, make: Callable[[Network, Layout], Averaging]
) -> None:
    """Make steps with matrices of normal numbers, all workers in this process.

    Raises ValueError if x stays as it is, if nothing is sent, if a new row does not have the state
    that it is given, and the errors of the steps.
    """

    def begin(network: Network, x: Tensor) -> Begun:
        rule = make(network, LAYOUT)
        return x, rule, lambda _: _run(name, network, rule.step(x))

    _try(name, "x", topology, begin)


def try_aggregation(
    name: str, topology: Topology, rate: float, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """The same for an aggregation, which fills the mean."""

    def begin(network: Network, gradient: Tensor) -> Begun:
        rule, mean = make(network, LAYOUT), torch.zeros_like(gradient)

        def step(new: Tensor) -> None:
            rule.at_epoch(0.0)
            rule.at_learning_rate(rate)
            _run(name, network, rule.step(gradient.add_(new), mean))

        return mean, rule, step

    _try(name, "mean", topology, begin)


def try_learning(
    name: str, topology: Topology, local_steps: int, make: Callable[[Network, Parameters], Any]
) -> None:
    """The same for a learning rule. `make` makes a `Learner` of training with it."""

    def begin(network: Network, x: Tensor) -> Begun:
        parameters = Parameters([_Model(SIZE, SIZE, bias=False) for _ in network.workers])
        parameters.x.copy_(x)
        method = make(network, parameters)

        def step(gradient: Tensor) -> None:
            method.at_epoch(0.0)
            method.rule.start()
            parameters.grad += gradient
            method.rule.finish()

        return parameters.x, method.rule, step

    _try(name, "x", topology, begin, 2 * local_steps)


def _run(name: str, network: Network, conversation: Conversation) -> None:
    """Run a step. An error of its messages has the line that yields them."""
    if not isinstance(conversation, Generator):
        kind = type(conversation).__name__
        raise ValueError(f"{name}: step returned {kind}; use a generator, which yields messages")
    try:
        network.run(conversation)
    except (TypeError, ValueError) as error:
        if not where(error):
            conversation.throw(error)
        raise


def _try(name: str, what: str, topology: Topology, begin: Begin, period: int = 0) -> None:
    """Make steps until the tensor changes and messages were sent, if there are any. An error of the
    row is a sentence with its line."""
    network, random = Network(topology, Processes()), torch.Generator().manual_seed(0)
    numbers = torch.randn(topology.n_workers, SIZE**2, generator=random)
    place = f"{name}, in a trial step with a matrix {SIZE} × {SIZE} for each worker,"
    with one_sentence(place), seeded(0):
        changed, row, step = begin(network, numbers.clone())
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(row, method):
                raise ValueError(f"{name} has no {method}; checkpoints need it")
        before, alone = changed.clone(), topology.n_workers == 1
        changes = sends = alone
        for _ in range(max(MOST, period)):
            step(numbers)
            changes |= not torch.equal(changed, before)
            sends |= bool(network.bits.any())
            if changes and sends:
                break
        if not changes:
            raise ValueError(f"{name} does not change {what}; a step changes it in place")
        if not sends:
            raise ValueError(f"{name} sends no messages; a step yields them")
        state = map_tensors(torch.clone, row.state_dict())
        _, other, _ = begin(network, numbers.clone())
        other.load_state_dict(state)
        if not _same(state, other.state_dict()):
            raise ValueError(
                f"{name}: after load_state_dict, state_dict returns another state; checkpoints "
                "need the same one"
            )


def _same(a: Any, b: Any) -> bool:
    """True if two states have the same leaves."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
