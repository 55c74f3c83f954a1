"""The directions of PowerGossip: one buffer for all edges and matrices, and how they are kept.

What surrounds the update rule in algorithms.PowerGossip: where directions lie in memory and in a
message, how they are drawn, and how they are made orthonormal — the same at both ends of an edge.

Axes: worker (hosted here), neighbor (slot), batch (the layers of one worker, or one layer of all
workers; see parameters.batches), rank, length (rows or columns of a matrix).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.network import Network, Slots, ToEach

_RIDGE = 1e-12  # relative to a direction's own squared norm
_NOISE = 1e-6  # a difference of products is rounding error up to this share of them


class EdgeNumbers:
    """What PowerGossip knows of the edges, all [worker, neighbor].

    weight  # γ w_ij
    key     # int64, of the random numbers that both ends share
    sign    # +1 at the end with the lower number, −1 at the other: sign · (s_j − s_i) is the same
    absent  # 1 where a slot is padding, else 0
    """

    def __init__(self, network: Network, slots: Slots, diffusion_rate: float | Tensor, seed: int):
        """Of one round's slots. `diffusion_rate`: a number, or [worker, 1]."""
        neighbors, workers = slots.neighbors, network.row_workers[:, None]
        self.weight = diffusion_rate * slots.weights
        self.absent = (neighbors < 0).float()
        self.sign = torch.where(workers < neighbors, 1.0, -1.0)
        low = torch.minimum(workers, neighbors).clamp(min=0)
        high = torch.maximum(workers, neighbors)
        pairs = zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
        keys = randomness.keys(seed, "power-gossip", pairs)
        self.key = keys.view(neighbors.shape).to(network.device)


@dataclass(frozen=True)
class _Shape:
    batch: int
    neighbors: int
    rank: int
    length: int


class _Buffer:
    """A number for each entry of each direction: one flat tensor, and its views by stack."""

    def __init__(self, shapes: Sequence[_Shape], dtype: torch.dtype, device: torch.device):
        sizes = [prod((s.batch, s.neighbors, s.rank, s.length)) for s in shapes]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views = [  # [batch, neighbor, rank, length]
            part.view(s.batch, s.neighbors, s.rank, s.length)
            for part, s in zip(self.flat.split(sizes), shapes, strict=True)
        ]
        self.stacks = [view.flatten(1, 2) for view in self.views]  # [batch, neighbor·rank, length]
        self.frames = [view.flatten(0, 1) for view in self.views]  # [batch·neighbor, rank, length]


class Directions:
    """The directions of one side (row or column space) for all edges and matrices.

    views, stacks  # of the directions; see _Buffer. A direction is contiguous: products with
                   # directions as rows are several times faster than with directions as columns
    own            # _Buffer: this end's products s_i
    weighted       # _Buffer: γ w_ij times the directions; `weights` are the factors
    message        # ToEach [worker, neighbor, all directions of that neighbor]

    The form of a message does not depend on how workers are laid out over processes.

    A direction that came from d carries the sign of d as this end sees it, s_received − s_own.
    Orthonormalizing or rounding multiplies by `EdgeNumbers.sign`, which makes both ends agree.
    """

    def __init__(self, edges: EdgeNumbers, rank: int, stacks: Sequence[tuple[int, int]]):
        """`stacks`: (layers, length) of each stack of matrices."""
        workers, neighbors = edges.key.shape
        device = edges.key.device
        if workers > 1:  # then a layer is a batch over workers, as in parameters.batches
            stacks = [(1, length) for layers, length in stacks for _ in range(layers)]
        self._edges, self._rank, self._stacks = edges, rank, stacks
        shapes = [
            _Shape(max(workers, layers), neighbors, rank, length) for layers, length in stacks
        ]

        def buffer(dtype: torch.dtype = torch.float32) -> _Buffer:
            return _Buffer(shapes, dtype, device)

        self._directions, self.own, self.weighted, weights = buffer(), buffer(), buffer(), buffer()
        self.flat, self.weights = self._directions.flat, weights.flat
        self.views, self.stacks = self._directions.views, self._directions.stacks
        for view, weight in zip(weights.views, self._per_direction(edges.weight), strict=True):
            view.copy_(weight[..., None])

        self._message_size = rank * sum(layers * length for layers, length in stacks)
        message = torch.zeros(workers, neighbors, self._message_size, device=device)
        self.message = ToEach(message)
        self.message_views = self._views_of(message)
        self._received: tuple[Tensor, list[Tensor]] = message, self.message_views

        # One number for each direction, flat over the stacks, and its views [batch, neighbor·rank].
        self._signs = _flatten(self._per_direction(edges.sign), device)
        self._absent = _flatten(self._per_direction(edges.absent), device)
        self._has_absent = bool(self._absent.any())
        self._norms, self._scales = torch.ones_like(self._signs), torch.ones_like(self._signs)
        self._own_norms = torch.ones_like(self._signs)
        # Where the norm of a difference may come from rounding: ‖d‖ ≤ 2 τ √length ‖s‖.
        bounds = [
            torch.full((count,), 2 * _NOISE * sqrt(s.length))
            for s, count in zip(
                shapes, (s.batch * s.neighbors * s.rank for s in shapes), strict=True
            )
        ]
        self._noise_bounds = _flatten(bounds, device).to(device)
        counts = [s.batch * s.neighbors * s.rank for s in shapes]
        self._norm_views, self._own_norm_views, self._scale_views = (
            [
                part.view(s.batch, neighbors * rank)
                for part, s in zip(flat.split(counts), shapes, strict=True)
            ]
            for flat in (self._norms, self._own_norms, self._scales)
        )
        if rank > 1:
            # For orthonormalization in double precision; Gram matrices [.., rank, rank].
            self._wide, self._orthonormal = buffer(torch.float64), buffer(torch.float64)
            self._gram_counts = [s.batch * s.neighbors for s in shapes]
            self._gram = self._wide.flat.new_zeros(sum(self._gram_counts), rank, rank)
            self._grams = self._gram.split(self._gram_counts)
            identity = torch.eye(rank, dtype=torch.float64, device=device)
            self._signed_identity = identity * self._signs.view(-1, rank, 1)

    # --- Messages ---

    def views_of_received(self, received: Tensor) -> list[Tensor]:
        """What arrived [worker, neighbor, M] as views [batch, neighbor, rank, length]."""
        if received is not self._received[0]:
            self._received = received, self._views_of(received)
        return self._received[1]

    def packed(self) -> Tensor:
        """A copy of the directions in the form of a message: [worker, neighbor, M]."""
        message = torch.empty_like(self.message.tensor)
        for view, directions in zip(self._views_of(message), self.views, strict=True):
            view.copy_(directions)
        return message

    def unpack(self, message: Tensor) -> None:
        """Take over directions [worker, neighbor, M]."""
        if message.shape != self.message.tensor.shape:
            raise ValueError(
                f"directions of shape {tuple(message.shape)} do not fit; "
                f"this run's are {tuple(self.message.tensor.shape)}"
            )
        for view, directions in zip(self._views_of(message), self.views, strict=True):
            directions.copy_(view)

    def _views_of(self, message: Tensor) -> list[Tensor]:
        views, start = [], 0
        for layers, length in self._stacks:
            size = layers * self._rank * length
            piece = message[:, :, start : start + size].unflatten(2, (layers, self._rank, length))
            views.append(piece[0].transpose(0, 1) if message.shape[0] == 1 else piece[:, :, 0])
            start += size
        return views

    def _per_direction(self, of_edge: Tensor) -> list[Tensor]:
        """A number of each edge [worker, neighbor], as [batch, neighbor, rank] for each stack."""
        return [of_edge[:, :, None].expand(view.shape[0], -1, self._rank) for view in self.views]

    def take_differences(self, received: Tensor) -> None:
        """directions ← s_received − s_own, where they differ by more than rounding errors.

        Neighbors that agree compute products that may differ in the last bit, since their
        directions lie in different slots. Such a difference would be normalized to a direction that
        means nothing; it becomes 0, and thus is redrawn. Both ends decide alike: maxima are exact,
        whatever their order.
        """
        theirs = self.views_of_received(received)
        for their, own, difference in zip(theirs, self.own.views, self.views, strict=True):
            torch.sub(their, own, out=difference)
        self._compute_norms()
        for stack, norm in zip(self.own.stacks, self._own_norm_views, strict=True):
            torch.linalg.vector_norm(stack, dim=-1, out=norm)
        if not (self._norms <= self._noise_bounds * self._own_norms).any():
            return
        for their, own, difference in zip(theirs, self.own.views, self.views, strict=True):
            size = torch.maximum(their.abs().amax(-1), own.abs().amax(-1))
            difference[difference.abs().amax(-1) <= _NOISE * size] = 0

    # --- Random directions ---

    def draw(self, counter: int) -> None:
        """Random directions from the edges' own streams: the same at both ends."""
        edges = self._edges
        drawn = randomness.normal(edges.key, counter, (self._message_size,))
        self.unpack(drawn.mul_((edges.sign * (1 - edges.absent))[..., None]))

    def _redraw_collapsed(self, norms: Tensor, counter: int) -> bool:
        """Draw the directions of norm 0 anew; whether there were any.

        `norms` is one number for each direction, changed to 1 for padding. A direction is 0 at both
        ends or at neither: they have the same d, to the bit.
        """
        if self._has_absent:
            norms.add_(self._absent)
        if norms.all():
            return False
        position = torch.arange(self._message_size, device=norms.device)
        starts = self._views_of(position.expand(*self._edges.key.shape, -1))
        keys = self._per_direction(self._edges.key)
        signs = self._per_direction(self._edges.sign)
        collapsed = (norms == 0).split([s.numel() for s in signs])
        for view, which, key, sign, start in zip(
            self.views, collapsed, keys, signs, starts, strict=True
        ):
            if which.any():
                which = which.view(sign.shape)
                drawn = randomness.normal(key[which], counter, view.shape[3:], start[..., 0][which])
                view[which] = drawn * sign[which][:, None]
        return True

    # --- Orthonormal directions ---

    def orthonormalize(self, counter: int) -> None:
        """Make each edge's directions for a matrix orthonormal; first redraw those that are 0."""
        if self._rank == 1:
            self._normalize(counter)
        else:
            self._orthonormalize(counter)

    def round(self, counter: int) -> None:
        """p ← sign(p)/√length with sign(0) = +1, in place of normalizing."""
        self._compute_norms()
        self._redraw_collapsed(self._norms, counter)
        for view, sign in zip(self.views, self._per_direction(self._edges.sign), strict=True):
            size = 1 / sqrt(view.shape[-1])
            view.copy_(torch.where(view * sign[..., None] >= 0, size, -size))

    def _normalize(self, counter: int) -> None:
        """p ← sign · p/‖p‖"""
        self._compute_norms()
        if self._redraw_collapsed(self._norms, counter):
            self._compute_norms()
            self._norms.add_(self._absent)
        torch.div(self._signs, self._norms, out=self._scales)
        for stack, scale in zip(self.stacks, self._scale_views, strict=True):
            stack.mul_(scale[..., None])

    def _compute_norms(self) -> None:
        for stack, norm in zip(self.stacks, self._norm_views, strict=True):
            torch.linalg.vector_norm(stack, dim=-1, out=norm)

    def _orthonormalize(self, counter: int) -> None:
        """G = p pᵀ = L Lᵀ with directions as rows, p ← sign · L⁻¹ p."""
        self._compute_gram()
        squares = self._gram.diagonal(dim1=1, dim2=2)
        norms = squares.flatten()
        if self._redraw_collapsed(norms, counter):
            self._compute_gram()
            norms = squares.flatten().add_(self._absent)
        squares.copy_(norms.view_as(squares)).mul_(1 + _RIDGE)
        factor = torch.linalg.cholesky_ex(self._gram).L
        inverse = torch.linalg.solve_triangular(factor, self._signed_identity, upper=False)
        for frame, transform, result in zip(
            self._wide.frames,
            inverse.split(self._gram_counts),
            self._orthonormal.frames,
            strict=True,
        ):
            torch.bmm(transform, frame, out=result)
        self.flat.copy_(self._orthonormal.flat)

    def _compute_gram(self) -> None:
        self._wide.flat.copy_(self.flat)
        for frame, gram in zip(self._wide.frames, self._grams, strict=True):
            torch.bmm(frame, frame.mT, out=gram)


def _flatten(views: Sequence[Tensor], device: torch.device) -> Tensor:
    """All numbers of some tensors, one after the other."""
    return torch.cat([view.reshape(-1) for view in views] or [torch.empty(0, device=device)])
