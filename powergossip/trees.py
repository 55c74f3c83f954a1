"""Trees of tensors, such as a `state_dict`: dicts and lists with tensors among the leaves."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Tree = Any  # dict[str, Tree] | list[Tree] | Tensor | int | float | str | None


def map_tensors(change: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return a tree with change(tensor) in place of each tensor. Other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [map_tensors(change, value) for value in tree]
    return tree
