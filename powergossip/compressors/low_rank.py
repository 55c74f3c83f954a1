"""Low-rank approximation by singular value decomposition."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from powergossip import checks
from powergossip.compressors.compressor import Field, Stream, nan_if_not_finite


@dataclass(frozen=True)
class SVD:
    """C(v) = the best approximation of v that has rank r = min(rank, m, k), for m rows, k columns.

    Message: r · min(m, k) floats, orthonormal singular vectors of the shorter side, one after the
    other in ascending order of singular value; then r · max(m, k) floats, the vectors of the longer
    side times their singular values. If that is not less than N floats, v itself is sent as by
    `Identity`. δ = Σ_{i ≤ r} σ_i² / Σ_i σ_i² ≥ r/min(m, k) (Eckart & Young 1936,
    doi:10.1007/BF02288367).

    The vectors are computed as eigenvectors of the shorter side's Gram matrix, which is several
    times faster than a singular value decomposition. The Gram matrix is in double precision, since
    squaring loses half the digits. The first vector alone does not need them.

    A matrix with a NaN or infinity is decoded as NaN throughout.

    Args:
        rank: Rank r of the approximation, at most the smaller side of a matrix.

    Raises:
        ValueError: For a rank below 1.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        checks.at_least_one("rank", self.rank)

    def stable_rate(self, rows: int, columns: int) -> float:
        """r/min(m, k), the least δ of a matrix."""
        rank = self._rank_sent(rows, columns)
        return 1.0 if rank is None else rank / min(rows, columns)

    def fields(self, rows: int, columns: int) -> tuple[Field, ...]:
        rank = self._rank_sent(rows, columns)
        if rank is None:
            return (Field(torch.float32, rows * columns),)
        return (
            Field(torch.float32, rank * min(rows, columns)),
            Field(torch.float32, rank * max(rows, columns)),
        )

    def compress(self, v: Tensor, stream: Stream) -> tuple[Tensor, ...]:
        rank = self._rank_sent(*v.shape[-2:])
        if rank is None:
            return (v.flatten(-2),)
        not_finite = nan_if_not_finite(v.flatten(-2))  # [*, 1]
        short, long = _largest_singular(_wide(v).where(not_finite[..., None] == 0, 0), rank)
        return short.flatten(-2), long.flatten(-2) + not_finite

    def decompress(self, fields: tuple[Tensor, ...], out: Tensor, stream: Stream) -> None:
        rank = self._rank_sent(*out.shape[-2:])
        if rank is None:
            out.flatten(-2).add_(fields[0])
            return
        # One rank after the other: a matrix product could round differently in another batch.
        short, long = (field.unflatten(-1, (rank, -1)).unbind(-2) for field in fields)
        out = _wide(out)
        total = short[0][..., :, None] * long[0][..., None, :]
        for u, w in zip(short[1:], long[1:], strict=True):
            total.add_(u[..., :, None] * w[..., None, :])
        out.add_(total)

    def _rank_sent(self, rows: int, columns: int) -> int | None:
        """r, or None if the matrix is sent uncompressed."""
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else None


def _largest_singular(wide: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors [*, rank, row] of matrices [*, row, column] of at least as many columns
    as rows, by ascending singular value, and their products with the matrices [*, rank, column]."""
    rows, columns = wide.shape[-2:]
    if wide.is_cuda or rows < 50 or 10 * rank > rows:
        wide = wide.double()
        vectors = torch.linalg.eigh(wide @ wide.mT).eigenvectors.mT[..., -rank:, :]
        return vectors, vectors @ wide

    # On a CPU, a few vectors of a large matrix take less than half the time of all vectors, but
    # PyTorch cannot compute a subset. The leading vector is equally accurate from a Gram matrix in
    # single precision, if the squares are within its range.
    from scipy.linalg import lapack  # imported here: takes a fifth of a second

    precision, prefix = (np.float32, "s") if rank == 1 else (np.float64, "d")
    syevr = getattr(lapack, f"{prefix}syevr")
    lwork, liwork, _ = map(int, getattr(lapack, f"{prefix}syevr_lwork")(rows, lower=1))
    last = {"range": "I", "il": rows - rank + 1, "iu": rows, "lwork": lwork, "liwork": liwork}
    vectors = wide.new_empty(*wide.shape[:-2], rank, rows)
    products = wide.new_empty(*wide.shape[:-2], rank, columns)
    for matrix, u, w in zip(
        wide.reshape(-1, rows, columns).numpy(),
        vectors.view(-1, rank, rows).numpy(),
        products.view(-1, rank, columns).numpy(),
        strict=True,
    ):
        scaled = matrix.astype(precision) / max(np.abs(matrix).max(), _TINY)
        _, found, _, _, info = syevr((scaled @ scaled.T).T, lower=1, overwrite_a=1, **last)
        if info:
            raise np.linalg.LinAlgError(f"eigenvectors were not found: syevr gives {info}")
        u[:] = found[:, :rank].T
        np.matmul(u, matrix, out=w)
    return vectors, products


_TINY = np.finfo(np.float32).tiny


def _wide(v: Tensor) -> Tensor:
    """A view of v [*, row, column] with the shorter side first."""
    return v.mT if v.shape[-2] > v.shape[-1] else v
