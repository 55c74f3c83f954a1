"""The directions of PowerGossip: memory, messages, random draws, orthonormalization.

PowerGossip's update rule uses the directions in the column or row space of the matrices for all
edges: a side. `MatrixSide` uses PyTorch, and `CompiledSide`, with the same methods, compiled loops.
Every operation here gives the same result at both ends of an edge, to the bit.

Axes: worker (hosted here), neighbor (slot), batch (the layers of one worker, or one layer of all
workers, see parameters.batches), rank, length (rows or columns of a matrix).
"""

from collections.abc import Sequence
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor

from powergossip import randomness
from powergossip.network import Network, Slots, ToEach
from powergossip.parameters import Stack, batches
from powergossip.tensor_cache import TensorCache

_RIDGE = 1e-12  # relative to a direction's own squared norm
# Relative difference of products below which it counts as rounding error, by precision.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-14}


class EdgeConstants:
    """Constants of the edges of one round, all [worker, neighbor]. Both sides refer to them.

    Attributes:
        weight: γ w_ij.
        key: Key of the random stream that both ends share, int64.
        sign: +1 at the end with the lower worker index, −1 at the other, so that
            sign · (s_j − s_i) agrees.
        absent: 1 where a slot is padding, else 0.
        has_absent: True if a slot is padding.
    """

    def __init__(self, network: Network, slots: Slots, diffusion_rate: float | Tensor, seed: int):
        """Constants for one diffusion rate of all workers, or rates [worker, 1]."""
        neighbors, workers = slots.neighbors, network.row_workers[:, None]
        self.weight = diffusion_rate * slots.weights
        self.absent = (neighbors < 0).to(network.dtype)
        self.has_absent = bool((slots.on_host < 0).any())
        self.sign = torch.where(workers < neighbors, 1.0, -1.0).to(network.dtype)
        own = np.tile(network.workers, network.copies)[:, None]
        low, high = np.minimum(own, slots.on_host), np.maximum(own, slots.on_host)
        pairs = zip(low.clip(0).flatten().tolist(), high.flatten().tolist(), strict=True)
        keys = randomness.keys(seed, "power-gossip", pairs)
        self.key = keys.view(neighbors.shape).to(network.device)


class PerDirection:
    """A value, or a vector, for each direction: flat memory and its views, by stack of matrices.

    Attributes:
        flat: The memory [element].
        views: Views [batch, neighbor, rank] or [batch, neighbor, rank, length].
        stacks: The same as [batch, neighbor · rank, ...].
        frames: The same as [batch · neighbor, rank, ...].
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
    ):
        """Zeros in views of these shapes."""
        sizes = [prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(self.flat.split(sizes), shapes, strict=True)
        self.views = [part.view(shape) for part, shape in parts]
        self.stacks = [view.flatten(1, 2) for view in self.views]
        self.frames = [view.flatten(0, 1) for view in self.views]

    def fill(self, of_edge: Tensor) -> "PerDirection":
        """Set a constant of each edge [worker, neighbor] for all its directions and return self."""
        for view in self.views:
            view.copy_(of_edge.view(*of_edge.shape, *[1] * (view.ndim - 2)))
        return self


class MatrixSide:
    """The directions of one side (row or column space) for all edges and matrices, with PyTorch.

    Directions p are as long as a column (side 0) or as a row (side 1) of X. A batched product
    serves the matrices of one shape. The rows of a product are the directions of all neighbors,
    hence the transposes: sᵀ = pᵀ X.

    A message is [worker, neighbor, M], all directions of that neighbor. Its form does not depend on
    the layout of workers over processes.

    Directions taken from a difference d have the sign of d at this end, s_received − s_own.
    Orthonormalizing or rounding multiplies by `EdgeConstants.sign`, which makes both ends agree.

    Attributes:
        flat, views, stacks: The directions, see PerDirection. A direction is contiguous: products
            with directions as rows are several times faster than as columns.
        own: The products s_i of this end.
        branches: True if work that is rarely needed is skipped. On a GPU, the decision would have
            to wait for the GPU.
    """

    other: "MatrixSide"

    def __init__(self, edges: EdgeConstants, rank: int, matrices: Sequence[Stack], side: int):
        self._matrices, self._side = matrices, side
        self._matrix_views = TensorCache[list[Tensor]]()
        stacks = [(stack.layers, (stack.rows, stack.columns)[side]) for stack in matrices]
        workers, neighbors = edges.key.shape
        device, dtype = edges.key.device, edges.weight.dtype
        if workers > 1:  # then a layer is a batch over workers, as in parameters.batches
            stacks = [(1, length) for layers, length in stacks for _ in range(layers)]
        self._edges, self._rank, self._layers_and_lengths = edges, rank, stacks
        self.branches = device.type == "cpu"
        self._whole = self._whole_of(stacks)
        self._whole_size = rank * sum(layers * length for layers, length in self._whole)
        counts = [(max(workers, layers), neighbors, rank) for layers, _ in stacks]
        shapes = [(*count, length) for count, (_, length) in zip(counts, stacks, strict=True)]

        self._directions = PerDirection(shapes, device, dtype)
        self.flat = self._directions.flat
        self.views, self.stacks = self._directions.views, self._directions.stacks
        self.own = PerDirection(shapes, device, dtype)
        self._weights = PerDirection(shapes, device, dtype).fill(edges.weight)
        self._weighted = PerDirection(shapes, device, dtype)

        self._message_size = rank * sum(layers * length for layers, length in stacks)
        self._message = torch.zeros(
            workers, neighbors, self._message_size, dtype=dtype, device=device
        )
        self._message_views = self._views_of(self._message)
        self._received_views = TensorCache[list[Tensor]]()

        self._signs = PerDirection(counts, device, dtype).fill(edges.sign)
        self._absent = PerDirection(counts, device, dtype).fill(edges.absent).flat
        self._has_absent = edges.has_absent
        self._norms, self._own_norms = (
            PerDirection(counts, device, dtype),
            PerDirection(counts, device, dtype),
        )
        self._scales = PerDirection(counts, device, dtype)
        # If |d| ≤ τ max|s| elementwise, then ‖d‖ ≤ τ √length max|s| ≤ 2 τ √length ‖s_i‖.
        self._noise_bounds = PerDirection(counts, device, dtype)
        for view, (_, length) in zip(self._noise_bounds.views, self._whole, strict=True):
            view.fill_(2 * NOISE[dtype] * sqrt(length))
        if rank > 1:  # scratch memory of orthonormalization, in double precision
            self._wide = PerDirection(shapes, device, torch.float64)
            self._orthonormal = PerDirection(shapes, device, torch.float64)
            frames = [batch * neighbors for batch, _, _ in counts]
            self._gram = self._wide.flat.new_zeros(sum(frames), rank, rank)
            self._grams = self._gram.split(frames)
            self._sign_matrices = torch.diag_embed(self._signs.flat.view(-1, rank).double())

    def _whole_of(self, stacks: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The layers and lengths of whole directions, from those in this process."""
        return stacks

    def _own(self, stack: int, whole: Tensor) -> Tensor:
        """This process' part of whole directions [..., length] of a stack."""
        return whole

    def weighted(self) -> PerDirection:
        """γ w_ij times the directions, in memory that the next call overwrites."""
        torch.mul(self.flat, self._weights.flat, out=self._weighted.flat)
        return self._weighted

    # --- Messages ---

    def message(self) -> ToEach:
        """The message of this end's products `own`."""
        for own, outgoing in zip(self.own.views, self._message_views, strict=True):
            outgoing.copy_(own)
        return ToEach(self._message)

    def products(self) -> Tensor:
        """The products of an iteration whose p are the other side: s [worker, neighbor, M]."""
        return self._message

    def packed(self) -> Tensor:
        """A copy of the directions in the form of a message: [worker, neighbor, M]."""
        message = torch.empty_like(self._message)
        for view, directions in zip(self._views_of(message), self.views, strict=True):
            view.copy_(directions)
        return message

    def unpack(self, message: Tensor) -> None:
        """Set the directions from the form of a message [worker, neighbor, M]."""
        whole = self._views_of(message, self._whole)
        for stack, (view, directions) in enumerate(zip(whole, self.views, strict=True)):
            directions.copy_(self._own(stack, view))

    def _views_of(
        self, message: Tensor, stacks: Sequence[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        """A message [worker, neighbor, M] as views [batch, neighbor, rank, length]."""
        views, start = [], 0
        for layers, length in self._layers_and_lengths if stacks is None else stacks:
            size = layers * self._rank * length
            piece = message[:, :, start : start + size]
            piece = piece.view(*message.shape[:2], layers, self._rank, length)
            views.append(piece[0].transpose(0, 1) if message.shape[0] == 1 else piece[:, :, 0])
            start += size
        return views

    # --- Differences ---

    def take_differences(self, received: Tensor) -> None:
        """directions ← s_received − s_own, or 0 where these differ by rounding errors only.

        Products of neighbors that agree may differ in the last bit, since their directions lie in
        different slots. Such a difference would be normalized to a meaningless direction. It is
        set to 0 and the direction is resampled later. Both ends decide alike, because maxima are
        exact in any order.
        """
        theirs = self._received_views.get(received, self._views_of)
        # The message has them as they were sent, possibly rounded.
        ours = self._message_views
        for their, own, difference in zip(theirs, ours, self.views, strict=True):
            torch.sub(their, own, out=difference)
        if self.branches:
            # A cheap necessary condition first, which rarely holds before the workers agree.
            self._compute_norms(self._directions, self._norms)
            self._compute_norms(self.own, self._own_norms)
            if self._has_absent:
                self._norms.flat.add_(self._absent)
            if not (self._norms.flat <= self._noise_bounds.flat * self._own_norms.flat).any():
                return
        of_both, of_d = (self._scales.flat, self._own_norms.flat), self._norms.flat
        self._largest(theirs, self._scales)
        self._largest(ours, self._own_norms)
        self._largest(self.views, self._norms)
        noise = of_d <= NOISE[of_d.dtype] * torch.maximum(*of_both)
        for d, which in zip(self.views, self._masks(noise), strict=True):
            d.masked_fill_(which, 0)

    def _largest(self, views: Sequence[Tensor], out: PerDirection) -> None:
        """The largest magnitude in each direction of views [batch, neighbor, rank, length]."""
        for view, largest in zip(views, out.views, strict=True):
            torch.linalg.vector_norm(view, torch.inf, dim=-1, out=largest)

    def _masks(self, which: Tensor) -> list[Tensor]:
        """Some directions [direction], by stack: [batch, neighbor, rank, 1]."""
        signs = self._signs.views
        parts = zip(which.split([sign.numel() for sign in signs]), signs, strict=True)
        return [part.view(*sign.shape, 1) for part, sign in parts]

    # --- Random directions ---

    def draw(self, counter: int) -> None:
        """Sample directions from the edges' random streams: the same at both ends."""
        self.unpack(self._drawn(counter))

    def _drawn(self, counter: int) -> Tensor:
        """Random directions in the form of a message."""
        edges = self._edges
        drawn = randomness.normal(edges.key, counter, (self._whole_size,))
        return drawn.to(edges.sign).mul_((edges.sign * (1 - edges.absent))[..., None])

    def _redraw_collapsed(self, norms: Tensor, counter: int) -> bool:
        """Resample the directions of norm 0 and return whether there were any.

        `norms` [direction] is changed to 1 for padding. A direction is 0 at both ends or at
        neither, since both have the same d to the bit.
        """
        if self._has_absent:
            norms.add_(self._absent)
        if self.branches and norms.all():
            return False
        collapsed = self._masks(norms == 0)
        drawn = self._views_of(self._drawn(counter), self._whole)
        for stack, (view, which) in enumerate(zip(self.views, collapsed, strict=True)):
            torch.where(which, self._own(stack, drawn[stack]), view, out=view)
        return True

    # --- Orthonormal directions ---

    def orthonormalize(self, counter: int) -> None:
        """Make each edge's directions for a matrix orthonormal, after resampling zero directions.

        `counter` is the index of the random draws.
        """
        if self._rank == 1:
            self._normalize(counter)
        else:
            self._orthonormalize(counter)

    def round(self, counter: int) -> None:
        """p ← sign(p)/√length with sign(0) = +1, instead of normalizing."""
        self._compute_norms(self._directions, self._norms)
        self._redraw_collapsed(self._norms.flat, counter)
        for view, sign, (_, length) in zip(self.views, self._signs.views, self._whole, strict=True):
            size = 1 / sqrt(length)
            view.copy_(torch.where(view * sign[..., None] >= 0, size, -size))

    def _normalize(self, counter: int) -> None:
        """p ← sign · p/‖p‖"""
        norms = self._norms
        self._compute_norms(self._directions, norms)
        if self._redraw_collapsed(norms.flat, counter):
            self._compute_norms(self._directions, norms)
            norms.flat.add_(self._absent)
        torch.div(self._signs.flat, norms.flat, out=self._scales.flat)
        for stack, scale in zip(self.stacks, self._scales.stacks, strict=True):
            stack.mul_(scale[..., None])

    def _orthonormalize(self, counter: int) -> None:
        """p ← T p with T = L⁻¹ S and G = p pᵀ = L Lᵀ: orthonormal, up to the ridge.

        S is the sign of an edge. T is computed for all stacks at once.
        """
        self._compute_gram()
        squares = self._gram.diagonal(dim1=1, dim2=2)
        norms = squares.flatten()
        if self._redraw_collapsed(norms, counter):
            self._compute_gram()
            norms = squares.flatten().add_(self._absent)
        squares.copy_(norms.view_as(squares))  # 1 for padding
        squares.mul_(1 + _RIDGE)
        factor = torch.linalg.cholesky_ex(self._gram).L
        transforms = torch.linalg.solve_triangular(factor, self._sign_matrices, upper=False)
        of_stacks = transforms.split([len(gram) for gram in self._grams])
        for transform, frame, result in zip(
            of_stacks, self._wide.frames, self._orthonormal.frames, strict=True
        ):
            torch.bmm(transform, frame, out=result)
        self.flat.copy_(self._orthonormal.flat)

    def _compute_gram(self) -> None:
        self._wide.flat.copy_(self.flat)
        for frame, gram in zip(self._wide.frames, self._grams, strict=True):
            torch.bmm(frame, frame.mT, out=gram)

    def _compute_norms(self, vectors: PerDirection, out: PerDirection) -> None:
        for stack, norm in zip(vectors.stacks, out.stacks, strict=True):
            torch.linalg.vector_norm(stack, dim=-1, out=norm)

    # --- Products and updates ---

    def project(self, x: Tensor, counter: int, round_weights: bool) -> ToEach:
        """p ← orthonormalize(p) and s = Xᵀ p: the message of an iteration.

        Args:
            x: Parameters [worker, D].
            counter: Index of the random draws.
            round_weights: True if signs take the place of orthonormal directions.
        """
        if round_weights:
            self.round(counter)
        else:
            self.orthonormalize(counter)
        products = self.other.own.stacks
        for p_T, X, s_T in zip(self.stacks, self._matrices_of(x), products, strict=True):
            torch.bmm(p_T, X, out=s_T)
        return self.other.message()

    def update(self, x: Tensor, received: Tensor | None) -> "MatrixSide":
        """d = s_received − s and X ← X + γ w p dᵀ. Returns d, in the memory of the other side.

        Without `received`, the last d is used again.
        """
        d = self.other
        if received is not None:
            d.take_differences(received)
        weighted = self.weighted().stacks
        for weighted_p_T, d_T, X in zip(weighted, d.stacks, self._matrices_of(x), strict=True):
            X.baddbmm_(weighted_p_T.mT, d_T)
        return d

    def recall(self, message: Tensor) -> None:
        """s ← the message of an earlier `project` with the same p."""
        s = self.other
        s._message.copy_(message)
        for own, view in zip(s.own.views, s._message_views, strict=True):
            own.copy_(view)

    def _matrices_of(self, x: Tensor) -> list[Tensor]:
        return self._matrix_views.get(x, self._make_views)

    def _make_views(self, x: Tensor) -> list[Tensor]:
        views = [view for stack in self._matrices for view in batches(x, stack)]
        return [view.mT for view in views] if self._side else views


def matrix_sides(
    edges: EdgeConstants, rank: int, stacks: Sequence[Stack]
) -> tuple[MatrixSide, MatrixSide]:
    """Both sides of the edges of one round."""
    p, q = (MatrixSide(edges, rank, stacks, side) for side in (0, 1))
    p.other, q.other = q, p
    return p, q
