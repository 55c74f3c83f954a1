"""Trees of tensors, such as a `state_dict`: dicts and lists with tensors among the leaves, and the
objects with such a state."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

Tree = Any  # dict[str, Tree] | list[Tree] | Tensor | int | float | str | None


class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on. Tensors are [worker, ...]."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        ...


def map_tensors(change: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Return a tree with change(tensor, *tensors of the others) in place of each tensor. Other
    leaves come from the first tree.
    """
    if isinstance(tree, Tensor):
        return change(tree, *others)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, tree[key], *(o[key] for o in others)) for key in tree}
    if isinstance(tree, (list, tuple)):
        return [map_tensors(change, *trees) for trees in zip(tree, *others, strict=True)]
    return tree


def sha256(*tensors: Tensor) -> str:
    """A hash of the elements of tensors, in hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
