"""Messages of large tensors, which are made tensor by tensor and decoded one sender at a time.

That takes less memory, and small ones take fewer operations for all tensors together.
"""

import pytest
import torch
from torch import Tensor

from powergossip import compressors
from powergossip.compressors import Codec, codec, sparse
from powergossip.parameters import Layout


@pytest.mark.parametrize("name", compressors.COMPRESSORS)
def test_large_messages_are_those_of_small_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout([(6, 5), (6, 5), (7, 3), (4,), (40, 30), (40, 30), (300, 230)])
    x = torch.randn(3, layout.size, generator=torch.Generator().manual_seed(0))
    neighbors = torch.tensor([[1, 2], [0, 2], [0, 1]])

    def decoded(limit: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(codec, "AT_ONCE", limit)
        own = Codec(layout, compressors.COMPRESSORS[name](), range(3))
        message = own.encode(x, 5, minus=x.flip(0)).clone()
        return message, own.decode(message[neighbors], neighbors, 5).clone()

    (sent, small), (sent_large, large) = decoded(10**7), decoded(0)
    assert small.any()
    assert torch.equal(sent_large, sent)
    assert torch.equal(large, small)


@pytest.mark.parametrize("draws", [0, 1])
def test_positions_of_all_tensors_with_few_draws(
    draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tensor has too few distinct draws, or needs a random number for every position."""
    layout = Layout([(40, 30), (40, 30), (5, 5)])
    x = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0))

    def decoded(limit: int) -> Tensor:
        monkeypatch.setattr(codec, "AT_ONCE", limit)
        own = Codec(layout, compressors.RandomK(0.1), range(2))
        return own.decode(own.encode(x, 5), own.workers, 5).clone()

    limited = (lambda count, n: count + 3) if draws else (lambda count, n: None)
    monkeypatch.setattr(sparse, "number_of_draws", limited)
    found = decoded(10**7)
    assert torch.equal(found, decoded(0))
    assert (found != 0).sum() == 2 * (2 * 120 + 2)
