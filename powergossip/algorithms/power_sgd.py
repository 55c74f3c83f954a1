"""PowerSGD: all workers apply one mean gradient, approximated by matrices of low rank.

`optimizers.PowerSGD` puts it into your own training loop. tests/algorithms/test_powersgd.py has the
same algorithm without the batching, to be read beside the paper.

Axes: worker (hosted here), batch (the layers of one worker, or one layer of all workers, see
parameters.batches), rank, row, column. Each worker has D elements.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip import checks, randomness
from powergossip.algorithms.averaging import Aggregation
from powergossip.network import Conversation, Mean, Network
from powergossip.parameters import Layout, Stack, aligned, batches, complement, put_in, take_out

_LEFT, _RIGHT = 0, 1  # sides of a matrix: vectors as long as a column, and as long as a row

_TINY = 1e-30  # norms below this count as zero
_DEPENDENT = 1e-5  # relative residual below which a direction depends on others (float32 rounding)
_RIDGE = 1e-15  # relative to a direction's squared norm
_ATTEMPTS = 8  # redraws of dependent directions; the first almost always succeeds


@dataclass(frozen=True)
class PowerSGDConfig:
    """Options of PowerSGD.

    The first four have the names, order and defaults of the published class. The other options of
    its authors' paper are called `reuse_query` and `optimizer_memory` in their research code.

    Args:
        rank: Rank of the approximation in each half-iteration, at most the smaller side of a
            matrix.
        min_compression_rate: Tensors that would be compressed by this factor or less are
            all-reduced whole.
        num_iters_per_step: Half-iterations of power iteration in a step.
        start_compressing_after_num_steps: Steps of plain all-reduce at the beginning.
        warm_start: Begin a step with the last factors of the step before. Otherwise the first
            directions are resampled.
        error_feedback: Add a worker's error to its next gradient. Otherwise it is lost.
        seed: Seed of random directions.

    Raises:
        ValueError: For a value out of range.
    """

    rank: int
    min_compression_rate: float = 2.0
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 1),
            ("num_iters_per_step", 1),
            ("start_compressing_after_num_steps", 0),
        ):
            value = getattr(self, name)
            ok = isinstance(checks.plain(value), int) and value >= least
            checks.check(name, value, ok, f"a whole number, {least} or more")
        rate = self.min_compression_rate
        checks.check(
            "min_compression_rate", rate, checks.is_finite(rate) and rate >= 0, "0 or more"
        )

    def elements(self, rows: int, columns: int) -> float:
        """Elements that are sent for a compressed matrix per step, on average."""
        rank = min(self.rank, rows, columns)
        return self.num_iters_per_step * rank * (rows + columns) / 2

    def compresses(self, rows: int, columns: int) -> bool:
        """True if a matrix of this shape is compressed."""
        return rows * columns > self.min_compression_rate * self.elements(rows, columns)


class PowerSGDAggregation(Aggregation):
    """The mean gradient of all workers, approximately. Each worker keeps its error.

    Per matrix M_i of worker i, with `in` on the right side (sides alternate, across steps too), a
    half-iteration is::

        in ← orthonormalize(in)                 the same in all workers, for each matrix by itself
        out_i = M_i in
        M_i ← M_i − out_i inᵀ                   the error
        mean += (mean_i out_i) inᵀ,   in ← mean_i out_i

    On the left side, out_i = M_iᵀ in and M_i ← M_i − in out_iᵀ. `_Group` computes it without
    writing M_i in every half-iteration: it collects the factors left and right of all updates, and
    M_i after some of them is M_i − Σ leftᵀ right.

    Vogels et al. (2019), arXiv:1905.13727, as its authors now recommend it. Algorithm 2 of Vogels
    et al. (2020), arXiv:2008.01425, is close. The directions `in` follow the error, not the whole
    gradient: with one half-iteration per step and a constant gradient they converge to its leading
    singular vectors, and further half-iterations each find new ones. (Directions that always follow
    the whole gradient learn worse: 0.915 … 0.958 against 0.917 … 0.972 on Digits at rank 1.)

    Without warm start, the first `in` of each step is random, so that a step starts its power
    iteration from nothing. Without error feedback, M_i is a worker's gradient alone.

    Cost on the wire per half-iteration: an all-reduce of rank · rows (or columns) elements for each
    compressed matrix. The first one of a step includes all other tensors, uncompressed. Elements
    are of `dtype`, by default the network's, as are gradient and mean. Random directions have the
    precision of float32, and are orthonormalized in float64.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        config: PowerSGDConfig,
        dtype: torch.dtype | None = None,
    ):
        dtype = network.dtype if dtype is None else dtype
        self._network, self._config, self._size = network, config, layout.size
        chosen = [s for s in layout.stacks if config.compresses(s.rows, s.columns)]
        workers, device = network.rows, network.device
        self._groups = [
            _Group(stack, part, config, workers, device, dtype)
            for stack in chosen
            for part in range(1 if workers == 1 else stack.layers)
        ]
        self._rest = complement([(s.start, s.stop) for s in chosen], layout.size)
        self._rest_size = sum(span.stop - span.start for span in self._rest)
        self._messages = {
            (side, first): _Outgoing(
                self._groups, side, self._rest_size * first, workers, device, dtype
            )
            for side in (_LEFT, _RIGHT)
            for first in (False, True)  # of a step
        }
        self._everything: Mean | None = None
        self._viewed: tuple[Tensor, Tensor] | None = None
        self._views: list[tuple[Tensor, Tensor]] = []
        self._steps = self._iterations = 0
        for group in self._groups:
            group.draw(self._side, 0)

    @property
    def compression_rate(self) -> float:
        """Elements of a gradient over the elements sent for it per step, on average."""
        sent = float(self._rest_size)
        for group in self._groups:
            sent += group.layers * self._config.elements(group.rows, group.columns)
        return self._size / sent

    @property
    def _side(self) -> int:
        """The side of `in` in the next half-iteration."""
        return _LEFT if self._iterations % 2 else _RIGHT

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Replace gradient [worker, D] by the error, and fill mean [worker, D]."""
        self._steps += 1
        if self._steps <= self._config.start_compressing_after_num_steps:
            if self._everything is None:
                self._everything = Mean(torch.empty_like(gradient))
            self._everything.tensor.copy_(gradient)
            mean.copy_((yield self._everything))
            gradient.zero_()
            return
        self._everything = None
        matrices = self._matrices(gradient, mean)
        for iteration in range(self._config.num_iters_per_step):
            side, first = self._side, iteration == 0
            outgoing = self._messages[side, first]
            if first:
                take_out(gradient, self._rest, outgoing.message.tensor)
            for group, (M, _), out in zip(self._groups, matrices, outgoing.products, strict=True):
                group.multiply(M, iteration, side, out)
            received = yield outgoing.message  # [1, elements]
            if first:
                put_in(received, self._rest, mean)
            self._iterations += 1
            for group, out in zip(self._groups, outgoing.split(received), strict=True):
                group.receive(out, iteration, side)
                if self._config.warm_start or iteration + 1 < self._config.num_iters_per_step:
                    group.orthonormalize(self._side, self._iterations)
                else:
                    group.draw(self._side, self._iterations)
        for group, (M, M_mean) in zip(self._groups, matrices, strict=True):
            group.apply(M, M_mean)
        if not self._config.error_feedback:
            gradient.zero_()

    def _matrices(self, gradient: Tensor, mean: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each group's views of both tensors, created once for the tensors of all steps. Creating
        them in every step would take a tenth of its time in a network of small layers."""
        if self._viewed is None or gradient is not self._viewed[0] or mean is not self._viewed[1]:
            self._viewed = gradient, mean
            self._views = [(g.matrices(gradient), g.matrices(mean)) for g in self._groups]
        return self._views

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the next directions: [worker, ...], the same for all workers."""
        directions = [group.directions[self._side].reshape(1, -1) for group in self._groups]
        flat = torch.cat(directions, 1) if directions else torch.zeros(1, 0)
        return {
            "steps": self._steps,
            "iterations": self._iterations,
            "directions": flat.repeat(self._network.rows, 1),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        self._steps, self._iterations = state["steps"], state["iterations"]
        flat = state["directions"].to(self._network.device)
        directions = [group.directions[self._side] for group in self._groups]
        sizes = [d.numel() for d in directions]
        if flat.shape[1] != sum(sizes):
            raise ValueError(
                f"PowerSGD's state has directions of {flat.shape[1]} elements, not {sum(sizes)}; "
                "it belongs to another model, or another rank"
            )
        for own, saved in zip(directions, flat[0].split(sizes), strict=True):
            own.copy_(saved.view_as(own))


class _Outgoing:
    """The message of a half-iteration.

    Attributes:
        message: A Mean of [worker, elements]: `skip` elements of other tensors, then the products
            `out` for `in` on this side.
        products: Views [worker, elements of a group] of the message, one for each group.
    """

    def __init__(
        self,
        groups: Iterable["_Group"],
        side: int,
        skip: int,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._sizes = [skip, *(group.directions[1 - side].numel() for group in groups)]
        self.message = Mean(torch.zeros(workers, sum(self._sizes), device=device, dtype=dtype))
        self.products = self.split(self.message.tensor)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The products in a tensor [.., elements] that is laid out as the message is."""
        return tensor.split(self._sizes, dim=1)[1:]


class _Group:
    """Matrices of one shape in batched products: [batch, row, column].

    With one worker, a batch has the layers of a stack. With several, it has one layer of all
    workers, the one with index `part` in the stack. Tensors that are equal in all workers have the
    batch's layers in front, or 1. Vectors are rows of tensors: [.., rank, length].

    Attributes:
        directions: `in` by side: (left [layers, rank, row], right [layers, rank, column]).
    """

    def __init__(
        self,
        stack: Stack,
        part: int,
        config: PowerSGDConfig,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        rank = min(config.rank, stack.rows, stack.columns)
        self._stack, self._part, self._rank, self._alone = stack, part, rank, workers == 1
        self.rows, self.columns = stack.rows, stack.columns
        self.layers = stack.layers if self._alone else 1
        self._batch = stack.layers if self._alone else workers
        chosen = range(stack.layers) if self._alone else [part]
        ids = [(stack.start, layer) for layer in chosen]
        self._keys = randomness.keys(config.seed, "powersgd", ids).to(device)

        def pair(batch: int, vectors: int) -> tuple[Tensor, Tensor]:
            left, right = (
                aligned(batch, vectors * length, dtype, device).zero_().view(batch, vectors, length)
                for length in (self.rows, self.columns)
            )
            return left, right

        count = config.num_iters_per_step * rank
        self._own = pair(self._batch, count)  # (left, right) of all updates of this step
        self._mean = pair(self.layers, count)  # the same, with mean_i out_i in place of out_i
        self.directions = pair(self.layers, rank)

    def matrices(self, x: Tensor) -> Tensor:
        """The view of x [worker, D] that this group works on: [batch, row, column]."""
        return batches(x, self._stack)[self._part]

    def draw(self, side: int, counter: int) -> None:
        """Draw random orthonormal directions for this half-iteration, the same everywhere."""
        self.directions[side].copy_(self._random(side, counter, 0))
        self.orthonormalize(side, counter)

    def _random(self, side: int, counter: int, attempt: int) -> Tensor:
        shape = tuple(self.directions[side].shape[1:])
        return randomness.normal(self._keys, _ATTEMPTS * counter + attempt, shape)

    def multiply(self, M: Tensor, iteration: int, side: int, out: Tensor) -> None:
        """out [worker, elements] ← M_t in, or M_tᵀ in on the left side.

        M is not written until `apply`. After the step's updates j so far, M_t = M − Σ_j left_jᵀ
        right_j, so M_t in = M in − Σ_j left_jᵀ (right_j in). `iteration` counts them. The bits of
        products depend on the alignment of operands: factors have the same alignment in all
        layouts.
        """
        directions = self.directions[side].expand(self._batch, -1, -1)
        factors, others = self._own[side], self._own[1 - side]  # of the side of `in`, and of `out`
        done = iteration * self._rank
        result = others[:, done : done + self._rank]
        torch.bmm(directions, M.mT if side == _RIGHT else M, out=result)
        if iteration:
            inner = directions @ factors[:, :done].mT  # right_j in, [batch, rank, done]
            result.baddbmm_(inner, others[:, :done], alpha=-1)
        factors[:, done : done + self._rank] = directions
        out.view(result.shape).copy_(result)

    def receive(self, received: Tensor, iteration: int, side: int) -> None:
        """Take mean_i out_i [1, elements] as the next `in`, on the other side."""
        out = received.view(self.layers, self._rank, -1)
        now = slice(iteration * self._rank, (iteration + 1) * self._rank)
        self._mean[side][:, now] = self.directions[side]
        self._mean[1 - side][:, now] = out
        self.directions[1 - side].copy_(out)

    def orthonormalize(self, side: int, counter: int) -> None:
        """Orthonormalize `in` on this side; `counter` counts half-iterations."""
        directions = self.directions[side]
        directions.copy_(
            orthonormalize(directions, lambda attempt: self._random(side, counter, attempt))
        )

    def apply(self, M: Tensor, mean: Tensor) -> None:
        """M ← M − Σ_j left_jᵀ right_j, and mean ← the same sum with the workers' mean factors."""
        left, right = self._own
        M.baddbmm_(left.mT, right, alpha=-1)
        left, right = self._mean
        if self._alone:
            torch.bmm(left.mT, right, out=mean)
        else:
            mean.copy_(left.mT @ right)


def orthonormalize(directions: Tensor, redraw: Callable[[int], Tensor]) -> Tensor:
    """Orthonormal rows that span the same space: directions [batch, rank, length] → float64.

    G = p pᵀ = L Lᵀ with rows p of length 1, and p ← L⁻¹ p. The second pass removes the rounding
    errors of the first (Fukaya et al. 2014, doi:10.1109/ScalA.2014.11).

    A direction that is 0 or, up to rounding, in the span of those before it carries no information
    (if the matrix is 0, for instance). It is replaced by the same one of `redraw(attempt)`
    [batch, rank, length], attempt = 1, 2, … On a GPU, where a check would have to wait for the GPU,
    the first of them is always drawn, and no other.
    """
    p = directions.double()
    asks = directions.device.type == "cpu"
    last = _ATTEMPTS if asks else 2
    for attempt in range(1, last + 1):
        p /= torch.linalg.vector_norm(p, dim=2, keepdim=True).clamp_(min=_TINY)
        factor, info = _cholesky(p)
        residual = factor.diagonal(dim1=1, dim2=2)  # of a direction, given those before it
        failed = (info[:, None] > 0) | (residual > _DEPENDENT).logical_not()
        if attempt == last or (asks and not failed.any()):
            break
        p = torch.where(failed[..., None], redraw(attempt).double(), p)
    if p.shape[1] > 1:
        p = torch.linalg.solve_triangular(factor, p, upper=False)
        factor, _ = _cholesky(p)
        p = torch.linalg.solve_triangular(factor, p, upper=False)
    return p


def _cholesky(p: Tensor) -> tuple[Tensor, Tensor]:
    """L of p pᵀ + ridge = L Lᵀ, and whether it failed (> 0), by batch."""
    gram = p @ p.mT
    gram.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    factor, info = torch.linalg.cholesky_ex(gram)
    return factor, info
