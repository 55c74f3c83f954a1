"""Values as bytes: JSON, with arrays and tensors behind it. Nothing that arrives is executed."""

import json
import struct
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")  # bytes of the JSON text
_DTYPES = {
    str(np.dtype(kind)): np.dtype(kind)
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "dict": dict}


class BadMessage(ValueError):
    """Bytes that are no value of this module."""


def encoded(value: Any) -> bytes:
    """A value of None, numbers, texts, lists, tuples, sets, dictionaries, arrays and tensors."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_marked(value, arrays)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)))


def decoded(octets: bytes) -> Any:
    """The value of these bytes. Raises BadMessage."""
    rest = memoryview(octets)

    def array(dtype: str, *shape: int) -> np.ndarray:
        nonlocal rest
        kind = _DTYPES[dtype]
        if len(shape) > 32 or any(type(axis) is not int or axis < 0 for axis in shape):
            raise BadMessage("a shape is wrong")
        length = prod(shape) * kind.itemsize
        taken, rest = rest[:length], rest[length:]
        return np.frombuffer(taken, dtype=kind).reshape(shape).copy()

    def unmarked(tree: dict[str, Any]) -> Any:
        """A container or an array. The arrays follow each other in the order of their texts."""
        ((kind, content),) = tree.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](content)
        if kind == "range":
            return range(*content)
        if kind == "array":
            return array(*content)
        if kind not in ("tensor", "bfloat16"):
            raise BadMessage(f"{kind!r} is no type")
        tensor = torch.from_numpy(array(*content))
        return tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor

    try:
        (length,) = _LENGTH.unpack_from(octets)
        text, rest = octets[_LENGTH.size :][:length], rest[_LENGTH.size + length :]
        value = json.loads(text, object_hook=unmarked)
        if len(text) != length or rest:
            raise BadMessage("the length is wrong")
        return value
    except (
        ValueError,
        TypeError,
        LookupError,
        RuntimeError,
        ArithmeticError,
        struct.error,
    ) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from None


def _marked(value: Any, arrays: list[np.ndarray]) -> Any:
    """A tree for JSON, in which containers are {name of the type: content}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | set):
        return {type(value).__name__: [_marked(entry, arrays) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[_marked(k, arrays), _marked(v, arrays)] for k, v in value.items()]}
    kind = "array"
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Tensor):
        kind, value = "tensor", value.detach().cpu()
        if value.dtype == torch.bfloat16:
            kind, value = "bfloat16", value.view(torch.int16)
        value = value.numpy()
    if isinstance(value, np.ndarray) and str(value.dtype) in _DTYPES:
        arrays.append(value)
        return {kind: [str(value.dtype), *value.shape]}
    raise TypeError(f"a {type(value).__name__} is not sent to other machines")
