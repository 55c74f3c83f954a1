"""Messages of large tensors, which are decoded one sender at a time, in less memory."""

import pytest
import torch
from torch import Tensor

from powergossip import compressors
from powergossip.compressors import Codec, codec
from powergossip.parameters import Layout


@pytest.mark.parametrize("name", compressors.COMPRESSORS)
def test_large_messages_decode_as_small_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([(6, 5), (6, 5), (7, 3), (4,)])
    x = torch.randn(3, layout.size, generator=torch.Generator().manual_seed(0))
    neighbors = torch.tensor([[1, 2], [0, 2], [0, 1]])

    def decoded(limit: int) -> Tensor:
        monkeypatch.setattr(codec, "AT_ONCE", limit)
        own = Codec(layout, compressors.COMPRESSORS[name](), range(3))
        message = own.encode(x, 5).clone()
        return own.decode(message[neighbors], neighbors, 5).clone()

    small = decoded(10**6)
    assert small.any()
    assert torch.equal(decoded(0), small)
