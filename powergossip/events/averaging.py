"""Averaging rules in edge form: exchanges between the two ends of an edge.

The rules of `powergossip.algorithms` average all workers in one step. Here the unit is the edge
(i, j). Each edge has its own counter k, and each end its own state. An exchange consists of two
messages, the *parts* of the ends::

    s_i = end.part(x_i, k)                     sent to j, and kept until exchange k is applied
    u_ij = end.exchange(s_i, s_j, k, w)        x_i ← x_i + u_ij, when both parts are there

Both ends compute u_ij = −u_ji from the same bits, each at its own time. Σ_i x_i is thus conserved
whatever the speeds of workers and the delays of messages. An end starts exchange k + 1 after it has
applied k. Hence its neighbor is at most one exchange ahead. If a part is lost, the exchange may be
skipped. The state then stays the same.

Without delays, one exchange on every edge is one iteration of the rule of the same name in
`powergossip.algorithms`, up to rounding.

An end is the rule of `powergossip.algorithms` on a network of one worker with one neighbor. Its two
messages are methods, not a generator, since a checkpoint may lie between them.

To add a rule, write its end and its row in `EXCHANGES`.

Axes: D parameters of a worker, M elements of the directions on one side.
Symbols: i (this end), j (the other end), w (the weight w_ij of this exchange), γ (diffusion rate).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from powergossip import randomness, topologies
from powergossip import registry_options as options
from powergossip.algorithms import registry
from powergossip.algorithms.averaging import Kind, Stateless
from powergossip.algorithms.power_gossip import Side
from powergossip.network import Network, Processes, Slots
from powergossip.network.staging import Connection
from powergossip.parameters import Layout
from powergossip.state_trees import Stateful
from powergossip.topologies import Topology


class End(Stateful, Protocol):
    """One end of an edge: its state, which both ends change alike."""

    def part(self, x: Tensor, k: int) -> Tensor:
        """The message s_i of exchange k for x_i [D], in new memory."""
        ...

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        """u_ij [D] of exchange k, from the parts of both ends. Changes the state."""
        ...


class Exchanges:
    """An averaging rule in edge form.

    Attributes:
        rounds: Number of exchanges on each edge in a step of the synchronous rule.
        kind: The kind of all rules in edge form: both ends compute u_ij = −u_ji.
        dual_rate: Default of exact diffusion's dual rate.
        given: Options.
        common: Objects that several ends share, by any key.

    Raises:
        ValueError: For unknown names and options, bad values.
    """

    kind = Kind.ANTISYMMETRIC

    def __init__(self, name: str, layout: Layout, processes: Processes | None, given: Any):
        self._end = options.find(EXCHANGES, "algorithm", name)
        self._name, self.layout = name, layout
        self.given = {"diffusion_rate": 1.0, **given}
        self._processes = processes or Processes()
        self.common: dict[Any, Any] = {}
        gossip = self.on(OneEdge(0, 1, torch.zeros(0), Processes()))  # raises ValueError
        self.rounds: int = getattr(gossip, "rounds", 1)
        self.dual_rate: float = getattr(gossip, "dual_rate", 1.0)

    def on(self, network: Network) -> Any:
        """The rule of `powergossip.algorithms` on a network."""
        return registry.make(self._name, network, self.layout, **self.given)

    def end(self, i: int, j: int, like: Tensor, incarnation: int | None = None) -> End:
        """The end at worker i of its edge with j, in the state at the start.

        Args:
            like: A tensor of the dtype and device of x. They are the same at all ends.
            incarnation: None for an edge of the start. An edge that begins later counts the
                replacements of its workers.
        """
        made: End = self._end(self, OneEdge(i, j, like, self._processes), incarnation)
        return made


class OneEdge(Network):
    """The network of worker i with one neighbor j of weight 1. No message passes through it."""

    def __init__(self, i: int, j: int, like: Tensor, processes: Processes):
        self.i, self.j, self.like = i, j, like.new_empty(0)
        self.connection, self.dtype = Connection(processes, like.device), like.dtype
        self.topology, self.symmetric = _without_spectrum(), True
        self.workers, self.copies, self.rows, self.round = range(i, i + 1), 1, 1, 0
        neighbors = np.array([[j]])
        weights = torch.ones(1, 1, dtype=like.dtype, device=like.device)
        self.rounds = [Slots(torch.from_numpy(neighbors).to(like.device), weights, neighbors)]


@cache
def _without_spectrum() -> Topology:
    """A topology on which no rate is too large."""
    return topologies.make("fully-connected", 1)


class PlainEnd(Stateless):
    """x_i ← x_i + γ w (s_j − s_i), s_i = x_i. See algorithms.PlainGossip."""

    def __init__(self, rule: Exchanges, network: OneEdge, incarnation: int | None):
        self._rate = rule.given["diffusion_rate"]

    def part(self, x: Tensor, k: int) -> Tensor:
        return x.clone()

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        return (received - own).mul_(self._rate * weight)


class PowerEnd:
    """An iteration of algorithms.PowerGossip, with the end's own directions::

        p ← orthonormalize(p)                the same p at both ends
        s_i = X_iᵀ p                         the part (in every second exchange X_i p, sides swap)
        d = s_j − s_i
        X_i ← X_i + γ w p dᵀ,   p ← d        warm start, or else p is resampled

    Both ends take d and p from the perspective of the worker with the lower index, so that they
    have the same bits. The directions of a skipped exchange stay for the next one of the same side.
    Every num_iterations-th part also has the elements that rank r does not compress.

    All ends of a process compute with one PowerGossip, which resumes with their directions.
    """

    def __init__(self, rule: Exchanges, network: OneEdge, incarnation: int | None):
        i, j = network.i, network.j
        if "power" not in rule.common:
            gossip = rule.on(OneEdge(0, 1, network.like, network.processes))
            most = max(gossip.lengths) + rule.layout.size - gossip.compressed
            rule.common["power"] = gossip, network.like.new_zeros(2, most).view(torch.uint8)
        # The parts are read in the same memory each time.
        self._gossip, self._parts = rule.common["power"]
        self._size, self._sign = rule.layout.size, 1 if i < j else -1
        ids = (min(i, j), max(i, j), *([] if incarnation is None else [incarnation]))
        self._key = randomness.keys(self._gossip.seed, "power-gossip", [ids]).to(network.device)
        # [side]: p or, before an exchange, the next p. 0 is resampled.
        self._p = [network.like.new_zeros(length) for length in self._gossip.lengths]
        self._ranges = [code.no_ranges() for codes in self._gossip.codes for code in codes]

    def part(self, x: Tensor, k: int) -> Tensor:
        p = self._resumed(k)
        messages = self._gossip.messages(x[None], k % self._gossip.rounds)
        self._p[k % 2].copy_(p.flat)
        parts = [message.tensor.flatten() for message in messages]
        return torch.cat([part.view(torch.uint8) for part in parts] if self._ranges else parts)

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        gossip = self._gossip
        self._resumed(k)
        low_and_high = (own, received)[:: self._sign]
        for memory, part in zip(self._parts, low_and_high, strict=True):
            memory[: part.nbytes] = part.view(torch.uint8)
        ours, theirs = (gossip.split(part[: own.nbytes]) for part in self._parts)
        gossip.recall(ours)
        u = self._p[0].new_zeros(1, self._size)
        gossip.update(u, ours, theirs)
        self._p[1 - k % 2].copy_(gossip.directions[0].flat)
        self._ranges = gossip.ranges()
        return u[0].mul_(self._sign * weight)

    def _resumed(self, k: int) -> Side:
        p: Side = self._gossip.resume(k, keys=self._key)
        p.flat.copy_(self._p[k % 2])
        self._gossip.load_ranges(self._ranges)
        return p

    def state_dict(self) -> dict[str, Any]:
        """directions: [side], tensors of M elements together. ranges: of messages of few bits."""
        ranges = {"ranges": self._ranges} if self._ranges else {}
        return {"directions": [[p] for p in self._p], **ranges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for p, saved in zip(self._p, state["directions"], strict=True):
            p.copy_(torch.cat([part.flatten() for part in saved] or [p]))
        self._ranges = state.get("ranges", [])


class ChocoEnd:
    """A step of algorithms.ChocoGossip, with public copies x̂_i and x̂_j of the edge.

    In the paper, all edges of a worker have one copy of it. Where exchanges are late or skipped,
    edges differ. Messages are in single precision. Copies start at 0. On an edge that begins later,
    the first part is x_i, uncompressed, and becomes x̂_i. If one end skips that, both begin again.
    """

    def __init__(self, rule: Exchanges, network: OneEdge, incarnation: int | None):
        if network.i not in rule.common:
            rule.common[network.i] = rule.on(network).again
        self._gossip = rule.common[network.i](network)
        self._late, self._begun = incarnation is not None, False

    def part(self, x: Tensor, k: int) -> Tensor:
        if self._late and not self._begun:
            return x.float().clone().view(torch.uint8)
        message: Tensor = self._gossip.message(x[None], k)
        return message[0].clone()

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        gossip = self._gossip
        u = torch.zeros_like(gossip.public)
        if self._late and len(own) != len(received):  # one end has skipped the first exchange
            self._begun = False
        elif self._late and not self._begun:
            gossip.public.copy_(own.view(torch.float32))
            gossip.publics.copy_(received.view(torch.float32))
            self._begun = True
            gossip.flow(gossip.public, gossip.publics, u)
        else:
            gossip.update(u, own[None], received[None, None], k)
        return u[0].mul_(weight)

    def state_dict(self) -> dict[str, Any]:
        """own: x̂_i, other: x̂_j, [D] each. begun: True once uncompressed parts are applied."""
        own, other = self._gossip.public[0], self._gossip.publics[0, 0]
        return {"own": own, "other": other, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._gossip.public.copy_(state["own"])
        self._gossip.publics.copy_(state["other"])
        self._begun = state["begun"]


# Names of `algorithms.AVERAGING` with an edge form.
EXCHANGES: dict[str, options.Builder] = {
    "dpsgd": PlainEnd,
    "power-gossip": PowerEnd,
    "choco": ChocoEnd,
}


def make(name: str, layout: Layout, processes: Processes | None = None, **given: Any) -> Exchanges:
    """Build the rule of that name, with the options of `algorithms.make` and γ = 1 by default.

    Args:
        processes: The processes of the workers, by default this one alone.

    Raises:
        ValueError: For unknown names and options, bad values.
    """
    return Exchanges(name, layout, processes, given)
