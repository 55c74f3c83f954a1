"""The life of a worker whose exchanges may be late: one generator, for any driver::

    worker = Worker(...)
    for action in worker.life(): ...   a driver carries out each action, and resumes the worker
    worker.take_outbox()               messages to send, after every resumption
    worker.receive(j, message)         a message that has arrived
    worker.learn(view)                 news of dead or replaced workers

The state of a worker is in its attributes. A driver can thus save it at every `yield` and restore
it with a new generator.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from powergossip.algorithms.learning import GossipRule
from powergossip.events.averaging import End, Exchanges
from powergossip.events.members import Members, View, union
from powergossip.events.scenario import POLICIES


class Action(Enum):
    """The requests of a worker to its driver.

    Attributes:
        GRADIENT: Compute the gradient of the worker's next step, which takes time, and resume.
        POLL: Resume once everything that has arrived by now is received.
        WAIT: Resume when something new has arrived.
    """

    GRADIENT = "gradient"
    POLL = "poll"
    WAIT = "wait"


@dataclass(frozen=True)
class Message:
    """The message of one end in an exchange.

    Attributes:
        k: Counter of the exchange.
        incarnation: Sum of the versions of the edge's two workers, see `members`.
        view: Versions of all workers as the sender knows them.
        part: The sender's part, see `averaging`. None if it was lost.
    """

    k: int
    incarnation: int
    view: View
    part: Tensor | None


@dataclass
class Edge:
    """A worker's end of an edge.

    Attributes:
        begins_later: True if the edge begins after the start.
        k: Counter of the pending exchange. If there is none, counter of the next exchange.
        own: This end's message of the pending exchange, or None.
        started: The worker's step when it sent that message.
        inbox: k → the neighbor's message. The neighbor is at most one exchange ahead.
    """

    end: End
    incarnation: int
    begins_later: bool
    k: int = 0
    own: Message | None = None
    started: int = 0
    inbox: dict[int, Message] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if both parts of the pending exchange are there."""
        return self.own is not None and self.k in self.inbox


class Policy:
    """The choice of pending exchanges that a worker waits for before its step goes on::

        synchronous             all
        bounded                 the exchanges that are more than max_delay behind, see below
        asynchronous, a2cid2    none

    An exchange that was started in this step is 1 behind, one of the step before is 2 behind, and
    so on. With max_delay=0, a worker waits for all.
    """

    def __init__(self, gossip: str = "synchronous", max_delay: int = 0):
        assert gossip in POLICIES
        self.limit = {"synchronous": 0, "bounded": max_delay}.get(gossip)

    def waits(self, edge: Edge, step: int) -> bool:
        """True if a worker waits for the pending exchange of an edge in this step."""
        if edge.own is None or edge.complete or self.limit is None:
            return False
        return step - edge.started + 1 > self.limit


class Worker:
    """A worker: its edges, its learning rule, and the order of their steps.

    In a step where the rule is `exchanging`, each edge has `rounds` exchanges, or fewer if the
    worker does not wait for them.

    Args:
        view: Versions of all workers as this one knows them.
        steps: Number of completed steps.

    Attributes:
        edges: Neighbor j → edge, including edges of weight 0 in the view.
        late: Neighbors with a pending exchange that the worker does not wait for. Drivers set it.
    """

    def __init__(
        self,
        index: int,
        members: Members,
        exchanges: Exchanges,
        rule: GossipRule,
        policy: Policy,
        view: View | None = None,
        steps: int = 0,
    ):
        self.index, self.rule = index, rule
        self._members, self._exchanges, self._policy = members, exchanges, policy
        self.view = members.start if view is None else view
        self.edges: dict[int, Edge] = {}
        self.late: set[int] = set()
        self.steps, self.round, self.phase = steps, 0, "begin"
        self._outbox: list[tuple[int, Message]] = []
        self._open()

    # --- Steps ---

    def life(self) -> Generator[Action, None, None]:
        """Take steps without end. Yields actions for the driver."""
        while True:
            if self.phase == "begin":
                self.begin()
                self.phase = "gradient"
            if self.phase == "gradient":
                yield Action.GRADIENT
                self.compute()
                self.round, self.phase = 0, "exchange"
            rounds = self._exchanges.rounds if self.rule.exchanging else 1
            while self.round < rounds:
                yield Action.POLL
                while self.waiting_for():
                    yield Action.WAIT
                for j, edge in sorted(self.edges.items()):
                    if edge.complete:
                        self.apply(j)
                self.round += 1
                if self.round < rounds:
                    self._start_all()
            self.finish()
            self.phase = "begin"

    def begin(self) -> None:
        """Begin a step."""
        self.rule.begin()
        if self.rule.overlapping and self.rule.exchanging:
            self._start_all()

    def compute(self) -> None:
        """Continue the step after its gradient is computed."""
        self.rule.clip()
        if not self.rule.overlapping:
            self.rule.move()
            if self.rule.exchanging:
                self._start_all()

    def finish(self) -> None:
        """End a step."""
        if self.rule.overlapping:
            self.rule.move()
        self.rule.settle()
        self.steps += 1

    def waiting_for(self) -> list[int]:
        """The neighbors that the worker waits for."""
        present = self._members.weights(self.view)[self.index]
        return [
            j
            for j in present
            if j not in self.late and self._policy.waits(self.edges[j], self.steps)
        ]

    def neighbors(self, index: int) -> list[int]:
        """The neighbors of a worker in the view of this one."""
        return list(self._members.weights(self.view)[index])

    # --- Exchanges ---

    def _start_all(self) -> None:
        for j in self._members.weights(self.view)[self.index]:
            if self.edges[j].own is None:
                self.start(j)

    def start(self, j: int) -> None:
        """Send the part of the next exchange with j."""
        edge = self.edges[j]
        assert edge.own is None
        part = edge.end.part(self.rule.variables()[0], edge.k)
        edge.own, edge.started = Message(edge.k, edge.incarnation, self.view, part), self.steps
        self._outbox.append((j, edge.own))

    def apply(self, j: int) -> None:
        """x_i ← x_i + u_ij of the pending exchange with j, or skip it without a part that fits."""
        edge = self.edges[j]
        assert edge.own is not None
        assert edge.own.part is not None
        received = edge.inbox.pop(edge.k)
        fits = received.part is not None and received.part.shape == edge.own.part.shape
        if fits and received.part is not None:
            view = union(edge.own.view, received.view)
            weight = self._members.weight(self.index, j, view)
            if weight:
                agreed = edge.own.view == received.view == self.view
                u = edge.end.exchange(edge.own.part, received.part, edge.k, weight)
                self.rule.add(u[None], j, agreed)
        edge.own, edge.k = None, edge.k + 1
        self.late.discard(j)

    def take_outbox(self) -> list[tuple[int, Message]]:
        """The messages to send: (neighbor, message). The outbox is empty afterwards."""
        taken, self._outbox = self._outbox, []
        return taken

    def receive(self, j: int, message: Message) -> None:
        """Take a message from j. It is ignored if its edge no longer exists."""
        self.learn(message.view)
        edge = self.edges.get(j)
        if (
            edge is not None
            and message.incarnation == edge.incarnation
            and 0 <= message.k - edge.k <= 1
        ):
            edge.inbox[message.k] = message

    # --- Members ---

    def learn(self, view: View) -> None:
        """Merge a view with the worker's own: close edges of changed workers, open new edges."""
        merged = union(self.view, view)
        if merged == self.view:
            return
        for j in [j for j, version in enumerate(merged) if version != self.view[j]]:
            if j in self.edges:
                del self.edges[j]
                self.late.discard(j)
                self.rule.forget(j)
        self.view = merged
        self.rule.restart()
        self._open()

    def _open(self) -> None:
        for j in self._members.weights(self.view)[self.index]:
            if j not in self.edges:
                self.edges[j] = self._edge(j, self.view[self.index] + self.view[j])

    def _edge(self, j: int, incarnation: int) -> Edge:
        """A new end of the edge with j."""
        first = incarnation == 0 and j in self._members.first[self.index]
        end = self._exchanges.end(
            self.index, j, self.rule.variables()[0], None if first else incarnation
        )
        return Edge(end, incarnation, begins_later=not first)

    # --- State ---

    def state_dict(self) -> dict[str, Any]:
        """The state without x. The outbox must be empty."""
        assert not self._outbox
        return {
            "steps": self.steps,
            "round": self.round,
            "phase": self.phase,
            "view": list(self.view),
            "rule": self.rule.variables_dict(),
            "edges": {
                j: {
                    "end": edge.end.state_dict(),
                    "incarnation": edge.incarnation,
                    "k": edge.k,
                    "own": None if edge.own is None else packed(edge.own),
                    "started": edge.started,
                    "inbox": {k: packed(message) for k, message in edge.inbox.items()},
                }
                for j, edge in self.edges.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self.steps, self.round, self.phase = state["steps"], state["round"], state["phase"]
        self.view = tuple(state["view"])
        self.rule.load_variables(state["rule"])
        self.edges = {}
        for j, saved in state["edges"].items():
            edge = self.edges[j] = self._edge(j, saved["incarnation"])
            edge.end.load_state_dict(saved["end"])
            edge.k, edge.started = saved["k"], saved["started"]
            edge.own = None if saved["own"] is None else unpacked(saved["own"])
            edge.inbox = {k: unpacked(message) for k, message in saved["inbox"].items()}


def packed(message: Message) -> list[Any]:
    """A message as a list of plain values and a tensor."""
    return [message.k, message.incarnation, list(message.view), message.part]


def unpacked(values: list[Any]) -> Message:
    """The message from the values of `packed`."""
    k, incarnation, view, part = values
    return Message(k, incarnation, tuple(view), part)
