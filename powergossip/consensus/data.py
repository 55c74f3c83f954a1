"""Starting matrices of the workers.

A row of `DATA` is a function of the configuration. It returns a function of the worker index that
returns the worker's matrix, a float32 tensor [row, column]. It raises ValueError for a
configuration that it cannot serve.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from powergossip import checks
from powergossip.checks import BadValue
from powergossip.consensus.config import Config, Settings

Matrices = Callable[[int], Tensor]  # worker → its matrix, float32 [row, column]


def _random(size: int, generator: torch.Generator) -> Tensor:
    """N(0, 1)."""
    return torch.randn(size, size, generator=generator, dtype=torch.float32)


def _low_rank(size: int, generator: torch.Generator) -> Tensor:
    """Random singular vectors, singular values k^−2 for k = 1, 2, …"""
    shape = 2, size, size
    u, v = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float32)).Q
    return u * torch.arange(1, size + 1, dtype=torch.float32) ** -2 @ v.mT


DRAWN: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "random": _random,
    "low-rank": _low_rank,
}


def _drawn(c: Settings, name: str | None = None) -> Matrices:
    """Worker i has the generator torch.manual_seed(seed + i)."""
    make = DRAWN[name or c.data_type]
    return lambda worker: make(c.matrix_size, torch.Generator().manual_seed(c.seed + worker))


def _offset(c: Settings) -> Matrices:
    """Random plus i for worker i. A matrix of rank 1 dominates the differences of the workers."""
    random = _drawn(c, "random")
    return lambda worker: random(worker) + worker


def _log_normal(c: Settings) -> Matrices:
    """exp of random: a few large entries."""
    random = _drawn(c, "random")
    return lambda worker: random(worker).exp()


def _sparse(c: Settings) -> Matrices:
    """Zeros, with a 1 at index i of worker i's matrix, flattened."""
    elements = c.matrix_size**2
    if c.n_workers > elements:
        size = int(np.ceil(np.sqrt(c.n_workers)))
        raise BadValue(
            "matrix_size",
            c.matrix_size,
            f"{size} or more for data_type=sparse: an element for each of {c.n_workers} workers",
        )

    def matrix(worker: int) -> Tensor:
        flat = torch.zeros(elements, dtype=torch.float32)
        flat[worker] = 1
        return flat.view(c.matrix_size, c.matrix_size)

    return matrix


def _faces(c: Settings) -> Matrices:
    """The Olivetti faces, 64 × 64, from scikit-learn: image i of the shuffled set for worker i."""
    from sklearn.datasets import fetch_olivetti_faces

    # Otherwise it is made, also where nothing can be fetched.
    ok = c.data_dir is None or Path(c.data_dir).is_dir()
    checks.check("data_dir", c.data_dir, ok, "an existing folder")
    try:
        found = fetch_olivetti_faces(
            data_home=c.data_dir,
            shuffle=True,
            random_state=np.random.RandomState(0),
            n_retries=1,
            delay=0.1,
        )
    except OSError as error:
        raise ValueError(
            f"data_type=faces: the Olivetti faces cannot be fetched ({error}); use data_dir=FOLDER "
            f"with scikit-learn's olivetti_py3.pkz, or data_type=lfw or random"
        ) from error
    return _images(c, found.images)


def _lfw(c: Settings) -> Matrices:
    """Image i of 200 photographs, 25 × 25, that are part of scikit-image, for worker i.

    The first 100 show faces (Labeled Faces in the Wild), the others do not.
    """
    try:
        from skimage.data import lfw_subset
    except ImportError as error:
        raise ValueError(
            "data_type=lfw: scikit-image is not installed; use pip install scikit-image, "
            "or another data_type"
        ) from error
    return _images(c, lfw_subset())


def _images(c: Settings, images: np.ndarray) -> Matrices:
    """images [image, row, column]. Raises ValueError for too few, or for another matrix_size."""
    count, size, _ = images.shape
    if c.n_workers > count:
        raise BadValue(
            "n_workers", c.n_workers, f"{count} or less: data_type={c.data_type} has {count} images"
        )
    if c.matrix_size not in (size, Config.matrix_size):  # the default counts as not given
        raise BadValue(
            "matrix_size",
            c.matrix_size,
            f"{size}, the size of the images of data_type={c.data_type}, or the default",
        )
    return lambda worker: torch.from_numpy(images[worker]).float()


DATA: dict[str, Callable[[Settings], Matrices]] = {
    **dict.fromkeys(DRAWN, _drawn),
    "offset": _offset,
    "sparse": _sparse,
    "log-normal": _log_normal,
    "faces": _faces,
    "lfw": _lfw,
}
