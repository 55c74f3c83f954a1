"""Trial steps of the rows that a script has added, before data are loaded.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication. One that reads rows of other workers would train on messages that it does not
send, as long as one process hosts them all. A state that misses something would be noticed after a
checkpoint, or never.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from powergossip import algorithms, compressors, options
from powergossip.algorithms import Averaging, aggregation, learning
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.error_feedback import ErrorFeedback
from powergossip.compressors import COMPRESSORS, Codec
from powergossip.network import Conversation, Exchange, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.tasks.user_functions import seeded
from powergossip.topologies import Topology
from powergossip.training.config import Settings
from powergossip.trees import map_tensors

STEPS, MORE = 7, 3  # before and after a state is saved
MOST = 1000  # steps in which a method has to average
SIZE = 32  # rows and columns of the only matrix
LAYOUT = Layout([(SIZE, SIZE)])


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


class _TrialNetwork(Network):
    """A network of which a step has to end, and whose workers may receive zeros, or ones, in place
    of all messages."""

    shares = False

    def __init__(self, topology: Topology, received: int | None = None):
        super().__init__(topology, Processes())
        self._received = received

    def start(self, conversation: Conversation) -> Exchange:
        """Send the first messages of a conversation."""
        is_generator = hasattr(conversation, "send")  # otherwise an error of Network names the type
        return super().start(
            _replaced(conversation, self._received) if is_generator else conversation
        )


def _replaced(conversation: Conversation, by: int | None) -> Conversation:
    received = None
    for _ in range(10 * MOST):
        try:
            messages = conversation.send(received)
        except StopIteration:
            return
        received = yield messages
        if by is not None:
            received = map_tensors(lambda tensor: torch.full_like(tensor, by), received)
    raise ValueError(f"a step has yielded {10 * MOST} messages; a step of averaging has to end")


def _of_averaging(make: Callable[[Network, Layout], Averaging], network: Network) -> Trial:
    x = _start(network.topology)
    with seeded(0):
        rule = make(network, LAYOUT)
    return Trial(network, (x,), (rule,), lambda u: network.run(rule.step(x.add_(u))))


def _of_learning(make: Callable[[Network, Parameters], Any], network: Network) -> Trial:
    """Steps of a learning rule, where `make` makes a `methods.Learner`."""
    with seeded(0):
        parameters = Parameters([_Model(SIZE, SIZE, bias=False) for _ in network.workers])
        parameters.x.copy_(_start(network.topology))
        method = make(network, parameters)

    def step(gradient: Tensor) -> None:
        method.at_epoch(0.0)
        method.rule.start()
        parameters.grad += gradient
        method.rule.finish()

    tensors = parameters.x, parameters.grad
    return Trial(network, tensors, (method.rule, method.local), step)


def _of_aggregation(
    c: Settings, make: Callable[[Network, Layout], Aggregation], network: Network
) -> Trial:
    gradient = _start(network.topology)
    mean = torch.zeros_like(gradient)
    with seeded(0):
        rule = make(network, LAYOUT)

    def step(new: Tensor) -> None:
        rule.at_epoch(0.0)
        rule.at_learning_rate(c.learning_rate)
        network.run(rule.step(gradient.add_(new), mean))

    return Trial(network, (gradient, mean), (rule,), step)


def are_needed(c: Settings) -> bool:
    """Whether the method or its compressor is none of the library."""
    row = {**algorithms.AVERAGING, **aggregation.AGGREGATIONS}.get(c.optimizer)
    return not options.are_of_library(row, COMPRESSORS.get(c.options.get("compressor", "")))


def try_compressor(given: Mapping[str, Any]) -> None:
    """Decode messages of a script's compressor as their sender and as another process does.

    Raises ValueError if the results differ, or are not added, and the errors of the compressor.

    Args:
        given: Options of a method. `compressor` is the name.
    """
    name = given.get("compressor", "")
    if options.are_of_library(COMPRESSORS.get(name)):
        return
    known = options.defaults(COMPRESSORS[name])
    own = {key: given[key] for key in known if given.get(key) is not None}
    workers = torch.arange(4)
    sender, other = (Codec(LAYOUT, compressors.make(name, **own), range(4)) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    for step in range(MORE):
        x = torch.randn(4, LAYOUT.size, generator=random)
        message = sender.encode(x, step)
        found = sender.decode(message, workers, step)
        added = x.clone()
        sender.add(message, workers, step, added)
        if not _are_close([added], [x + found]):
            raise ValueError(f"compressor={name} assigns to out in decompress; add C(v) to it")
        with suppress(Exception):
            if _are_close([found], [other.decode(message, workers, step)]):
                continue
        raise ValueError(
            f"compressor={name} decompresses the same fields differently in another process; the "
            "result has to depend on the fields, the options and the stream only"
        )


def try_averaging(
    name: str, topology: Topology, make: Callable[[Network, Layout], Averaging]
) -> None:
    """Make steps with matrices of normal numbers, all workers in this process.

    Raises ValueError if x stays as it is, if nothing is sent, for an incomplete state, if workers
    learn of each other in another way than by messages, and the errors of the steps.
    """
    new = partial(_of_averaging, make)
    trial, x = new(_network(topology)), _start(topology)
    alone = Trial(trial.network, (x,), (), x.add_)
    if topology.n_workers > 1 and not any(
        _steps(trial, 1)[0].ne(_steps(alone, 1)[0]).any() for _ in range(MOST)
    ):
        raise ValueError(f"{name} does not change x; a step changes it in place")
    _check_sent(name, trial)
    _check_state(name, topology, new)
    _check_messages(name, topology, new)


def try_aggregation(
    c: Settings, topology: Topology, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """The same for an aggregation.

    Raises ValueError also if the mean stays as it is, or differs between workers.
    """
    name, new = name_of(c), partial(_of_aggregation, c, make)
    trial = new(_network(topology))
    if not any(_steps(trial, 1)[1].any() for _ in range(MOST)):
        raise ValueError(f"{name} does not change mean; a step fills it in place")
    _check_sent(name, trial)
    mean = trial.tensors[1]
    if not _are_close([mean], [mean[:1].expand_as(mean)]):
        raise ValueError(f"{name} fills mean with another one for each worker; use equal rows")
    _check_state(name, topology, new)
    if not isinstance(trial.parts[0], ErrorFeedback):  # decodes once in a process
        _check_messages(name, topology, new)


def _check_sent(name: str, trial: Trial) -> None:
    """Make steps until a worker has sent something. Raises ValueError after `MOST` of them."""
    for _ in range(MOST):
        if trial.network.n_workers == 1 or trial.network.bits.any():
            return
        _steps(trial, 1)
    raise ValueError(f"{name} sends no messages; a step yields them")


def _check_messages(
    name: str, topology: Topology, new: Callable[[Network], Trial], steps: int = STEPS + MORE
) -> None:
    """Raise ValueError if workers learn of each other in another way than by messages.

    All of them receive the same numbers in place of messages. Those of some are changed, which must
    not change the others.
    """
    nobody = torch.zeros(topology.n_workers, dtype=torch.bool)
    for received in (0, 1):

        def after(changed: Tensor, received: int = received) -> tuple[Tensor, ...]:
            return _steps(new(_TrialNetwork(topology, received)), steps, changed)

        leaks = False
        with suppress(Exception):  # some cannot work with such numbers
            found = after(nobody)
            if not _are_close(found, after(nobody)):
                return  # it draws numbers of its own
            leaks = any(
                not _are_close([x[~some] for x in after(some)], [x[~some] for x in found])
                for some in halves(topology.n_workers)
            )
        if leaks:
            raise ValueError(
                f"{name}: a worker learns of another one without a message; the rows of a tensor "
                "are those of different workers"
            )


def halves(n: int) -> Iterator[Tensor]:
    """Sets of workers, bool [worker]: of any two workers, each is without the other in one.

    Of more than 64 workers, with which more sets take long, this holds for 7 of 8 pairs.
    """
    workers = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    for bit in range((n - 1).bit_length() if n <= 64 else 3):
        for value in (0, 1):
            yield (workers >> bit & 1) == value


def is_needed_of_learning(c: Settings) -> bool:
    """Whether the learning rule is none of the library and has steps of all workers together."""
    return not (c.by_edges or options.are_of_library(learning.LEARNING[c.learning]))


def try_learning(
    c: Settings, topology: Topology, make: Callable[[Network, Parameters], Any]
) -> None:
    """The same for a learning rule.

    Raises ValueError also if x does not depend on the gradients, or if it sends no messages.
    """
    name, new = f"learning={c.learning}", partial(_of_learning, make)
    trial, idle = new(_network(topology)), new(_network(topology))
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
    _check_state(name, topology, new)
    if c.optimizer in algorithms.AVERAGING:
        _check_messages(name, topology, new, max(STEPS + MORE, 2 * c.local_steps))


def _check_state(name: str, topology: Topology, new: Callable[[Network], Trial]) -> None:
    """Raise ValueError unless others with the state of a trial go on as it does.

    A row that draws numbers of its own is not compared.
    """
    trial, *others = (new(_network(topology)) for _ in range(3))
    for part in trial.parts:
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(part, method):
                raise ValueError(f"{name} has no {method}; checkpoints need it")
    _steps(trial, STEPS)
    state = [part.state_dict() for part in trial.parts]
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


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(own, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for own, other in zip(first, second, strict=True)
    )


def _steps(trial: Trial, number: int, changed: Tensor | None = None) -> tuple[Tensor, ...]:
    """Make steps with normal numbers, the same in all trials but for those of `changed` workers.

    Returns the tensors.
    """
    random = torch.Generator().manual_seed(number)
    with seeded(number):
        for _ in range(number):
            numbers = torch.randn(trial.tensors[0].shape, generator=random)
            if changed is not None:
                numbers[changed] += 1
            try:
                trial.step(numbers)
            except Exception as error:
                error.add_note(f"in a trial step, with a matrix {SIZE} × {SIZE} for each worker")
                raise
    return trial.tensors


def _network(topology: Topology) -> Network:
    return _TrialNetwork(topology)


def _start(topology: Topology) -> Tensor:
    return torch.randn(topology.n_workers, SIZE**2, generator=torch.Generator().manual_seed(0))


def name_of(c: Settings) -> str:
    compressor = c.options.get("compressor")
    return f"optimizer={c.optimizer}" + (f" with compressor={compressor}" if compressor else "")
