"""Messages of a step, counted by running the method, and the CPU time of averaging.

The sizes of messages depend on the method and the shapes of the model only. The topology sets the
number of receivers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from powergossip import checks, topologies
from powergossip.algorithms import aggregation
from powergossip.algorithms.method import SMALL, Method
from powergossip.network import (
    Conversation,
    Gather,
    Mean,
    Message,
    Network,
    Processes,
    ToAll,
    ToEach,
)
from powergossip.network.conversation import mapped
from powergossip.parameters import Layout
from powergossip.prediction.fake_network import FakeProcesses
from powergossip.topologies import Topology

LENGTH = 4  # bytes of the length of a piece of an all-gather
Messages = tuple[Message, ...]
STEPS = 2  # after which the sides of power iteration repeat


@dataclass(frozen=True)
class PredictedMethod:
    """A row of algorithms.AVERAGING or aggregation.AGGREGATIONS with its options.

    With rounds of several local steps, the learning rule is learning=diloco.

    Attributes:
        local_steps: Number of local steps in a round.
        overlapping: True if messages are in flight during gradients: the messages of the first
            phase of a step, or of a whole round. None: for gossip in every step.

    Raises:
        ValueError: For rounds that the method cannot have.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    local_steps: int = 1
    overlapping: bool | None = None

    def __post_init__(self) -> None:
        averages = self.method.averages
        checks.at_least_one("local_steps", self.local_steps)
        ok = self.local_steps == 1 or averages or self.name in aggregation.OF_LOCAL_STEPS
        checks.check("local_steps", self.local_steps, ok, f"1 with {self.name}")
        value, possible = self.overlapping, self.gossips
        ok = value in (None, False) or (value is True and possible)
        accepted = "true or false" if possible else f"false with {self.name}"
        checks.check("overlapping", value, ok, accepted)

    @property
    def gossips(self) -> bool:
        """True if it averages models over the edges of a graph."""
        return self.method.gossips

    @property
    def overlaps(self) -> bool:
        """True if messages are in flight during gradients."""
        return (
            self.gossips and self.local_steps == 1 if self.overlapping is None else self.overlapping
        )

    @cached_property
    def method(self) -> Method:
        """The method of its name and options. Raises ValueError."""
        return Method.of(self.name, options=self.options)

    @property
    def at_once(self) -> "PredictedMethod":
        """The method of equal fidelity with the fewest messages: r directions in each of k
        iterations of PowerGossip are as good as r k directions in one."""
        if self.name != "power-gossip":
            return self
        rank, iterations = (self.method.options[key] for key in ("rank", "num_iterations"))
        one = {"rank": rank * iterations, "num_iterations": 1}
        return replace(self, options={**self.options, **one})

    def build(self, network: Network, layout: Layout) -> Callable[[Tensor], Conversation]:
        """Return a function of x [worker, D] that makes a step. ValueError for bad options."""
        if self.method.averages:
            return self.method.averaging_rule(network, layout).step
        aggregate = self.method.aggregation(network, layout)
        mean = torch.zeros(network.rows, layout.size)
        return lambda x: aggregate.step(x, mean)

    def rejects(self, topology: Topology) -> str:
        """The reason why the method cannot use a topology, or "" if it can."""
        network = Network(topology, FakeProcesses(topology.n_workers))
        try:
            self.build(network, SMALL)
        except ValueError as error:
            return str(error)
        return ""


_NOW = {"start_compressing_after_num_steps": 0}  # without steps of plain all-reduce before

METHODS: dict[str, PredictedMethod] = {  # in the order of decreasing fidelity of a step
    "all-reduce": PredictedMethod("all-reduce"),
    "D-PSGD": PredictedMethod("dpsgd"),
    "PowerSGD, rank 2": PredictedMethod("powersgd", {"rank": 2, "num_iters_per_step": 2, **_NOW}),
    "PowerGossip, rank 4, 4 bits": PredictedMethod(
        "power-gossip", {"rank": 4, "num_iterations": 1, "bits": 4}
    ),
    "PowerGossip, rank 2": PredictedMethod("power-gossip", {"rank": 2, "num_iterations": 1}),
    "PowerGossip, 2 iterations": PredictedMethod("power-gossip", {"num_iterations": 2}),
    "PowerGossip, 1 iteration": PredictedMethod("power-gossip", {"num_iterations": 1}),
    "CHOCO, sign": PredictedMethod("choco", {"compressor": "sign-and-norm"}),
    "CHOCO, top 1 %": PredictedMethod("choco", {"compressor": "top-k", "keep_ratio": 0.01}),
}


@dataclass(frozen=True)
class Phase:
    """Messages that are posted together and waited for together. Bytes of one worker.

    Attributes:
        neighbor: Bytes to each neighbor, in `neighbor_messages` messages.
        reduced: Bytes of all-reduced tensors, in `all_reduces` all-reduces.
        gathered: Bytes to each other worker, in `gathers` all-gathers.
    """

    neighbor: float = 0.0
    neighbor_messages: float = 0.0
    reduced: float = 0.0
    all_reduces: float = 0.0
    gathered: float = 0.0
    gathers: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """The phases of a step, the mean over `STEPS` steps."""

    phases: tuple[Phase, ...]

    def bits(self, n_workers: int, receivers: float) -> float:
        """Bits that a worker with this number of receivers sends in a step."""
        return 8 * sum(
            phase.neighbor * receivers
            + 2 * (n_workers - 1) / n_workers * phase.reduced
            + (n_workers - 1) * phase.gathered
            for phase in self.phases
        )

    def messages(self, n_workers: int, receivers: float) -> float:
        """Messages that a worker with this number of receivers sends in a step."""
        return sum(
            phase.neighbor_messages * receivers
            + 2 * (n_workers - 1) * (phase.all_reduces + phase.gathers)
            for phase in self.phases
        )


def count(method: PredictedMethod, layout: Layout) -> Traffic:
    """Run a method, and return its messages. Raises ValueError for bad options.

    Messages of few bits begin with whole ones, and become short in gossip if their receivers
    answer: all three workers of a ring take these steps, of which only the last ones count.
    """
    few = "bits" in method.options and method.gossips
    network = Network(topologies.make("ring", 3), Processes() if few else FakeProcesses(3))
    step, x = method.build(network, layout), _start(layout, len(network.workers))
    steps = []
    for _ in range((4 if few else 2) * STEPS):
        phases: list[Phase] = []

        def counted(messages: Messages, answers: Any, phases: list[Phase] = phases) -> Any:
            phase = _phase(messages)
            if phases and phases[-1].all_reduces == phase.all_reduces == 0.5:
                phases[-1] = Phase(reduced=phases[-1].reduced + phase.reduced, all_reduces=1)
            else:
                phases.append(phase)
            return answers

        network.run(mapped(step(x), counted))
        steps.append(phases)
    by_phase = zip(*steps[-STEPS:], strict=True)
    return Traffic(tuple(_mean(together) for together in by_phase))


def _phase(messages: Messages) -> Phase:
    neighbor = neighbors = gathered = gathers = 0
    reduced = reductions = 0.0
    for message in messages:
        if isinstance(message, ToAll):
            neighbor, neighbors = neighbor + message.tensor[0].nbytes, neighbors + 1
        elif isinstance(message, ToEach) and message.edges is not None:
            # Half an all-reduce of three workers: a third of the elements to each other one.
            reduced += 3 / 2 * message.tensor[0, 0].nbytes
            reductions += 1 / 2
        elif isinstance(message, ToEach):
            neighbor, neighbors = neighbor + message.tensor[0, 0].nbytes, neighbors + 1
        elif isinstance(message, Mean):
            reduced, reductions = reduced + message.tensor[0].nbytes, reductions + 1
        elif isinstance(message, Gather):
            gathered, gathers = gathered + LENGTH + message.pieces[0].nbytes, gathers + 1
    return Phase(neighbor, neighbors, reduced, reductions, gathered, gathers)


def _mean(phases: Sequence[Phase]) -> Phase:
    names = Phase.__dataclass_fields__
    return Phase(*(sum(getattr(p, name) for p in phases) / len(phases) for name in names))


def cpu_seconds(
    method: PredictedMethod, layout: Layout, seconds: float = 0.5
) -> tuple[float, float]:
    """CPU seconds of averaging in a step of one worker: without neighbors, and for each neighbor.

    Measured on rings of 2 and 3 workers, without messages, for about `seconds` each: the least of
    several measurements, since other load only adds to it. The difference between the two is the
    time for one neighbor. Without gossip it is 0.
    """
    if not method.gossips:
        return measured_seconds(method, layout, 3, seconds), 0.0
    one, two = (measured_seconds(method, layout, n, seconds) for n in (2, 3))
    per_neighbor = max(0.0, two - one)
    return max(0.0, one - per_neighbor), per_neighbor


def measured_seconds(
    method: PredictedMethod, layout: Layout, n_workers: int, seconds: float
) -> float:
    fake = FakeProcesses(n_workers)
    network = Network(topologies.make("ring", n_workers), fake)
    step, start = method.build(network, layout), _start(layout)
    x, least, end = start.clone(), float("inf"), time.perf_counter() + seconds
    measurements = 0
    while measurements < 2 * STEPS or time.perf_counter() < end:
        x.copy_(start)
        spent = 0.0
        for _ in range(STEPS):
            began, noise = time.process_time(), fake.noise.seconds
            network.run(step(x))
            spent += time.process_time() - began - (fake.noise.seconds - noise)
        measurements += 1
        if measurements > 1:  # the first one allocates
            least = min(least, spent / STEPS)
    return least


def _start(layout: Layout, n_workers: int = 1) -> Tensor:
    return torch.randn(n_workers, layout.size, generator=torch.Generator().manual_seed(1))
