"""RelaySGD: sums of models travel along trees, in place of averaging with weights.

Messages are uncompressed over plain gossip. Over CHOCO-Gossip they are compressed, with its
compressor and public copies.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from powergossip import checks, topologies
from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.compressed_gossip import ChocoGossip
from powergossip.algorithms.learning.gossip_rule import (
    WITHOUT_COPIES,
    GossipRule,
    Workers,
)
from powergossip.compressors import Codec
from powergossip.network import Conversation, Network, ToEach
from powergossip.parameters import Layout
from powergossip.topologies import Tree

if TYPE_CHECKING:
    from networkx import Graph


class RelaySGD(GossipRule):
    """RelaySum on a tree: x_i is the mean of the latest models of all workers that reached it::

        x_i ← x_i + c u_i                       u_i the local optimizer's displacement
        m_ij = x_i + Σ_{k≠j} m'_ki              the message to j; m' of the step before, or 0
        n_ij = 1 + Σ_{k≠j} n'_ki                the number of models in it, in the same message
        x_i ← (x_i + Σ_j m_ji + (n − n_i) x_i)/n,   n_i = 1 + Σ_j n_ji

    over neighbors j and k in the tree. Vogels et al. (2021), arXiv:2110.04175, Algorithm 1. From
    the step of the tree's diameter on, n_i = n::

        x_i = (1/n) Σ_j (x_j + c u_j) of max(1, dist(i, j)) − 1 steps ago

    At the start or after a lost message, models are missing. A worker's own model takes their
    place. (The authors' code has the initial model.) Thus x_i is always a convex combination of
    models.

    Models are averages of old models, so that their mean moves by 1/c of the displacements, see
    `slowdown`. The correction multiplies displacements by c. The paper tunes the learning rate in
    its place.

    It relays along the topology's trees. With several, coordinate k travels over tree k mod their
    number. W and diffusion rate are not used. On each edge of a tree, a step sends one message in
    each direction, of the tree's coordinates and the number of models: as much as D-PSGD on a tree.
    Exact fixed point, with momentum in u too.

    Over CHOCO-Gossip, messages are compressed, see `CompressedRelay`. Paper and code have no such
    form.

    Args:
        correction: Factor c, or auto: the slowdown of the tree.

    Raises:
        ValueError: Unless c > 0.
    """

    kinds: ClassVar[frozenset[Kind]] = WITHOUT_COPIES | {Kind.BIASED_COPIES}
    static = relays = one_way = True

    def __init__(self, workers: Workers, *, correction: float | str = "auto"):
        super().__init__(workers, variables=0)
        self._layout.check_undivided("learning=relay-sgd")
        averaging = self._make(self._layout)  # its codec is used
        is_rate = checks.is_finite(correction) and float(correction) > 0
        accepted = correction == "auto" or is_rate
        checks.check("correction", correction, accepted, "a number above 0, or auto")
        found = self._network.topology.trees
        assert found is not None, f"{self._network.topology.name} has no trees"
        trees = found or ((),)  # a single worker
        self._coordinates = [slice(k, None, len(trees)) for k in range(len(trees))]
        make: Callable[..., Relay] = Relay
        if isinstance(averaging, ChocoGossip):
            make = partial(CompressedRelay, layout=self._layout, codec=averaging.codec)
        self._relays = [
            make(self._network, tree, self._x[:, coordinates])
            for tree, coordinates in zip(trees, self._coordinates, strict=True)
        ]
        self._corrections = [
            slowdown(tree, self._network.n_workers) if correction == "auto" else float(correction)
            for tree in trees
        ]

    def update(self, u: Tensor | None) -> None:
        assert u is not None
        for coordinates, c in zip(self._coordinates, self._corrections, strict=True):
            u[:, coordinates] *= c
        self._x.add_(u)

    def mixing(self) -> Conversation:
        received = yield tuple(relay.message() for relay in self._relays)
        for relay, m in zip(self._relays, received, strict=True):
            relay.receive(m)

    def begin_at(self, point: Tensor) -> None:
        """Do nothing: the rule has no public copies."""

    def state_dict(self) -> dict[str, Any]:
        """For each tree, the last messages received [worker, neighbor, 1 + coordinate], and the
        public copies of compressed ones."""
        state: dict[str, Any] = {"received": [relay.received for relay in self._relays]}
        first = self._relays[0]
        return state | ({"steps": first.steps, **first.copies} if first.copies else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        for relay, received in zip(self._relays, state["received"], strict=True):
            relay.received.copy_(received)
        first = self._relays[0]
        first.steps = state.get("steps", 0)
        for name, copy in first.copies.items():
            copy.copy_(state[name])


class Relay:
    """The messages of RelaySum along a tree, for the coordinates x [worker, coordinate] of models.

    Their first element is the number of models. It is summed like the coordinates.

    Attributes:
        received: Messages m' [worker, neighbor, 1 + coordinate], 0 in padded slots.
        steps: Number of steps.
        copies: Public copies of compressed messages, by name [worker, neighbor, D].
    """

    def __init__(self, network: Network, tree: Tree, x: Tensor):
        self._n, self._x = network.n_workers, x
        self.steps = 0
        self.copies: dict[str, Tensor] = {}
        self._edges = network.edges_of(
            topologies.undirected("tree", _graph(tree, self._n)).round(0)
        )
        padded = np.nonzero(self._edges.neighbors < 0)  # (row, slot)
        self._padded = tuple(torch.from_numpy(index).to(x.device) for index in padded)
        self._own = x.new_zeros(len(x), 1 + x.shape[1])
        self._sum = torch.zeros_like(self._own)
        self._outgoing = x.new_zeros(len(x), self._edges.n_out, 1 + x.shape[1])
        self.received = torch.zeros_like(self._outgoing)

    def message(self) -> ToEach:
        """m_ij = x_i + Σ_{k≠j} m'_ki, added up over k < j and over k > j.

        (The difference of Σ_k m'_ki and m'_ji would send rounding errors of m'_ji back to j.)
        """
        self._own[:, 0] = 1
        self._own[:, 1:] = self._x
        neighbors = range(self.received.shape[1])
        total = self._sum.copy_(self._own)
        for j in neighbors:
            self._outgoing[:, j] = total
            total += self.received[:, j]
        total.zero_()
        for j in reversed(neighbors):
            self._outgoing[:, j] += total
            total += self.received[:, j]
        return ToEach(self._outgoing, self._edges)

    def receive(self, m: Tensor) -> None:
        """x_i ← (x_i + Σ_j m_ji + (n − n_i) x_i)/n, with m_ji [worker, neighbor, ...]"""
        m[self._padded] = 0
        self.received = m  # until the next message is sent, when its memory is overwritten
        total = self._sum.copy_(self._own)
        for j in range(m.shape[1]):
            total += m[:, j]
        total += self._own.mul_(self._n - total[:, :1])
        self._x.copy_(total[:, 1:]).div_(self._n)
        self.steps += 1


class CompressedRelay(Relay):
    """The same with compressed messages: updates of a copy of the mean model in a message::

        m̄_ij = m_ij/n_ij                     the mean of the models in the message from i to j
        q_ij = C(m̄_ij − m̂_ij),   m̂_ij ← m̂_ij + q_ij     at both ends

    j receives n_ij and q_ij, and uses n_ij m̂_ij in place of m_ij. The mean of the models moves by a
    step at a time, as a model does, while their sum grows by whole models at the start. The first
    message is uncompressed, so that m̂_ij = m̄_ij. An error m̄_ij − m̂_ij is part of what the next
    message compresses: nothing is lost, and the fixed points are those without compression.

    Args:
        codec: Codec with the compressor and the seed of its random numbers.
    """

    _COUNT = 4  # bytes of the number of models in a message

    def __init__(self, network: Network, tree: Tree, x: Tensor, layout: Layout, codec: Codec):
        super().__init__(network, tree, x)
        hosted, slots, _ = self._outgoing.shape
        ids = [worker for worker in network.workers for _ in range(slots)]
        self._own_ids = torch.tensor(ids, dtype=torch.int64, device=x.device)
        self._neighbors = torch.from_numpy(self._edges.neighbors).to(x.device)
        self._codec = Codec(layout, codec.compressor, ids, codec.seed, x.device)
        sent = x.new_zeros(hosted, slots, x.shape[1])
        self._sent_copies = sent.flatten(0, 1)
        self._received_copies = x.new_zeros(*self._neighbors.shape, x.shape[1])
        self.copies = {"sent_copies": sent, "received_copies": self._received_copies}
        size = self._COUNT + self._codec.size
        self._message = torch.zeros(hosted, slots, size, dtype=torch.uint8, device=x.device)

    def message(self) -> ToEach:
        """The number of models and their mean, at first uncompressed, then as q_ij."""
        uncompressed = super().message()
        counts, sums = self._outgoing[..., :1], self._outgoing[..., 1:]
        sums /= counts.clamp_min(1)
        means = sums.flatten(0, 1)
        if self.steps == 0:
            self._sent_copies.copy_(means)
            return uncompressed
        codec, t = self._codec, self.steps
        q = codec.encode(means, t, minus=self._sent_copies)
        self._sent_copies += codec.decode(q, self._own_ids, t)
        as_bytes = counts.to(torch.int32).view(torch.uint8)
        self._message[..., : self._COUNT] = as_bytes
        self._message[..., self._COUNT :] = q.view(*counts.shape[:2], codec.size)
        return ToEach(self._message, self._edges)

    def receive(self, m: Tensor) -> None:
        m[self._padded] = 0
        if self.steps == 0:
            counts = m[..., :1].clone()
            self._received_copies.copy_(m[..., 1:])
        else:
            # A clone: a single message counts as contiguous, whatever the stride between messages.
            as_bytes = m[..., : self._COUNT].clone(memory_format=torch.contiguous_format)
            counts = as_bytes.view(torch.int32).to(self._x)
            q = m[..., self._COUNT :].contiguous()
            self._received_copies += self._codec.decode(q, self._neighbors, self.steps)
        super().receive(torch.cat([counts, counts * self._received_copies], -1))


def slowdown(tree: Tree, n_workers: int) -> float:
    """c = (1/n²) Σ_ij max(1, dist(i, j)): relaying on this tree moves the mean by 1/c of an update.

    Where x_i = (1/n) Σ_j x_j of max(1, dist(i, j)) steps ago, the sum of the x_i, and of 1/n of
    each model for each worker that it has still to reach, stays the same. For a common model it is
    c n times that model. A chain has c = (n² + 2)/(3 n).
    """
    import networkx as nx

    # An edge between parts of s and n − s workers is on the paths of s (n − s) pairs.
    below = np.ones(n_workers)
    edges = list(nx.bfs_edges(_graph(tree, n_workers), 0))
    for parent, child in reversed(edges):
        below[parent] += below[child]
    s = below[[child for _, child in edges]]
    return float(2 * (s * (n_workers - s)).sum() + n_workers) / n_workers**2


def _graph(tree: Tree, n_workers: int) -> "Graph[int]":
    import networkx as nx

    graph = nx.empty_graph(n_workers)
    graph.add_edges_from(tree)
    return graph
