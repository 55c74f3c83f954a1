"""Values derived from tensors, kept as long as the tensors live."""

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class TensorCache(Generic[V]):
    """Values derived from the memory of tensors: views of it, or message transports.

    A value is kept for an *owner*, the tensor that is not a view of another one, and the geometry
    of a view: address, shape and strides. (A view of another dtype is another owner, as PyTorch
    does not record its base.) The expression `x[:, :100]` therefore finds the same value every
    time, although it creates a new tensor object. The value is released when the owner and all its
    views are gone.

    Reuse of an address is safe. A value holds the memory that it refers to, so that no other tensor
    can get it as long as the value is kept, and a hit requires the very same owner object. Hence
    hits and misses depend on the program alone, not on when garbage is collected, and are the same
    in all processes.
    """

    def __init__(self) -> None:
        # By id of the owner: a weak reference to it, and its values by geometry and key.
        self._owners: dict[int, tuple[weakref.ref[Tensor], dict[Hashable, V]]] = {}

    def get(self, tensor: Tensor, make: Callable[[Tensor], V], *key: Hashable) -> V:
        """Return make(tensor), computed at the first call for this memory and key.

        `make` receives a detached alias of the tensor: values that keep views of it do not keep
        the owner alive.
        """
        owner = tensor if tensor._base is None else tensor._base
        known = self._owners.get(id(owner))
        if known is None or known[0]() is not owner:
            known = self._owners[id(owner)] = self._reference(owner), {}
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), *key)
        values = known[1]
        if place not in values:
            values[place] = make(tensor.detach())
        return values[place]

    def _reference(self, owner: Tensor) -> "weakref.ref[Tensor]":
        """A weak reference that removes the owner's values when the owner is gone."""
        cache, number = weakref.ref(self), id(owner)

        def forget(reference: "weakref.ref[Tensor]") -> None:
            found = cache()
            if found is not None and found._owners.get(number, (None,))[0] is reference:
                del found._owners[number]

        return weakref.ref(owner, forget)
