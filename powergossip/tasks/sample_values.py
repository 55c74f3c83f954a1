"""Values for each sample of a data set, such as labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset


def sample_attribute(data: Any, name: str) -> Any:
    """An attribute of a data set with a value for each sample, also through torch's Subset."""
    if type(data) is TensorDataset and name == "targets":
        return data.tensors[-1]
    if isinstance(data, Subset):
        values = as_list(sample_attribute(data.dataset, name))
        return None if values is None else [values[i] for i in data.indices]
    return getattr(data, name, None)


def as_list(values: Any) -> list[Any] | None:
    """The values of an array, a tensor, a Series or a sequence. None for anything else."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, Sequence) and not isinstance(values, str) else None


def integers(values: Any, size: int) -> Tensor | None:
    """int64 [size] of these values. None if they are not so many integers."""
    if isinstance(values, Sequence) and values and isinstance(values[0], Tensor):
        values = [value.item() if value.ndim == 0 else value for value in values]
    try:
        array = np.asarray(values.cpu() if isinstance(values, Tensor) else as_list(values))
    except ValueError:  # rows of different lengths
        return None
    if array.shape != (size,) or array.dtype.kind not in "biu":
        return None
    return torch.from_numpy(array.astype(np.int64))
