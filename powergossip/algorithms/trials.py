"""Trial steps of the user's rows, before a run.

A step that returns no messages, or assigns to x or the mean in place of changing them, would train
without communication. One that reads rows of other workers would train on messages that it does not
send, as long as one process hosts them all. A state that misses something would be noticed after a
checkpoint, or never.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from powergossip import compressors, options
from powergossip.algorithms import aggregation, registry
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.averaging import Averaging
from powergossip.algorithms.error_feedback import ErrorFeedback
from powergossip.algorithms.quantized_mean import QuantizedMean
from powergossip.compressors import COMPRESSORS, Codec
from powergossip.network import Conversation, Network, Processes
from powergossip.parameters import Layout, Parameters
from powergossip.topologies import Topology
from powergossip.trees import map_tensors
from powergossip.user_functions import one_sentence, seeded, where

STEPS, MORE = 8, 3  # before a state is saved, and after it at least
MOST = 1000  # a method has to average within so many steps
SIZE = 32  # rows and columns of the only matrix
LAYOUT = Layout([(SIZE, SIZE)])

# For x [worker, D] at the start: the tensors [worker, D] outside the state, the first of them
# changed by steps; the row, and other parts with state; and a step with a displacement of x or a
# gradient [worker, D].
Begun = tuple[tuple[Tensor, ...], tuple[Any, ...], Callable[[Tensor], Any]]
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
            self.tensors, self.parts, self._step = begin(self.network, x)

    def steps(self, number: int, changed: Tensor | slice = slice(0)) -> tuple[Tensor, ...]:
        """Make steps, with other numbers of the `changed` workers. Returns the tensors."""
        random = torch.Generator().manual_seed(number)
        with seeded(number):
            for _ in range(number):
                numbers = torch.randn(self.tensors[0].shape, generator=random)
                numbers[changed] += 1
                self._step(numbers)
        return self.tensors


class _Model(nn.Linear):
    """A matrix, also for Muon."""

    def hidden_matrices(self) -> list[str]:
        return ["weight"]


def are_needed(name: str, given: Mapping[str, Any]) -> bool:
    """True if the method of this name, or its compressor, is not of the library."""
    row = {**registry.AVERAGING, **aggregation.AGGREGATIONS}.get(name)
    return not options.are_of_library(row, COMPRESSORS.get(given.get("compressor", "")))


def try_compressor(given: Mapping[str, Any]) -> None:
    """Decode messages of a script's compressor as their sender and as another process does.

    Raises ValueError if the results differ, or are not added, and the errors of the compressor.

    Args:
        given: Options of a method. `compressor` is the name.
    """
    name = given.get("compressor", "")
    if options.are_of_library(COMPRESSORS.get(name)):
        return
    with one_sentence(f"compressor={name}"):
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
                f"compressor={name} decompresses the same fields differently in another process; "
                "the result has to depend on the fields, the options and the stream only"
            )


def try_averaging(
    name: str, topology: Topology, make: Callable[[Network, Layout], Averaging]
) -> None:
    """Make steps with matrices of normal numbers, all workers in this process.

    Raises ValueError if x stays as it is, if nothing is sent, for an incomplete state, if workers
    learn of each other in another way than by messages, and the errors of the steps.
    """

    def begin(network: Network, x: Tensor) -> Begun:
        rule = make(network, LAYOUT)
        return (x,), (rule,), lambda u: _run(name, network, rule.step(x.add_(u)))

    _try(name, "x", topology, begin, lambda network, x: ((x,), (), x.add_))


def try_aggregation(
    name: str, topology: Topology, rate: float, make: Callable[[Network, Layout], Aggregation]
) -> None:
    """The same for an aggregation, which fills the mean, with equal rows for all workers."""

    def begin(network: Network, gradient: Tensor) -> Begun:
        rule, mean = make(network, LAYOUT), torch.zeros_like(gradient)

        def step(new: Tensor) -> None:
            rule.at_epoch(0.0)
            rule.at_learning_rate(rate)
            _run(name, network, rule.step(gradient.add_(new), mean))

        return (mean, gradient), (rule,), step

    zeros = torch.zeros(topology.n_workers, LAYOUT.size)
    mean = _try(name, "mean", topology, begin, lambda *_: ((zeros,), (), torch.clone))
    if not _are_close([mean], [mean[:1].expand_as(mean)]):
        raise ValueError(f"{name} fills mean with another one for each worker; use equal rows")


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

        return (parameters.x, parameters.grad), (method.rule, method.local), step

    idle, period = partial(begin, factor=0.0), 2 * local_steps
    _try(name, "x by gradients", topology, begin, idle, period)


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


def _try(name: str, *arguments: Any) -> Tensor:
    """`_try_steps`. An error of the row is a sentence with its line."""
    with one_sentence(f"{name}, in a trial step with a matrix {SIZE} × {SIZE} for each worker,"):
        return _try_steps(name, *arguments)


def _try_steps(
    name: str, what: str, topology: Topology, begin: Begin, begin_idle: Begin, period: int = 0
) -> Tensor:
    """Make steps until the first tensor differs from an idle trial's and messages were sent in two
    steps, if there are so many. Then check state and messages. Returns the tensor."""
    trial, idle = _Trial(begin, topology), _Trial(begin_idle, topology)
    for part in trial.parts:
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(part, method):
                raise ValueError(f"{name} has no {method}; checkpoints need it")
    alone = changes = topology.n_workers == 1
    sent: list[int] = []  # steps with messages
    bits = 0
    for step in range(max(MOST, period)):
        changes |= not torch.equal(trial.steps(1)[0], idle.steps(1)[0])
        if (now := int(trial.network.bits.sum())) > bits:
            bits = now
            sent.append(step)
        if changes and (alone or len(sent) > 1):
            break
    if not changes:
        raise ValueError(f"{name} does not change {what}; a step changes it in place")
    if not sent and not alone:
        raise ValueError(f"{name} sends no messages; a step yields them")
    more = max([MORE, *(later - earlier for earlier, later in pairwise(sent[-2:]))])
    if not _goes_on(trial, [_Trial(begin, topology) for _ in range(2)], more):
        raise ValueError(
            f"{name} goes on differently from a checkpoint; its state_dict or load_state_dict "
            "misses something that the next step depends on"
        )
    decodes_once = isinstance(trial.parts[0], ErrorFeedback | QuantizedMean)  # in a process
    if not decodes_once and _leaks(topology, begin, max(STEPS + MORE, period, *sent[-1:])):
        raise ValueError(
            f"{name}: a worker learns of another one without a message; the rows of a tensor "
            "are those of different workers"
        )
    return trial.tensors[0]


def _goes_on(trial: _Trial, others: Sequence[_Trial], steps: int) -> bool:
    """True if two others with the state of a trial make these steps as it does, or draw their own
    numbers."""
    trial.steps(STEPS)
    state = [part.state_dict() for part in trial.parts]
    for other in others:
        other.network.load_state_dict(trial.network.state_dict())
        for tensor, saved in zip(other.tensors, trial.tensors, strict=True):
            tensor.copy_(saved)
        for part, saved in zip(other.parts, map_tensors(torch.clone, state), strict=True):
            part.load_state_dict(saved)
    found, first, second = (each.steps(steps) for each in (trial, *others))
    return _are_close(found, first) or not _are_close(first, second)


def _leaks(topology: Topology, begin: Begin, steps: int) -> bool:
    """True if a worker depends on numbers of others, although all messages are ones."""
    with suppress(Exception):  # some cannot work with such messages
        found, again = (_Trial(begin, topology, ones=True).steps(steps) for _ in range(2))
        return _are_close(found, again) and any(  # otherwise it draws its own numbers
            not _are_close([x[~some] for x in after], [x[~some] for x in found])
            for some in halves(topology.n_workers)
            for after in [_Trial(begin, topology, ones=True).steps(steps, some)]
        )
    return False


def halves(n: int) -> Iterator[Tensor]:
    """Sets of workers, bool [worker]: of any two workers, each is without the other in one."""
    workers = torch.arange(n)
    for bit in range((n - 1).bit_length()):
        for value in (0, 1):
            yield (workers >> bit & 1) == value


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(own, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for own, other in zip(first, second, strict=True)
    )
