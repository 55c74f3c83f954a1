"""Messages in the precision of the parameters, for models in bfloat16 or float16."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from powergossip import checks
from powergossip.network import Conversation, Gather, Message
from powergossip.network.conversation import mapped
from powergossip.network.rows import Rows
from powergossip.tensor_cache import TensorCache

MESSAGE_DTYPES = ("float32", "parameter")
HALF = (torch.bfloat16, torch.float16)


def working_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """float64 if one of the tensors has it, otherwise float32, for half precision too."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def message_dtype_of(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of messages about parameters of a dtype, or None if no message needs rounding.

    Args:
        name: "float32", or "parameter" for the dtype of the parameters.

    Raises:
        BadValue: For another name.
    """
    checks.one_of("message_dtype", name, MESSAGE_DTYPES)
    return dtype if name == "parameter" and dtype in HALF else None


class Rounding:
    """Conversations whose float32 messages are sent in another precision.

    A tensor that is sent is first rounded in place, so that the sender computes with the values
    that the receivers have, as algorithms with two equal ends require. Messages of bytes (packed
    or encoded values) and gathered pieces stay as they are.

    Args:
        dtype: Dtype of the messages.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._narrow, self._wide = TensorCache[Tensor](), TensorCache[Tensor]()

    def __call__(self, conversation: Conversation) -> Conversation:
        """The conversation with rounded messages."""
        return mapped(
            conversation,
            lambda messages, answers: tuple(map(self._widened, messages, answers)),
            lambda messages: tuple(map(self._rounded, messages)),
        )

    def _rounded(self, message: Message) -> Message:
        if isinstance(message, Gather) or message.tensor.dtype != torch.float32:
            return message
        # Persistent memory, to which the requests of a message belong.
        narrow = self._narrow.get(message.tensor, self._empty)
        narrow.copy_(message.tensor)
        message.tensor.copy_(narrow)
        return type(message)(narrow)

    def _widened(self, message: Message, received: Any) -> Any:
        if isinstance(message, Gather) or message.tensor.dtype != torch.float32:
            return received
        if isinstance(received, Rows):
            return Rows(message.tensor, self._float(received.others), received.row)
        return self._float(received)

    def _float(self, received: Tensor) -> Tensor:
        return self._wide.get(received, torch.Tensor.float).copy_(received)

    def _empty(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
