"""Muon: momentum with its singular values set to about 1, for the matrices of hidden layers.

Axes: worker (hosted by this process), matrix (worker · layer of one shape), row, column; D
parameters of a worker.
"""

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from powergossip.parameters import Layout, complement, matrix_shape, trained

Rows = list[nn.Parameter]  # of x, each [1, D]

# Singular values from 0.01 on become 0.68 to 1.14 in 5 steps.
# Jordan et al. (2024), https://kellerjordan.github.io/posts/muon
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7  # smallest norm of a matrix
_ROWS = 32  # in bfloat16 and up, 32 rows of any length are a multiple of 64 bytes


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """X/‖X‖_F, then `steps` times X ← a X + (b A + c A²) X with A = X Xᵀ. See NEWTON_SCHULZ.

    Args:
        x: Matrices [matrix, row, column] with at most as many rows as columns. Overwritten.
    """
    x = x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp_(min=_EPSILON))
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def match_rms_adamw(rows: int, columns: int) -> float:
    """0.2 √max(rows, columns): the root mean square of the step is 0.2, about AdamW's.

    Liu et al. (2025), arXiv:2502.16982, eq. 4.
    """
    return 0.2 * sqrt(max(rows, columns))


def original(rows: int, columns: int) -> float:
    """√max(1, rows/columns), as in Jordan's published code for matrices.

    For convolutions that has the last two axes, the sides of the kernel, in their place.
    """
    return sqrt(max(1, rows / columns))


SCALES: dict[str, Callable[[int, int], float]] = {
    "match-rms-adamw": match_rms_adamw,
    "original": original,
}
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices M [row, column], and AdamW for all other parameters::

        m ← μ m + (1 − μ) g
        M ← M − η s polar(m)           with nesterov M ← M − η s polar(μ m + (1 − μ) g)

    Jordan et al. (2024), https://kellerjordan.github.io/posts/muon. polar(U Σ Vᵀ) = U Vᵀ is
    approximated by an iteration, and the scale s depends on the shape. A tensor with more axes is
    the matrix [first axis, all others]. Muon has no weight decay here.

    The matrices of one shape of all workers are one batched product. They are transposed to have
    fewer rows than columns, and rows of zeros are added to a multiple of 32: the bits of a product
    may depend on the alignment of its operands, and a worker's bits must not depend on its row.

    Args:
        rows: The parameters of each worker.
        hidden: Indices of the hidden matrices, in the order of `layout.shapes`.
        adamw: Function that makes the optimizer of all other parameters.
        momentum: Momentum μ.
        nesterov: Nesterov's momentum.
        steps: Steps of the iteration.
        dtype: Dtype of the iteration.
        scale: Function (rows, columns) → s.
        rate: Learning rate η, in units of AdamW's.
    """

    def __init__(
        self,
        rows: Rows,
        layout: Layout,
        hidden: Sequence[int],
        adamw: Callable[[Rows], torch.optim.Optimizer],
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        dtype: torch.dtype,
        scale: Callable[[int, int], float],
        rate: float,
    ):
        # All other parameters of a worker, one after the other.
        self._others = complement([(s.start, s.stop) for s in layout.spans(hidden)], layout.size)
        size = sum(span.stop - span.start for span in self._others)
        self._packed = [nn.Parameter(row.new_empty(1, size)) for row in rows]
        self._adamw = adamw(self._packed)
        super().__init__(rows, {"lr": self._adamw.param_groups[0]["lr"]})
        self._momentum, self._nesterov = momentum, nesterov
        self._steps, self._dtype, self._scale, self._rate = steps, dtype, scale, rate
        shapes = {index: matrix_shape(layout.shapes[index]) for index in hidden}
        self._groups = [  # the shape of matrices, and their ranges in D
            (shape, layout.spans(index for index in hidden if shapes[index] == shape))
            for shape in sorted(set(shapes.values()))
        ]
        for row, packed in zip(rows, self._packed, strict=True):
            self.state[row] = self._adamw.state[packed]  # one state for both optimizers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the rows in place by their gradients row.grad, which stay as they are."""
        rows, rate = self.param_groups[0]["params"], self.param_groups[0]["lr"]
        self._update_others(rows, rate)
        start = 0  # of the group in the momentum buffers
        for (height, width), spans in self._groups:
            stop = start + sum(span.stop - span.start for span in spans)
            directions = [self._direction(row, spans, slice(start, stop)) for row in rows]
            matrices = torch.cat(directions).view(-1, height, width)
            steps = self._polar(matrices).view(len(rows), -1).split(1)
            scale = rate * self._rate * self._scale(height, width)
            for row, step in zip(rows, steps, strict=True):
                _add(row, step, spans, -scale)
            start = stop

    def _update_others(self, rows: Rows, rate: float) -> None:
        """x ← x + u with AdamW's displacement u, for all but the hidden matrices."""
        self._adamw.param_groups[0]["lr"] = rate
        for row, packed in zip(rows, self._packed, strict=True):
            packed.zero_()
            packed.grad = _elements(row.grad, self._others)
        self._adamw.step()
        for row, packed in zip(rows, self._packed, strict=True):
            _add(row, packed, self._others, 1)

    def _direction(self, row: Tensor, spans: Sequence[slice], part: slice) -> Tensor:
        """The momentum of a group, after a step with the gradient: [1, elements]."""
        g, state = _elements(row.grad, spans), self.state[row]
        if "momentum_buffer" not in state:
            sizes = (s.stop - s.start for _, of_group in self._groups for s in of_group)
            state["momentum_buffer"] = row.new_zeros(1, sum(sizes))
        m = state["momentum_buffer"][:, part].lerp_(g, 1 - self._momentum)
        return g.lerp_(m, self._momentum) if self._nesterov else m

    def _polar(self, matrices: Tensor) -> Tensor:
        """polar(M) of matrices M [matrix, row, column], in the same shape and dtype."""
        tall = matrices.shape[1] > matrices.shape[2]
        wide = matrices.mT if tall else matrices
        count, height, width = wide.shape
        x = wide.new_zeros(count, -(-height // _ROWS) * _ROWS, width, dtype=self._dtype)
        x[:, :height] = wide
        polar = newton_schulz(x, self._steps)[:, :height].to(matrices.dtype)
        return (polar.mT if tall else polar).contiguous()


def _elements(row: Tensor | None, spans: Sequence[slice]) -> Tensor:
    """The elements of a row [1, D] in these spans, in a new tensor [1, elements]."""
    assert row is not None
    return torch.cat([row[:, :0], *(row[:, span] for span in spans)], 1)


def _add(row: Tensor, packed: Tensor, spans: Sequence[slice], alpha: float) -> None:
    """row [1, D] ← row + alpha · packed [1, elements], which has the elements of these spans."""
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        row[:, span].add_(packed[:, start:stop], alpha=alpha)
        start = stop


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of the trained parameters that Muon updates.

    They are those that the model's own method `hidden_matrices()` returns. Without such a method
    they are all tensors of two or more axes, except embeddings, the last such tensor and, in a
    model without embeddings, the first one. A tensor with two names counts at both places.

    Raises:
        ValueError: For a name that is not a trained matrix's, and if the model has no matrix.
    """
    matrices = [name for name, p in trained(model).items() if p.ndim >= 2]
    method = getattr(model, "hidden_matrices", None)
    found = list(_by_default(model) if method is None else method())
    for name in found:
        if name not in matrices:
            raise ValueError(
                f'local_optimizer=muon: hidden_matrices of the model has "{name}"; use names of '
                f"trained parameters with two or more axes: {', '.join(matrices)}"
            )
    if not found:
        raise ValueError(
            f"local_optimizer=muon: use adamw with {type(model).__name__}, which has no hidden "
            "matrices, or give it a method hidden_matrices() with their names"
        )
    return [name for name in matrices if name in found]


def _by_default(model: nn.Module) -> list[str]:
    """See `hidden_matrices`."""
    embeddings = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    every = [p for _, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2]
    outer = embeddings | {*every[-1:]} | (set() if embeddings else {*every[:1]})
    return [name for name, p in trained(model).items() if p.ndim >= 2 and p not in outer]
