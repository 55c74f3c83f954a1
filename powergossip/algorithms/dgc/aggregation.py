"""Deep Gradient Compression as an aggregation.

Axes: worker (hosted here). Each worker has D elements. A position is an index 0 … D − 1.
"""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.algorithms.averaging import Aggregation
from powergossip.algorithms.dgc.clipping import Clipping
from powergossip.algorithms.dgc.config import DGCConfig
from powergossip.algorithms.dgc.selection import Selector
from powergossip.network import Conversation, Gather, Mean, Network
from powergossip.parameters import Layout, put_in, take_out


def _half(values: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """The nearest 16-bit numbers, so that a sum of so many is finite. Infinite ones remain."""
    largest = torch.finfo(dtype).max / (1 if terms == 1 else 2 * terms)
    finite = values.clamp(-largest, largest)
    return torch.where(values.isinf(), values, finite).to(dtype)


class DGCAggregation(Aggregation):
    """The mean of the workers' sparse gradients.

    Worker i accumulates the elements that it has not sent in v_i, with momentum u_i::

        g ← g · min(1, √n clip / ‖g‖)                         local clipping, see `Clipping`
        u ← m u + g,    v ← v + u                             momentum correction
        u ← m (u + g),  v ← v + u + g                         with Nesterov's momentum, instead
        send v where it is largest,  v ← 0, u ← 0 there       momentum masking
        mean ← 1/n Σ_i of the sent elements

    Lin et al. (2018), arXiv:1712.01887, Algorithms 1 and 2 and § 3. `Selector` selects from each
    tensor of two or more dimensions. Other tensors, and all tensors at a fraction of 1, are sent
    whole and keep their momentum, so that a fraction of 1 is SGD with momentum. Rounding errors of
    16-bit values stay in v. The mean of whole tensors is then computed in 16 bits, too.

    Cost on the wire: an all-reduce of the whole tensors and, concurrently, one all-gather of the
    selected values and their positions.

    Raises:
        ValueError: For more elements than 32-bit positions can address.
    """

    owns_momentum = clips = True
    saved: ClassVar[dict[str, str]] = {
        "steps": "_steps",
        "share": "_fraction",
        "momentum": "_momentum",
        "kept": "_kept",
    }

    def __init__(self, network: Network, layout: Layout, config: DGCConfig):
        if config.int32_indices and layout.size > torch.iinfo(torch.int32).max:
            raise ValueError(f"int32_indices=True: use False for {layout.size} elements")
        self._network, self._layout, self._config = network, layout, config
        self.momentum, self.nesterov = config.momentum, config.nesterov
        workers, device = network.rows, network.device
        where: Any = {"dtype": network.dtype, "device": device}
        self._momentum = torch.zeros(workers, layout.size, **where)  # u
        self._kept = torch.zeros(workers, layout.size, **where)  # v
        self._steps = 0
        matrices = [i for i, shape in enumerate(layout.shapes) if len(shape) >= 2]
        vectors = [i for i, shape in enumerate(layout.shapes) if len(shape) < 2]
        self._spans = layout.spans(vectors)
        # (first position, size), in the order of memory.
        self._tensors = sorted((layout.starts[i], prod(layout.shapes[i])) for i in matrices)
        self._clipping = Clipping(network, layout, config.clip, config.clip_by)
        self._index = torch.int32 if config.int32_indices else torch.int64
        self._value = torch.float16 if config.fp16_values else network.dtype
        size = sum(span.stop - span.start for span in self._spans)
        self._whole = Mean(torch.zeros(workers, size, dtype=self._value, device=device))
        self._everything: Mean | None = None  # at a fraction of 1
        self._chosen = Gather([])
        self._fraction = 0.0
        self.at_epoch(0)

    def at_epoch(self, epoch: float) -> None:
        """Set the fraction that is sent, which follows the warm-up."""
        self._set_fraction(self._config.fraction(epoch))

    def _set_fraction(self, fraction: float) -> None:
        if fraction == self._fraction:
            return
        self._fraction = float(fraction)
        self._selectors = [Selector(size, fraction, self._config) for _, size in self._tensors]

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's messages, at the current fraction."""
        size = self._layout.size
        if self._fraction == 1:
            return self._kept.itemsize / self._value.itemsize
        chosen = self._words(sum(selector.target for selector in self._selectors))
        whole = self._whole.tensor.shape[1]
        whole_size = self._kept.itemsize * size
        return whole_size / (chosen * self._index.itemsize + whole * self._value.itemsize)

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Accumulate gradient [worker, D] and clear it. Fill mean [worker, D]."""
        yield from self._clipping.step(gradient)
        self._accumulate(gradient)
        self._steps += 1
        if self._fraction == 1:
            everything = [slice(0, self._layout.size)]
            if self._everything is None:
                self._everything = Mean(torch.empty_like(self._kept, dtype=self._value))
            self._take_out(everything, self._everything.tensor)
            put_in((yield self._everything), everything, mean)
            return
        self._everything = None
        messages: list[Mean | Gather] = []
        if self._spans:
            self._take_out(self._spans, self._whole.tensor)
            messages.append(self._whole)
        if self._tensors:
            self._chosen.pieces = [self._select(row) for row in range(len(gradient))]
            messages.append(self._chosen)
        received = iter((yield tuple(messages)))
        mean.zero_()
        if self._spans:
            put_in(next(received), self._spans, mean)
        if self._tensors:
            self._add_received(next(received), mean)

    def _accumulate(self, gradient: Tensor) -> None:
        """Update u and v with the clipped gradient, and clear it."""
        config, u, v = self._config, self._momentum, self._kept
        if config.momentum == 0:
            v.add_(gradient)
        elif config.nesterov:
            u.add_(gradient).mul_(config.momentum)
            v.add_(u).add_(gradient)
        else:
            u.mul_(config.momentum).add_(gradient)
            v.add_(u)
        gradient.zero_()

    def _take_out(self, spans: Sequence[slice], packed: Tensor) -> None:
        """Move the elements of v in these spans to a message, but for rounding errors."""
        if packed.dtype == self._kept.dtype:
            take_out(self._kept, spans, packed)
            return
        start = 0
        for span in spans:
            values = self._kept[:, span]
            sent = _half(values, self._value, self._network.n_workers)
            packed[:, start : start + sent.shape[1]] = sent
            values.sub_(sent)
            start += sent.shape[1]

    def _select(self, row: int) -> Tensor:
        """A worker's message: selected positions, then their values, in words of a position's size.

        The values leave v, but for rounding errors, and their momentum is cleared.
        """
        config, kept = self._config, self._kept[row]
        worker = self._network.workers[row]
        random = randomness.generator(config.seed, "dgc", self._steps, worker)
        parts = []
        for (first, size), selector in zip(self._tensors, self._selectors, strict=True):
            values, sample = kept[first : first + size], selector.sample(random)
            parts.append(selector.positions(values, sample).add_(first))
        positions = torch.cat(parts)
        values = kept[positions]
        sent = values if self._value == values.dtype else _half(values, self._value)
        kept[positions] = values - sent
        if config.momentum_masking and config.momentum:
            self._momentum[row].index_fill_(0, positions, 0)
        count = len(positions)
        packed = positions.new_zeros(self._words(count) - count, dtype=self._index)
        packed.view(self._value)[:count] = sent
        return torch.cat([positions.to(self._index), packed])

    def _words(self, count: int) -> int:
        """Words of a message with `count` positions and values."""
        return count + ceil(count * self._value.itemsize / self._index.itemsize)

    def _add_received(self, pieces: Sequence[Tensor], mean: Tensor) -> None:
        """mean += 1/n Σ_i, in the same order in all processes, so that the result is the same."""
        for words in pieces:
            size = self._index.itemsize
            count = len(words) * size // (size + self._value.itemsize)
            values = words[count:].clone().view(self._value)[:count]  # aligned
            values = values.to(mean.dtype).div_(len(pieces))
            mean[0].index_add_(0, words[:count], values)
        for first, size in self._tensors if len(mean) > 1 else ():
            mean[1:, first : first + size] = mean[0, first : first + size]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        self._set_fraction(state["share"])
        super().load_state_dict(state)
