"""A GPU without one: tensors on the device cuda, with shapes and dtypes but without values.

torch's FakeTensorMode raises where tensors of two devices meet, and where the value of a tensor on
the device is needed: a program waits for a GPU there. On a build without CUDA, some operations
would initialize it. They are replaced here by others with the same result, apart from `backward`,
which computes nothing, and gradients, which are 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda")


class Waits(Exception):
    """The value of a tensor on the device is needed."""


@contextmanager
def fake_device(ones: bool = False) -> Iterator[None]:
    """A block in which tensors are fake, and may be on the device cuda.

    Args:
        ones: Whether all values are 1 where they are needed, instead of `Waits`.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        _WithoutCUDA(mode, ones) as without,
        patch.object(nn.Module, "to", lambda *given: without.move(*given)),
        torch.no_grad(),
    ):
        yield


class _WithoutCUDA(TorchFunctionMode):
    def __init__(self, mode: FakeTensorMode, ones: bool):
        self._mode, self._ones = mode, ones
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {
            Tensor.__getitem__: self._item,
            Tensor.__setitem__: self._set_item,
            Tensor.to: self._to,
            Tensor.copy_: self._copy,
            Tensor.cpu: lambda tensor: self._to(tensor, torch.device("cpu")),
            Tensor.backward: lambda loss, **options: None,
            Tensor.is_pinned: lambda tensor: False,
            Tensor.pin_memory: self._fake,
            Tensor.contiguous: torch.ops.aten.contiguous.default,
            torch.autograd.grad: lambda of, inputs, **options: list(map(torch.zeros_like, inputs)),
            torch._fused_sgd_: lambda *given, **options: None,
        }
        for name in ("__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"):
            self._replaced[getattr(Tensor, name)] = self._value(getattr(Tensor, name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = self._replaced.get(func)
        return (replaced or func)(*args, **(kwargs or {}))

    def _value(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def value(tensor: Tensor) -> Any:
            if self._ones and isinstance(tensor, FakeTensor):
                return getattr(np.ones(tensor.shape), method.__name__.replace("numpy", "copy"))()
            if tensor.device.type == "cuda":
                raise Waits(method.__name__)
            return method(tensor)

        return value

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _to(self, tensor: Tensor, *given: Any, **options: Any) -> Tensor:
        for value in given:
            if isinstance(value, torch.device | str):
                options["device"] = torch.device(value)
            elif isinstance(value, torch.dtype):
                options["dtype"] = value
            elif isinstance(value, Tensor):
                options |= {"device": value.device, "dtype": value.dtype}
        tensor, copy = self._fake(tensor), options.get("copy", False)
        device = options.get("device", tensor.device)
        from_device = (tensor.device.type, device.type) == ("cuda", "cpu")
        if from_device and not options.get("non_blocking") and not self._ones:
            raise Waits("to")
        if device.type == tensor.device.type:
            found = tensor.type(options.get("dtype", tensor.dtype))
            return found.clone() if copy and found is tensor else found
        dtype = options.get("dtype", tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)

    def _copy(self, tensor: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        if other.device.type != tensor.device.type:
            other = self._to(other, tensor.device)
        return torch.ops.aten.copy_(tensor, self._fake(other))

    def move(self, module: nn.Module, *given: Any) -> nn.Module:
        """`nn.Module.to`, with new parameters."""
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                moved = self._to(parameter.detach(), *given)
                setattr(part, name, nn.Parameter(moved, parameter.requires_grad))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, self._to(buffer, *given))
        return module

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        found = self._item(tensor, index, into=value)
        if found is not None:
            if isinstance(value, Tensor):
                self._copy(found, value.expand(found.shape))
            else:
                found.fill_(value)

    def _item(self, tensor: Tensor, index: Any, into: Any = None) -> Any:
        """tensor[index]. With `into` and indices that are tensors, sets them and returns None."""
        parts = list(index) if isinstance(index, tuple) else [index]
        taken = sum(
            p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1
            for p in parts
            if p is not None and p is not Ellipsis
        )
        if not any(p is Ellipsis for p in parts):
            parts.append(Ellipsis)
        place = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (tensor.dim() - taken)
        found, axis = tensor, 0
        indices: list[Tensor | None] = []
        for part in parts:
            if part is None:
                found = found.unsqueeze(axis)
            elif isinstance(part, slice):
                start, stop, step = part.indices(found.shape[axis])
                found = torch.ops.aten.slice.Tensor(found, axis, start, max(start, stop), step)
            elif isinstance(part, Tensor) or not isinstance(part, int):
                part = torch.as_tensor(part, device=found.device)
                indices += [None] * (axis - len(indices)) + [part]
                axis += part.dim() - 1 if part.dtype == torch.bool else 0
            else:
                found = found.select(axis, part)
                axis -= 1
            axis += 1
        if not indices:
            return found
        if into is None:
            return torch.ops.aten.index.Tensor(found, indices)
        value = into if isinstance(into, Tensor) else torch.full((), into, device=found.device)
        torch.ops.aten.index_put_(found, indices, value.to(found.dtype))
        return None
