"""Averaging rules in edge form: exchanges between the two ends of an edge.

The rules of `powergossip.algorithms` average all workers in one step. Here the unit is the edge
(i, j). It has a counter k of its own, and each end has its own state. An exchange consists of two
messages, the *parts* of the ends::

    s_i = end.part(x_i, k)                     sent to j, and kept until exchange k is applied
    u_ij = end.exchange(s_i, s_j, k, w)        x_i ← x_i + u_ij, when both parts are there

Both ends compute u_ij = −u_ji from the same bits, each at its own time. Σ_i x_i is thus conserved
whatever the speeds of workers and the delays of messages. An end starts exchange k + 1 after it has
applied k. Hence its neighbor is at most one exchange ahead. An exchange of which a part is lost may
be skipped: then its state stays as it is.

Without delays, one exchange on every edge is one iteration of the rule of the same name in
`powergossip.algorithms`, up to rounding.

An end is not `increment` on a network of two workers. A checkpoint may lie between the two messages
of an exchange, and the position of a generator cannot be saved. The weight differs from exchange to
exchange, and `increment` has five times the memory for each edge.

To add a rule, write its class and its row in `EXCHANGES`.

Axes: layer (matrices of one shape), rank, row, column; D parameters of a worker.
Symbols: i (this end), j (the other end), w (the weight w_ij of this exchange), γ (diffusion rate).
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from powergossip import checks, compressors, randomness
from powergossip import options as _options
from powergossip.algorithms import rates
from powergossip.algorithms.averaging import Kind
from powergossip.algorithms.directions import NOISE, orthonormalizing
from powergossip.algorithms.power_gossip import PowerGossip
from powergossip.compressors import BySize, Codec
from powergossip.parameters import Layout, Stack


class End(Protocol):
    """One end of an edge: its state, which both ends change alike."""

    def part(self, x: Tensor, k: int) -> Tensor:
        """The message s_i of exchange k for x_i [D], in memory of its own."""
        ...

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        """u_ij [D] of exchange k, from the parts of both ends. Changes the state."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that the next exchange depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        ...


class Exchanges(Protocol):
    """An averaging rule in edge form.

    Attributes:
        rounds: Number of exchanges on each edge in a step of the synchronous rule.
        kind: That of all of them: both ends compute u_ij = −u_ji.
    """

    rounds: int
    kind: Kind

    def end(self, i: int, j: int, like: Tensor, incarnation: int | None = None) -> End:
        """The end at worker i of its edge with j, in the state at the start.

        Args:
            like: A tensor of the dtype and device of x.
            incarnation: None for an edge of the start. An edge that begins later counts the
                replacements of its workers.
        """
        ...


class PlainExchanges:
    """x_i ← x_i + γ w (s_j − s_i), s_i = x_i.

    A part has D elements.

    Raises:
        BadValue: Unless γ > 0.

    References:
        Xiao & Boyd (2004), doi:10.1016/j.sysconle.2004.02.022.
    """

    rounds, kind = 1, Kind.ANTISYMMETRIC

    def __init__(self, layout: Layout, *, diffusion_rate: float = 1.0):
        del layout  # a parameter of all rules
        checks.positive("diffusion_rate", diffusion_rate)
        self._rate = diffusion_rate

    def end(self, i: int, j: int, like: Tensor, incarnation: int | None = None) -> End:
        return _PlainEnd(self._rate)


class _PlainEnd:
    def __init__(self, rate: float):
        self._rate = rate

    def part(self, x: Tensor, k: int) -> Tensor:
        return x.clone()

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        return (received - own).mul_(self._rate * weight)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state


class PowerExchanges:
    """PowerGossip: power iteration on the difference of the matrices of both ends::

        p ← orthonormalize(p)                the same p at both ends
        s_i = X_iᵀ p                         the part (in every second exchange X_i p, sides swap)
        d = s_j − s_i
        X_i ← X_i + γ w p dᵀ,   p ← d        warm start, or else p is resampled

    See algorithms.PowerGossip for the departures from the paper. Both ends take d and p from the
    perspective of the worker with the lower index, so that they have the same bits. The directions
    of a skipped exchange stay for the next one of the same side.

    Every num_iterations-th part also has the elements that rank r does not compress, for plain
    gossip: matrices with the rate γ, vectors with 1.

    Raises:
        BadValue: For a rank or number of iterations below 1, or γ that is not positive.
        ValueError: For round_weights with a rank other than 1.

    References:
        Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425, Algorithm 1.
    """

    dual_rate, kind = PowerGossip.dual_rate, Kind.ANTISYMMETRIC

    def __init__(
        self,
        layout: Layout,
        *,
        diffusion_rate: float = 1.0,
        rank: int = 1,
        num_iterations: int = 1,
        warm_start: bool = True,
        round_weights: bool = False,
        seed: int = 0,
    ):
        checks.positive("diffusion_rate", diffusion_rate)
        checks.at_least_one("rank", rank)
        checks.at_least_one("num_iterations", num_iterations)
        if round_weights and rank != 1:
            raise ValueError(f"rank={rank}: use rank=1 with round_weights=True")
        self.rounds, self.rank, self.rate = num_iterations, rank, diffusion_rate
        self.warm_start, self.round_weights, self.seed = warm_start, round_weights, seed
        self.layout, self.stacks = layout, layout.compressible(rank)
        self.compressed = self.stacks[-1].stop if self.stacks else 0
        if not self.stacks:
            self.rounds = 1
        # [side][stack]: the shape of directions, as rows: [layer, rank, length]
        self.shapes = [
            [(stack.layers, rank, stack.rows) for stack in self.stacks],
            [(stack.layers, rank, stack.columns) for stack in self.stacks],
        ]
        # Rates of the elements that are not compressed, which lie behind the compressed ones.
        self.rest_rates = torch.ones(layout.size - self.compressed, dtype=torch.float64)
        self.rest_rates[: layout.matrices_size - self.compressed] = diffusion_rate

    def end(self, i: int, j: int, like: Tensor, incarnation: int | None = None) -> End:
        ids = (min(i, j), max(i, j), *([] if incarnation is None else [incarnation]))
        key = randomness.keys(self.seed, "power-gossip", [ids]).to(like.device)
        return _PowerEnd(self, key, 1 if i < j else -1, like)

    def matrices(self, x: Tensor, stack: Stack, side: int) -> Tensor:
        """A view of the matrices of a stack in x [D], [layer, row, column], or transposed."""
        view = x[stack.start : stack.stop].view(stack.layers, stack.rows, stack.columns)
        return view.mT if side else view


class _PowerEnd:
    """`sign`: +1 at the worker with the lower index, −1 at the other."""

    def __init__(self, rule: PowerExchanges, key: Tensor, sign: int, like: Tensor):
        self._rule, self._key, self._sign = rule, key, sign
        self._p = [  # [side][stack]; 0 is resampled
            [torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes]
            for shapes in rule.shapes
        ]
        self._rest_rates = rule.rest_rates.to(like)

    def part(self, x: Tensor, k: int) -> Tensor:
        rule, side = self._rule, k % 2
        products = []
        for index, stack in enumerate(rule.stacks):
            p_T = self._p[side][index] = self._prepared(side, index, k)
            products.append((p_T @ rule.matrices(x, stack, side)).flatten())
        if k % rule.rounds == 0:
            products.append(x[rule.compressed :])
        return torch.cat(products)

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        rule, side, start = self._rule, k % 2, 0
        u = own.new_zeros(rule.layout.size)
        low, high = (own, received) if self._sign > 0 else (received, own)
        for index, (stack, shape) in enumerate(
            zip(rule.stacks, rule.shapes[1 - side], strict=True)
        ):
            stop = start + shape[0] * shape[1] * shape[2]
            s_low, s_high = low[start:stop].view(shape), high[start:stop].view(shape)
            d_T = _difference(s_low, s_high)
            p_T = self._p[side][index]
            product = torch.matmul((p_T * (rule.rate * weight)).mT, d_T)
            rule.matrices(u, stack, side).copy_(product)
            if rule.warm_start:
                self._p[1 - side][index] = d_T
            start = stop
        if k % rule.rounds == 0:
            rest = (high[start:] - low[start:]).mul_(self._rest_rates).mul_(weight)
            u[rule.compressed :] = rest
        return u if self._sign > 0 else u.neg_()

    def _prepared(self, side: int, index: int, k: int) -> Tensor:
        """p ← orthonormalize(p), after resampling directions of norm 0. [layer, rank, length]"""
        rule = self._rule
        p = self._p[side][index] if rule.warm_start else self._drawn(side, index, k)
        norm = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
        if not norm.all():
            p = torch.where(norm == 0, self._drawn(side, index, k), p)
            norm = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
        if rule.round_weights:
            size = 1 / sqrt(p.shape[-1])
            return torch.where(p >= 0, size, -size).to(p.dtype)
        if rule.rank == 1:
            return p / norm
        wide = p.double()
        signs = torch.eye(rule.rank, dtype=wide.dtype, device=p.device).expand(len(p), -1, -1)
        return (orthonormalizing(wide @ wide.mT, signs) @ wide).to(p.dtype)

    def _drawn(self, side: int, index: int, k: int) -> Tensor:
        """Random directions of a stack, from the stream of the edge at counter k."""
        sizes = [layers * rank * length for layers, rank, length in self._rule.shapes[side]]
        drawn = randomness.normal(self._key, k, (sizes[index],), sum(sizes[:index]))[0]
        return drawn.view(self._rule.shapes[side][index]).to(self._p[side][index])

    def state_dict(self) -> dict[str, Any]:
        """directions: [side][stack], [layer, rank, length] each."""
        return {"directions": [list(of_side) for of_side in self._p]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._p = [[p.to(self._rest_rates) for p in of_side] for of_side in state["directions"]]


def _difference(low: Tensor, high: Tensor) -> Tensor:
    """high − low [layer, rank, length], or 0 for a direction in which these agree to rounding.

    See Directions.take_differences. Maxima are exact, so that both ends decide alike.
    """
    d = high - low
    size = torch.maximum(_largest(low), _largest(high))
    return d.masked_fill_(_largest(d) <= NOISE[d.dtype] * size, 0)


def _largest(rows: Tensor) -> Tensor:
    """max |element| of the last axis, which is kept."""
    return torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True)


class ChocoExchanges:
    """CHOCO-Gossip with public copies x̂_i and x̂_j for each edge, at both of its ends::

        q_i = C(x_i − x̂_i)                              the part
        ŷ_i = x̂_i + q_i,   ŷ_j = x̂_j + q_j
        x_i ← x_i + γ w (ŷ_j − ŷ_i)
        x̂_i ← x̂_i + α q_i,   x̂_j ← x̂_j + α q_j

    In the paper, all edges of a worker have one copy of it. Where exchanges are late or skipped,
    edges differ. α is the copy rate, see algorithms.ChocoGossip. Messages are in single precision.
    Copies start at 0. On an edge that begins later, the first part is x_i, uncompressed, and
    becomes x̂_i.

    Raises:
        BadValue: Unless γ > 0 and 0 < α ≤ 1.
        ValueError: For options of the compressor.

    References:
        Koloskova, Stich & Jaggi (2019), arXiv:1902.00340, Algorithm 1.
    """

    rounds, kind = 1, Kind.ANTISYMMETRIC

    def __init__(
        self,
        layout: Layout,
        *,
        diffusion_rate: float | BySize = 1.0,
        compressor: str = "sign-and-norm",
        copy_rate: float | None = None,  # by default the compressor's
        seed: int = 0,
        **compressor_options: Any,
    ):
        self._compressor = compressors.make(compressor, **compressor_options)
        rate = self._rate = diffusion_rate
        by_default = rates.copy_rate(self._compressor)
        copy = self._copy_rate = by_default if copy_rate is None else copy_rate
        if not callable(rate):
            checks.positive("diffusion_rate", rate)
        if not callable(copy):
            checks.check("copy_rate", f"{copy}", 0 < copy <= 1, "above 0, at most 1")
        self._layout, self._seed = layout, seed
        self.unbiased = getattr(self._compressor, "unbiased", False)
        self._codecs: dict[int, Codec] = {}  # by sender

    def end(self, i: int, j: int, like: Tensor, incarnation: int | None = None) -> End:
        if i not in self._codecs:
            self._codecs[i] = Codec(self._layout, self._compressor, [i], self._seed, like.device)
        late = incarnation is not None
        return _ChocoEnd(self._codecs[i], j, like, self._rate, self._copy_rate, late)


class _ChocoEnd:
    def __init__(
        self,
        codec: Codec,
        j: int,
        like: Tensor,
        rate: float | BySize,
        copy_rate: float | BySize,
        late: bool,
    ):
        self._codec, self._late = codec, late
        # Of each element [D], or one for all.
        self._rate = codec.by_size(rate).to(like) if callable(rate) else rate
        self._copy_rate = codec.by_size(copy_rate).to(like) if callable(copy_rate) else copy_rate
        self._i, self._j = codec.workers, torch.tensor([j], device=like.device)
        self._own, self._other = torch.zeros(2, codec.elements).to(like).unbind(0)  # x̂_i, x̂_j
        self._begun = False

    def part(self, x: Tensor, k: int) -> Tensor:
        if self._late and not self._begun:
            return x.float().clone().view(torch.uint8)
        return self._codec.encode(x[None], k, minus=self._own[None])[0].clone()

    def exchange(self, own: Tensor, received: Tensor, k: int, weight: float) -> Tensor:
        if self._late and not self._begun:
            self._own.copy_(own.view(torch.float32))
            self._other.copy_(received.view(torch.float32))
            self._begun = True
            return (self._other - self._own).mul_(self._rate * weight)
        q_i = self._codec.decode(own[None], self._i, k)[0].to(self._own)
        y_i = self._own + q_i
        self._own.add_(q_i.mul_(self._copy_rate))
        q_j = self._codec.decode(received[None], self._j, k)[0].to(self._own)
        y_j = self._other + q_j
        self._other.add_(q_j.mul_(self._copy_rate))
        return y_j.sub_(y_i).mul_(self._rate * weight)

    def state_dict(self) -> dict[str, Any]:
        """own: x̂_i, other: x̂_j, [D] each. begun: whether the uncompressed parts are applied."""
        return {"own": self._own, "other": self._other, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._own.copy_(state["own"])
        self._other.copy_(state["other"])
        self._begun = state["begun"]


# Names of `algorithms.AVERAGING` with an edge form. A row is called with the layout. Its other
# parameters are options.
EXCHANGES: dict[str, _options.Builder] = {
    "dpsgd": PlainExchanges,
    "power-gossip": PowerExchanges,
    "choco": ChocoExchanges,
}


def make(name: str, layout: Layout, **given: Any) -> Exchanges:
    """Build the rule of that name. Raises ValueError for unknown names and options, bad values."""
    row = _options.find(EXCHANGES, "algorithm", name)
    known = _options.parameters(row, given, compressor=compressors.COMPRESSORS)
    given = _options.check(name, given, known)
    made: Exchanges = row(layout, **given)
    return made
