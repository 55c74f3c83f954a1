"""Deep Gradient Compression: all workers apply one mean gradient. Each worker sends its entries of
largest magnitude, and accumulates the others locally with momentum correction.

`optimizers.DGC` puts it into your own training loop.

Axes: worker (hosted here). Each worker has D elements. A position is an index 0 … D − 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, gcd, isfinite, prod, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from powergossip import checks, randomness
from powergossip.algorithms.averaging import Aggregation
from powergossip.network import Conversation, Gather, Mean, Network
from powergossip.parameters import Layout, put_in, take_out

_LEAST_IN_SAMPLE = 16  # elements above the threshold in a sample, for a reliable threshold
_BLOCK = 32  # elements that are compared with the threshold through their maximum
_BLOCKS_AT_ONCE = 2**14  # 2 MiB of elements, which the second pass finds in the CPU's cache


@dataclass(frozen=True)
class DGCConfig:
    """Options, with the names and defaults of the published code, where it has them.

    Args:
        compress_ratio: Fraction of each tensor's elements that is sent after the warm-up. A ratio r
            above 1 stands for the fraction 1/r.
        sample_ratio: Fraction of a tensor that is sampled for the threshold, at least.
        compress_upper_bound: Where more elements than this times the target exceed the threshold,
            the largest are sent. Otherwise the first in memory; 1: the largest always.
        compress_lower_bound: While fewer elements than this times the target exceed the threshold,
            it is multiplied by this.
        max_adaptation_iters: Corrections of the threshold, at most. See `Selector`.
        momentum: Momentum, as in torch.optim.SGD.
        nesterov: Nesterov's momentum.
        momentum_masking: Clear the momentum of sent elements.
        clip: Number c: each worker's gradient has a norm of √n · c at most, for n workers.
        warmup_epochs: Epochs before compress_ratio applies.
        warmup_coeff: Fraction in each of these epochs. By default it falls evenly, see `fraction`.
        fp16_values: Send values with 16 bits. Otherwise in the precision of the gradient.
        int32_indices: Send positions with 32 bits. Otherwise with 64.
        seed: Seed of the samples.

    Raises:
        ValueError: For a value out of range.
    """

    compress_ratio: float = 0.001
    sample_ratio: float = 0.01
    compress_upper_bound: float = 1.3
    compress_lower_bound: float = 0.8
    max_adaptation_iters: int = 10
    momentum: float = 0.9
    nesterov: bool = False
    momentum_masking: bool = True
    clip: float | None = None
    warmup_epochs: int = 0
    warmup_coeff: Sequence[float] | None = None
    fp16_values: bool = False
    int32_indices: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, accepted: str) -> None:
            checks.check(name, getattr(self, name), ok, accepted)

        checks.positive("compress_ratio", self.compress_ratio)
        require("sample_ratio", 0.01 <= self.sample_ratio <= 1, "a fraction from 0.01 to 1")
        lower, upper = self.compress_lower_bound, self.compress_upper_bound
        require("compress_lower_bound", 0 < lower < 1, "a fraction above 0, below 1")
        require("compress_upper_bound", upper >= 1, "1 or more")
        require("momentum", 0 <= self.momentum < 1, "0 or more, below 1")
        clips = self.clip is None or (isfinite(self.clip) and self.clip > 0)
        require("clip", clips, "a number above 0, or None")
        for name, least in (("max_adaptation_iters", 0), ("warmup_epochs", -1), ("seed", 0)):
            value = getattr(self, name)
            ok = isinstance(checks.plain(value), int) and value >= least
            require(name, ok, f"an integer, {least} or more")
        if self.warmup_coeff is not None:
            listed: Any = self.warmup_coeff
            ok = isinstance(listed, Sequence) and len(listed) == self.warmup_epochs > 0
            accepted = f"a list with one fraction for each of warmup_epochs={self.warmup_epochs}"
            require("warmup_coeff", ok, accepted)
            ok = all(checks.is_finite(ratio) and 0 < ratio <= 1 for ratio in listed)
            require("warmup_coeff", ok, "fractions above 0, at most 1")

    def fraction(self, epoch: float) -> float:
        """Return the fraction of elements sent in epoch e = ⌊epoch⌋.

        After the warm-up of W epochs, and without one, it is r = compress_ratio. Before, it is::

            warmup_coeff[e]
            r^((e + 1) / (W + 1))             if it is None

        With r = 0.001 and W = 4 the last is 0.251, 0.063, 0.016, 0.004, the paper's schedule
        (Lin et al. 2018, § 3.3).

        Raises ValueError for a negative epoch.
        """
        if not (isfinite(epoch) and epoch >= 0):
            raise ValueError(f"epoch={epoch}: use 0 or more")
        ratio, begun = self.compress_ratio, floor(epoch)
        final = ratio if ratio <= 1 else 1 / ratio
        if begun >= self.warmup_epochs:
            return final
        if self.warmup_coeff is None:
            return final ** ((begun + 1) / (self.warmup_epochs + 1))
        return self.warmup_coeff[begun]


class Selector:
    """Selection of about fraction · size elements of largest magnitude, without sorting::

        t ← the m-th largest magnitude of a sample
        up to max_adaptation_iters times, while k elements exceed t:
            k > upper · target     return the `target` largest of them
            k < lower · target     t ← lower · t
        return the first `target` of those that exceed t, in the order of memory

    upper = compress_upper_bound, lower = compress_lower_bound. Lin et al. (2018), arXiv:1712.01887,
    § 5 (hierarchical selection), in the form of the published code. With upper = 1 the
    result equals the result of sorting, or has at least lower · target of its elements. The
    threshold then aims slightly low, because cutting a surplus exactly is cheap, and lowering it is
    not.

    Departures: all elements are sorted if the sample would be as large as the tensor, and if
    max_adaptation_iters leave fewer than lower · target elements. So there are fewer only if all
    others are 0. The sample is larger, 16 / fraction instead of 2 / fraction at least, and its
    stride has no common factor with the size. A worker with infinite elements or NaN sends them
    first, so that divergence stays visible.

    Attributes:
        target: Number of elements to select, ⌈fraction · size⌉.
        stride: Stride of the sample, 1 for no sampling.
    """

    def __init__(self, size: int, fraction: float, config: DGCConfig):
        self.size, self.target = size, ceil(fraction * size)
        self._config = config
        self._most = config.compress_upper_bound * self.target
        self._least = config.compress_lower_bound * self.target
        sample = max(config.sample_ratio * size, _LEAST_IN_SAMPLE * size / self.target)
        # Coprime to the size: another stride could sample a few columns only.
        self.stride = max(1, floor(size / sample))
        while gcd(self.stride, size) > 1:
            self.stride -= 1
        # Maxima of blocks pay only where most blocks have no element above the threshold.
        self._block = _BLOCK if self.target * _BLOCK < size / 2 else 1

    def sample(self, random: np.random.Generator) -> slice:
        """Draw the positions of a sample, at equal distances."""
        if self.stride == 1:
            return slice(None)
        return slice(int(random.integers(self.stride)), None, self.stride)

    def positions(self, values: Tensor, sample: slice) -> Tensor:
        """Select positions in values [size]: int64 [≤ target]."""
        config = self._config
        if self.stride == 1:
            return self._largest(values)
        threshold = self._threshold(values[sample].abs())
        # All comparisons here select NaN, so that divergence stays visible.
        for iteration in range(config.max_adaptation_iters + 1):
            found = self._above(values, threshold)
            if len(found) > self._most:
                return found[self._largest(values[found])]
            enough = len(found) >= self._least
            if enough or threshold == 0 or iteration == config.max_adaptation_iters:
                break
            threshold *= config.compress_lower_bound
        if len(found) < self._least and (threshold != 0 or not len(found)):
            return self._largest(values)
        if len(found) > self.target and not values[found].isfinite().all():
            return found[self._largest(values[found])]
        return found[: self.target]

    def _threshold(self, sample: Tensor) -> float:
        expected = self.target * len(sample) / self.size
        if self._config.compress_upper_bound == 1:
            expected += 2 * sqrt(expected)
        rank = min(len(sample), ceil(expected))
        return float(torch.topk(sample, rank, sorted=False).values.min())

    def _largest(self, values: Tensor) -> Tensor:
        return torch.topk(values.abs(), self.target, sorted=False).indices

    def _above(self, values: Tensor, threshold: float) -> Tensor:
        """Positions of elements with magnitude > threshold, or NaN: int64."""
        if self._block == 1:
            return _above(values.abs(), threshold)
        rows = self.size // self._block
        blocks = values[: rows * self._block].view(rows, self._block)
        largest, least = values.new_empty(rows), values.new_empty(rows)
        for first in range(0, rows, _BLOCKS_AT_ONCE):
            some = slice(first, first + _BLOCKS_AT_ONCE)
            torch.amax(blocks[some], 1, out=largest[some])
            torch.amin(blocks[some], 1, out=least[some])
        chosen = _above(torch.maximum(largest, least.neg_()), threshold)
        inside = _above(blocks.index_select(0, chosen).abs_().view(-1), threshold)
        positions = chosen[inside // self._block].mul_(self._block).add_(inside % self._block)
        if rows * self._block == self.size:
            return positions
        rest = _above(values[rows * self._block :].abs(), threshold)
        return torch.cat([positions, rest.add_(rows * self._block)])


def _above(values: Tensor, threshold: float) -> Tensor:
    return (values <= threshold).logical_not_().nonzero().view(-1)


def _half(values: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """The nearest 16-bit numbers, so that a sum of so many is finite. Infinite ones remain."""
    largest = torch.finfo(dtype).max / (1 if terms == 1 else 2 * terms)
    finite = values.clamp(-largest, largest)
    return torch.where(values.isinf(), values, finite).to(dtype)


class DGCAggregation(Aggregation):
    """The mean of the workers' sparse gradients.

    Worker i accumulates the elements that it has not sent in v_i, with momentum u_i::

        g ← g · min(1, √n clip / ‖g‖)                         local clipping
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
        if self._config.clip is not None:
            limit = self._config.clip * sqrt(self._network.n_workers)
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((limit / (norms + 1e-6)).clamp_(max=1))
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
