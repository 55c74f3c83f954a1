"""PowerSGD: all workers apply one mean gradient, of which each step learns a low-rank piece.

In anyone's training loop, one worker a process (`mpirun -np 8 python mine.py`):

    powersgd = PowerSGD(list(model.parameters()), Config(rank=1))
    for batch in batches:
        loss(model, batch).backward()       # adds to p.grad, which holds what was not sent yet
        optimizer_step(optimizer, powersgd)  # in place of optimizer.step() and zero_grad()

`Aggregation` is the same on the flat buffers of train.py.

Axes: worker (hosted here), batch (the layers of one worker, or one layer of all workers, see
parameters.batches), rank, row, column. D numbers a worker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.network import Conversation, Mean, Network
from powergossip.parameters import Layout, Stack, batches, put_in, take_out

_TINY = 1e-30  # a direction that is shorter is 0
_DEPENDENT = 1e-5  # a share of a direction that 32 bits may have made
_ATTEMPTS = 8  # to draw independent directions, of which the first succeeds


@dataclass(frozen=True)
class Config:
    """
    rank                                of what a half-iteration learns of each matrix
    min_compression_rate                a tensor that would compress less is all-reduced as it is
    num_iters_per_step                  half-iterations of power iteration a step
    start_compressing_after_num_steps   steps of plain all-reduce at the beginning
    seed                                of the first directions

    Raises ValueError for a value that makes no sense.
    """

    rank: int = 1
    min_compression_rate: float = 10.0
    num_iters_per_step: int = 2
    start_compressing_after_num_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 1),
            ("num_iters_per_step", 1),
            ("start_compressing_after_num_steps", 0),
            ("min_compression_rate", 1),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and value >= least):
                raise ValueError(f"{name}={value}: use {least} or more")

    def numbers(self, rows: int, columns: int) -> float:
        """How many numbers of a matrix travel in a step, on average."""
        rank = min(self.rank, rows, columns)
        return self.num_iters_per_step * rank * (rows + columns) / 2

    def compresses(self, rows: int, columns: int) -> bool:
        """Whether such a matrix travels compressed."""
        return rows * columns >= self.min_compression_rate * self.numbers(rows, columns)


class Aggregation:
    """The workers' mean gradient, approximately; what is left of each waits for the next step.

    Per matrix M_i of worker i, a half-iteration:

        in ← orthonormalize(in)                 the same in all workers; each matrix by itself
        out_i = M_iᵀ in                         or M_i in: sides alternate, across steps too
        M_i ← M_i − in out_iᵀ                   the error
        mean += in (mean_i out_i)ᵀ;   in ← mean_i out_i

    Vogels et al. (2019), arXiv:1905.13727, as its authors now recommend it; Algorithm 2 of Vogels
    et al. (2020), arXiv:2008.01425, is close. Sends, per half-iteration, an all-reduce of rank ·
    columns (or rows) numbers for each compressed matrix; the rest of the tensors as they are, in
    the first.

    M_i is read once for each half-iteration and written once a step: half-iterations that follow
    the first work on M_i − Σ left right without forming it.

    Directions follow what is left, not the whole gradient: with one half-iteration a step and a
    gradient that stays, they converge to its leading singular vectors; more of them each learn
    something new. (Directions that always follow the whole gradient learn worse: 0.915 … 0.958
    against 0.917 … 0.972 on Digits at rank 1.)
    """

    owns_momentum = clips = False

    def __init__(self, network: Network, layout: Layout, config: Config):
        self._network, self._config, self._size = network, config, layout.size
        chosen = [s for s in layout.stacks if config.compresses(s.rows, s.columns)]
        workers, device = network.rows, network.device
        self._groups = [
            _Group(stack, part, config, workers, device)
            for stack in chosen
            for part in range(1 if workers == 1 else stack.layers)
        ]
        self._rest = _complement([(s.start, s.stop) for s in chosen], layout.size)
        self._rest_size = sum(span.stop - span.start for span in self._rest)
        # Of even and odd half-iterations: what leaves, by group; the rest of the tensors is before
        # it in the first of a step.
        sizes = [[g.out_size(side) for g in self._groups] for side in (0, 1)]
        self._messages: dict[tuple[int, bool], tuple[Mean, list[Tensor]]] = {}
        for side in (0, 1):
            for first in (False, True):
                skip = self._rest_size if first else 0
                flat = torch.zeros(workers, skip + sum(sizes[side]), device=device)
                parts = flat[:, skip:].split(sizes[side], dim=1) if self._groups else ()
                self._messages[side, first] = Mean(flat), list(parts)
        self._everything: Mean | None = None
        self._steps = self._iterations = 0
        for group in self._groups:
            group.draw(0)

    @property
    def compression_rate(self) -> float:
        """Numbers of a gradient over the numbers that travel of it in a step, on average."""
        config, travel = self._config, float(self._rest_size)
        for group in self._groups:
            travel += group.layers * config.numbers(group.rows, group.columns)
        return self._size / travel

    def at_epoch(self, epoch: float) -> None:
        """Nothing follows a schedule."""

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """gradient [worker, D]: taken, the error stays. mean [worker, D]: what all apply."""
        self._steps += 1
        if self._steps <= self._config.start_compressing_after_num_steps:
            if self._everything is None or self._everything.tensor is not gradient:
                self._everything = Mean(gradient)
            mean.copy_((yield self._everything))
            gradient.zero_()
            return
        self._everything = None
        for iteration in range(self._config.num_iters_per_step):
            side, first = self._iterations % 2, iteration == 0
            message, parts = self._messages[side, first]
            if first:
                take_out(gradient, self._rest, message.tensor)
            for group, part in zip(self._groups, parts, strict=True):
                group.multiply(gradient, iteration, side, part)
            received = yield message  # [1, numbers]
            if first:
                put_in(received, self._rest, mean)
            skip = self._rest_size if first else 0
            start = skip
            for group in self._groups:
                stop = start + group.out_size(side)
                group.take(received[:, start:stop], iteration, side)
                start = stop
            self._iterations += 1
            for group in self._groups:
                group.orthonormalize(self._iterations)
        for group in self._groups:
            group.apply(gradient, mean)

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the directions that come next: [worker, ...], the same for all."""
        directions = [group.directions.reshape(1, -1) for group in self._groups]
        flat = torch.cat(directions, 1) if directions else torch.zeros(1, 0)
        return {
            "steps": self._steps,
            "iterations": self._iterations,
            "directions": flat.repeat(self._network.rows, 1),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was."""
        self._steps, self._iterations = state["steps"], state["iterations"]
        flat = state["directions"].to(self._network.device)
        side, sizes = self._iterations % 2, []
        for group in self._groups:
            group.directions = group.directions_of(side)
            sizes.append(group.directions.numel())
        if flat.shape[1] != sum(sizes):
            raise ValueError(
                f"PowerSGD's state has {flat.shape[1]} numbers of directions, not {sum(sizes)}; "
                "it belongs to another model, or another rank"
            )
        for group, part in zip(self._groups, flat[0].split(sizes), strict=True):
            group.directions.copy_(part.view_as(group.directions))


class _Group:
    """Matrices of one shape that products take together: [batch, row, column].

    With one worker, a batch has the layers of a stack; with several, it has one layer (number
    `part` of the stack) of all workers. Shared tensors, the same for all workers, have the layers
    of the batch in front, or 1. Directions lie as rows: [.., rank, length].

    directions   # shared: `in`, orthonormal, of the side that comes next; lengths: side 0 columns
    """

    def __init__(
        self,
        stack: Stack,
        part: int,
        config: Config,
        workers: int,
        device: torch.device,
    ):
        rank = min(config.rank, stack.rows, stack.columns)
        self._stack, self._part, self._rank, self._alone = stack, part, rank, workers == 1
        self.rows, self.columns = stack.rows, stack.columns
        self.layers = stack.layers if self._alone else 1  # shared
        self._batch = stack.layers if self._alone else workers
        chosen = range(stack.layers) if self._alone else [part]
        ids = [(stack.start, layer) for layer in chosen]
        self._keys = randomness.keys(config.seed, "powersgd", ids).to(device)
        count = config.num_iters_per_step * rank

        def factors(batch: int, length: int) -> Tensor:
            return torch.zeros(batch, count, length, device=device)

        # Σ_j left_jᵀ right_j is what has been taken out of the matrices, and what all apply.
        self._taken = factors(self._batch, self.rows), factors(self._batch, self.columns)
        self._applied = factors(self.layers, self.rows), factors(self.layers, self.columns)
        lengths = self.columns, self.rows
        self._of_side = [torch.zeros(self.layers, rank, n, device=device) for n in lengths]
        self.directions = self._of_side[0]
        self._ridge = 1e-15 * torch.eye(rank, dtype=torch.float64, device=device)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def directions_of(self, side: int) -> Tensor:
        """The memory of a side's directions."""
        return self._of_side[side]

    def out_size(self, side: int) -> int:
        """Numbers that a worker sends in a half-iteration."""
        return self.layers * self._rank * (self.columns if side else self.rows)

    def draw(self, counter: int) -> None:
        """Random orthonormal directions, the same in all workers."""
        self.directions.copy_(self._random(counter, 0))
        self.orthonormalize(counter)

    def _random(self, counter: int, attempt: int) -> Tensor:
        shape = tuple(self.directions.shape[1:])
        return randomness.normal(self._keys, _ATTEMPTS * counter + attempt, shape)

    def multiply(self, x: Tensor, iteration: int, side: int, out: Tensor) -> None:
        """out [worker, numbers] ← `in` times what is left of the matrices."""
        matrices, directions = self._matrices(x), self.directions.expand(self._batch, -1, -1)
        result = out.view(self._batch, self._rank, -1)
        torch.bmm(directions, matrices if side else matrices.mT, out=result)
        other, this = (0, 1) if side else (1, 0)  # which of (left, right)
        before = slice(0, iteration * self._rank)
        if iteration:
            across = directions @ self._taken[other][:, before].mT  # [batch, rank, rank · before]
            result.baddbmm_(across, self._taken[this][:, before], alpha=-1)
        now = slice(before.stop, before.stop + self._rank)
        self._taken[other][:, now] = directions
        self._taken[this][:, now] = result

    def take(self, received: Tensor, iteration: int, side: int) -> None:
        """The mean of all workers' `out` [1, numbers], which is the next `in`."""
        mean = received.view(self.layers, self._rank, -1)
        other, this = (0, 1) if side else (1, 0)
        now = slice(iteration * self._rank, (iteration + 1) * self._rank)
        self._applied[other][:, now] = self.directions
        self._applied[this][:, now] = mean
        self.directions = self._of_side[1 - side].copy_(mean)

    def orthonormalize(self, counter: int) -> None:
        """G = p pᵀ = L Lᵀ with directions of length 1 as rows, p ← L⁻¹ p; twice, since the first
        time leaves what rounding makes of G (Fukaya et al. 2014, doi:10.1109/ScalA.2014.11).

        A direction that is 0, or in the span of those before it but for rounding, means nothing
        (that of a matrix of which nothing is left, say): it is drawn anew.
        """
        p = self.directions.double()
        for attempt in range(1, _ATTEMPTS):
            p /= torch.linalg.vector_norm(p, dim=2, keepdim=True).clamp_(min=_TINY)
            factor, info = torch.linalg.cholesky_ex(p @ p.mT + self._ridge)
            own = factor.diagonal(dim1=1, dim2=2)  # what is a direction's own, after those before
            failed = (info[:, None] > 0) | ~(own > _DEPENDENT)
            if not failed.any():
                break
            drawn = self._random(counter, attempt).double()
            p = torch.where(failed[..., None], drawn, p)
        if self._rank > 1:
            p = torch.linalg.solve_triangular(factor, p, upper=False)
            factor = torch.linalg.cholesky_ex(p @ p.mT + self._ridge).L
            p = torch.linalg.solve_triangular(factor, p, upper=False)
        self.directions.copy_(p)

    def apply(self, x: Tensor, mean: Tensor) -> None:
        """M_i ← M_i − Σ_j left_jᵀ right_j with i's own; mean ← the same sum of the mean ones."""
        left, right = self._taken
        self._matrices(x).baddbmm_(left.mT, right, alpha=-1)
        left, right = self._applied
        target = self._matrices(mean)
        if self._alone:
            torch.bmm(left.mT, right, out=target)
        else:
            target.copy_(left.mT @ right)

    def _matrices(self, x: Tensor) -> Tensor:
        known = self._views.get(id(x))
        if known is None or known[0] is not x:
            known = self._views[id(x)] = x, batches(x, self._stack)[self._part]
        return known[1]


def _complement(spans: Iterable[tuple[int, int]], size: int) -> list[slice]:
    """The positions of 0 … size − 1 that no span has."""
    left, position = [], 0
    for start, stop in [*sorted(spans), (size, size)]:
        if position < start:
            left.append(slice(position, start))
        position = stop
    return left


# --- In someone else's training loop -------------------------------------------------------------
