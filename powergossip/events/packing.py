"""Messages between the workers of different processes, as bytes."""

import numpy as np
import torch
from torch import Tensor

from powergossip.events.members import View
from powergossip.events.worker import Message

_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8]
_DTYPES += [torch.int16, torch.int32, torch.int64]


def bits_of_view(view: View) -> int:
    """The bits of a view in a message: one for each worker, eight after resuming with new ones."""
    return 8 * len(_view_bytes(view)) - 8


def packed(message: Message, with_view: bool) -> Tensor:
    """A message as uint8: dtype, incarnation, the view if it is sent, and the part."""
    assert message.part is not None
    part = message.part.detach().cpu().contiguous()
    view = _view_bytes(message.view) if with_view else b""
    header = bytes([_DTYPES.index(part.dtype)]) + message.incarnation.to_bytes(2, "little") + view
    return torch.cat(
        [torch.frombuffer(bytearray(header), dtype=torch.uint8), part.view(-1).view(torch.uint8)]
    )


def unpacked(k: int, payload: Tensor, like: Tensor, known: View, with_view: bool) -> Message:
    """The message of `packed`, on the device of `like`. known: the view of messages without one."""
    data = payload.numpy()
    dtype, incarnation = _DTYPES[data[0]], int(data[1]) + 256 * int(data[2])
    start, view = 3, known
    if with_view:
        view, start = _view_of(data[3:], len(known))
        start += 3
        if len(view) != len(known):
            raise ValueError("the view is too short")
    part = payload[start:].clone().view(dtype)  # aligned
    return Message(k, incarnation, view, part.to(like.device))


def _view_bytes(view: View) -> bytes:
    """A byte for the form, and a bit or a byte for each worker."""
    values = np.array(view, dtype=np.uint8)
    if values.max() > 1:
        return b"\1" + values.tobytes()
    return b"\0" + np.packbits(values).tobytes()


def _view_of(data: np.ndarray, n: int) -> tuple[View, int]:
    """The view of `_view_bytes`, and its length in bytes."""
    if data[0]:
        return tuple(data[1 : n + 1].tolist()), n + 1
    length = (n + 7) // 8
    return tuple(np.unpackbits(data[1 : length + 1])[:n].tolist()), length + 1
