"""Trial steps of the user's rows, before a run.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication. One that reads rows of other workers would train on messages that it does not
send, as long as one process hosts them all.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip import registry_options as options
from powergossip.algorithms import aggregation, registry
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.averaging import Averaging
from powergossip.algorithms.error_feedback import ErrorFeedback
from powergossip.algorithms.quantized_mean import QuantizedMean
from powergossip.compressors import COMPRESSORS
from powergossip.network import Conversation, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.state_trees import map_tensors
from powergossip.topologies import Topology
from powergossip.user_functions import one_sentence, seeded, where

STEPS = 5  # with messages of ones, at least
MOST = 1000  # a method has to average within so many steps
SIZE = 32  # rows and columns of the only matrix
LAYOUT = Layout([(SIZE, SIZE)])

# For x [worker, D] at the start: the tensor [worker, D] that steps change, the row, and a step with
# a displacement of x or a gradient [worker, D].
Begun = tuple[Tensor, Any, Callable[[Tensor], Any]]
Begin = Callable[[Network, Tensor], Begun]


class _Network(Network):
    """All workers in this process. They may receive ones in place of all messages."""

    shares = False

    def __init__(self, topology: Topology, ones: bool):
        super().__init__(topology, Processes())
        self._ones = ones

    def receive(self, transports: Sequence[Any]) -> list[Any]:
        """The messages that arrive."""
        received = super().receive(transports)
        return map_tensors(torch.ones_like, received) if self._ones else received


class _Trial:
    """A row that makes steps with normal numbers, the same in all trials."""

    def __init__(self, begin: Begin, topology: Topology, ones: bool = False):
        self.network = _Network(topology, ones)
        x = torch.randn(topology.n_workers, SIZE**2, generator=torch.Generator().manual_seed(0))
        with seeded(0):
            self.changed, self.row, self._step = begin(self.network, x)

    def steps(self, number: int, first: float = 0.0) -> Tensor:
        """Make steps, with larger numbers of the first worker. Returns the changed tensor."""
        random = torch.Generator().manual_seed(number)
        with seeded(number):
            for _ in range(number):
                numbers = torch.randn(self.changed.shape, generator=random)
                numbers[0] += first
                self._step(numbers)
        return self.changed


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

    Raises ValueError if x stays as it is, if nothing is sent, if workers learn of the first one in
    another way than by messages, and the errors of the steps.
    """

    def begin(network: Network, x: Tensor) -> Begun:
        rule = make(network, LAYOUT)
        return x, rule, lambda u: _run(name, network, rule.step(x.add_(u)))

    _try(name, "x", topology, begin, lambda network, x: (x, None, x.add_))


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

    zeros = torch.zeros(topology.n_workers, LAYOUT.size)
    _try(name, "mean", topology, begin, lambda *_: (zeros, None, torch.clone))


def try_learning(
    name: str, topology: Topology, local_steps: int, make: Callable[[Network, Parameters], Any]
) -> None:
    """The same for a learning rule. `make` makes a `Learner` of training with it."""

    def begin(network: Network, x: Tensor, factor: float = 1.0) -> Begun:
        parameters = Parameters([_Model(SIZE, SIZE, bias=False) for _ in network.workers])
        parameters.x.copy_(x)
        method = make(network, parameters)

        def step(gradient: Tensor) -> None:
            method.at_epoch(0.0)
            method.rule.start()
            parameters.grad += factor * gradient
            method.rule.finish()

        return parameters.x, method.rule, step

    _try(name, "x by gradients", topology, begin, partial(begin, factor=0.0), 2 * local_steps)


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


def _try(
    name: str, what: str, topology: Topology, begin: Begin, begin_idle: Begin, period: int = 0
) -> None:
    """Make steps until the first tensor differs from an idle trial's and messages were sent, if
    there are any. An error of the row is a sentence with its line."""
    with one_sentence(f"{name}, in a trial step with a matrix {SIZE} × {SIZE} for each worker,"):
        trial, idle = _Trial(begin, topology), _Trial(begin_idle, topology)
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(trial.row, method):
                raise ValueError(f"{name} has no {method}; checkpoints need it")
        changes = sends = topology.n_workers == 1
        steps = max(STEPS, period)
        for step in range(max(MOST, period)):
            changes |= not torch.equal(trial.steps(1), idle.steps(1))
            sends |= bool(trial.network.bits.any())
            if changes and sends:
                steps += step
                break
        if not changes:
            raise ValueError(f"{name} does not change {what}; a step changes it in place")
        if not sends:
            raise ValueError(f"{name} sends no messages; a step yields them")
        trial.row.state_dict()
        below = getattr(trial.row, "_averaging", trial.row)
        if isinstance(below, ErrorFeedback | QuantizedMean):
            return  # they decode a message once in a process
        if _leaks(topology, begin, max(STEPS, period)):
            raise ValueError(
                f"{name}: a worker learns of another one without a message; the rows of a tensor "
                "are those of different workers"
            )
        if period and topology.n_workers > 1 and _ignores(topology, begin, steps):
            raise ValueError(
                f"{name} does not use the messages that it receives; mixed returns the tensors of "
                "the rule themselves, not copies"
            )


def _ignores(topology: Topology, begin: Begin, steps: int) -> bool:
    """True if other messages make no difference."""
    with suppress(Exception):  # some cannot work with such messages
        found, other = (_Trial(begin, topology, ones).steps(steps) for ones in (False, True))
        return torch.equal(found, other)
    return False


def _leaks(topology: Topology, begin: Begin, steps: int) -> bool:
    """True if a worker depends on numbers of the first one, although all messages are ones."""
    with suppress(Exception):  # some cannot work with such messages
        found, again, other = (
            _Trial(begin, topology, ones=True).steps(steps, first) for first in (0.0, 0.0, 1.0)
        )
        close = partial(torch.allclose, rtol=1e-4, atol=1e-5, equal_nan=True)
        return close(found, again) and not close(found[1:], other[1:])
    return False
