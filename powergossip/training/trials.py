"""Trial steps of the rows that a script has added, before data are loaded.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication. A state that misses something would be noticed after a checkpoint, or never.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from powergossip import algorithms, options
from powergossip.algorithms import Averaging, aggregation, learning
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.error_feedback import ErrorFeedback
from powergossip.compressors import COMPRESSORS
from powergossip.network import Conversation, Exchange, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology
from powergossip.training.config import Settings
from powergossip.trees import map_tensors

STEPS, MORE = 7, 3  # before and after a state is saved
MOST = 1000  # steps in which a method has to average
SIZE = 32  # rows and columns of the only matrix


class Trial(NamedTuple):
    """A row that makes steps, with all workers in this process.

    Attributes:
        tensors: The tensors [worker, D] that are no part of its state, first x or the gradient.
        parts: The row, and other parts with state.
        step: Step with a displacement of x or a gradient [worker, D].
    """

    network: Network
    tensors: tuple[Tensor, ...]
    parts: tuple[Any, ...]
    step: Callable[[Tensor], Any]


class _Model(nn.Linear):
    """A matrix, also for Muon."""

    def hidden_matrices(self) -> list[str]:
        return ["weight"]


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


def of_averaging(
    make: Callable[[Network, Layout], Averaging], network: Network, x: Tensor
) -> Trial:
    """Steps of an averaging rule on x [worker, D], square matrices."""
    rule = make(network, _layout(x))
    return Trial(network, (x,), (rule,), lambda u: network.run(rule.step(x.add_(u))))


def of_learning(make: Callable[[Network, Parameters], Any], network: Network, x: Tensor) -> Trial:
    """Steps of a learning rule from x [worker, D], square matrices, which stays as it is.

    Args:
        make: Function that makes a `methods.Method`.
    """
    (side, _) = _layout(x).shapes[0]
    parameters = Parameters([_Model(side, side, bias=False) for _ in network.workers])
    parameters.x.copy_(x)
    method = make(network, parameters)

    def step(gradient: Tensor) -> None:
        method.at_epoch(0.0)
        method.rule.start()
        parameters.grad += gradient
        method.rule.finish()

    tensors = parameters.x, parameters.grad
    return Trial(network, tensors, (method.rule, method.local), step)


def _of_aggregation(
    c: Settings, make: Callable[[Network, Layout], Aggregation], network: Network, gradient: Tensor
) -> Trial:
    rule, mean = make(network, _layout(gradient)), torch.zeros_like(gradient)

    def step(new: Tensor) -> None:
        rule.at_epoch(0.0)
        rule.at_learning_rate(c.learning_rate)
        network.run(rule.step(gradient.add_(new), mean))

    return Trial(network, (gradient, mean), (rule,), step)


def _layout(x: Tensor) -> Layout:
    side = isqrt(x.shape[1])
    return Layout([(side, side)])


def are_needed(c: Settings) -> bool:
    """Whether the method or its compressor is none of the library."""
    row = {**algorithms.AVERAGING, **aggregation.AGGREGATIONS}.get(c.optimizer)
    return not options.are_of_library(row, COMPRESSORS.get(c.options.get("compressor", "")))


def try_averaging(
    c: Settings, topology: Topology, make: Callable[[Network, Layout], Averaging]
) -> None:
    """Make steps with matrices of normal numbers, all workers in this process.

    Raises ValueError if x stays as it is, if nothing is sent, for an incomplete state, and the
    errors of the steps.
    """
    name, x = _name(c), _start(topology)

    def new() -> Trial:
        return of_averaging(make, _network(topology), _start(topology))

    trial = new()
    alone = Trial(trial.network, (x,), (), x.add_)
    if topology.n_workers > 1 and not any(
        _steps(trial, 1)[0].ne(_steps(alone, 1)[0]).any() for _ in range(MOST)
    ):
        raise ValueError(f"{name} does not change x; a step changes it in place")
    _check_sent(name, trial)
    _tried(name, new)


def try_aggregation(
    c: Settings, topology: Topology, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """The same for an aggregation.

    Raises ValueError also if the mean stays as it is, differs between workers, or has gradients
    that no message had.
    """
    name = _name(c)

    def new() -> Trial:
        return _of_aggregation(c, make, _network(topology), _start(topology))

    trial = new()
    if not any(_steps(trial, 1)[1].any() for _ in range(MOST)):
        raise ValueError(f"{name} does not change mean; a step fills it in place")
    _check_sent(name, trial)
    mean = trial.tensors[1]
    if not _are_close([mean], [mean[:1].expand_as(mean)]):
        raise ValueError(f"{name} fills mean with another one for each worker; use equal rows")
    trial = _tried(name, new)
    if not isinstance(trial.parts[0], ErrorFeedback):  # which decodes once in a process
        _check_messages(name, c, topology, make)


def _check_sent(name: str, trial: Trial) -> None:
    """Make steps until a worker has sent something. Raises ValueError after `MOST` of them."""
    for _ in range(MOST):
        if trial.network.n_workers == 1 or trial.network.bits.any():
            return
        _steps(trial, 1)
    raise ValueError(f"{name} sends no messages; a step yields them")


def _check_messages(
    name: str, c: Settings, topology: Topology, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """Raise ValueError if without messages a worker's mean depends on the gradient of another."""
    means = []
    for change in (0.0, 1.0):
        silent = SilentNetwork(topology, Processes())
        trial = _of_aggregation(c, make, silent, _start(topology))
        with suppress(Exception):  # some cannot work with zeros
            _steps(trial, STEPS + MORE, change)
            means.append(trial.tensors[1][1:])
    if len(means) == 2 and not _are_close(means[:1], means[1:]):
        raise ValueError(
            f"{name} computes a worker's mean from the gradient of another one, without a message; "
            "the rows of gradient and mean are those of different workers"
        )


def is_needed_of_learning(c: Settings) -> bool:
    """Whether the learning rule is none of the library and has steps of all workers together."""
    return not (c.by_edges or options.are_of_library(learning.LEARNING[c.learning]))


def try_learning(
    c: Settings, topology: Topology, make: Callable[[Network, Parameters], Any]
) -> None:
    """The same for a learning rule.

    Raises ValueError also if x does not depend on the gradients, or if it sends no messages.
    """
    name = f"learning={c.learning}"

    def new() -> Trial:
        return of_learning(make, _network(topology), _start(topology))

    trial, idle = new(), new()
    learns = sends = False
    for _ in range(max(MOST, 2 * c.local_steps)):
        _steps(trial, 1)
        idle.step(torch.zeros_like(idle.tensors[0]))
        learns = not torch.equal(trial.tensors[0], idle.tensors[0])
        sends = topology.n_workers == 1 or bool(trial.network.bits.any())
        if learns and sends:
            break
    if not learns:
        raise ValueError(f"{name} does not change x by gradients; a step changes it in place")
    if not sends:
        raise ValueError(f"{name} sends no messages; yield Mix(...) of a step of averaging")
    _tried(name, new)


def _tried(name: str, new: Callable[[], Trial]) -> Trial:
    """A new trial, after some steps.

    Raises ValueError unless others with its state go on as it does. A row that draws numbers of its
    own is not compared.
    """
    trial = new()
    for part in trial.parts:
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(part, method):
                raise ValueError(f"{name} has no {method}; checkpoints need it")
    _steps(trial, STEPS)
    state = [part.state_dict() for part in trial.parts]
    others = new(), new()
    for other in others:
        other.network.load_state_dict(trial.network.state_dict())
        for tensor, saved in zip(other.tensors, trial.tensors, strict=True):
            tensor.copy_(saved)
        for part, saved in zip(other.parts, map_tensors(torch.clone, state), strict=True):
            part.load_state_dict(saved)
    found, first, second = (_steps(of, MORE) for of in (trial, *others))
    if _are_close(first, second) and not _are_close(found, first):
        raise ValueError(
            f"{name} goes on differently from a checkpoint; its state_dict or load_state_dict "
            "misses something that the next step depends on"
        )
    return trial


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(own, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for own, other in zip(first, second, strict=True)
    )


def _steps(trial: Trial, number: int, change: float = 0.0) -> tuple[Tensor, ...]:
    """Make steps with normal numbers, the same in all trials but for a change of those of worker 0.

    Returns the tensors.
    """
    random = torch.Generator().manual_seed(number)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        for _ in range(number):
            numbers = torch.randn(trial.tensors[0].shape, generator=random)
            numbers[0] += change
            try:
                trial.step(numbers)
            except Exception as error:
                error.add_note(f"in a trial step, with a matrix {SIZE} × {SIZE} for each worker")
                raise
    return trial.tensors


def _network(topology: Topology) -> Network:
    return Network(topology, Processes())


def _start(topology: Topology) -> Tensor:
    return torch.randn(topology.n_workers, SIZE**2, generator=torch.Generator().manual_seed(0))


def _name(c: Settings) -> str:
    compressor = c.options.get("compressor")
    return f"optimizer={c.optimizer}" + (f" with compressor={compressor}" if compressor else "")
