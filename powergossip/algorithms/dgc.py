"""Deep Gradient Compression: all workers apply one mean gradient. Each worker sends its entries of
largest magnitude, and accumulates the others locally with momentum correction.

`optimizers.DGC` puts it into a training loop of your own.

Axes: worker (hosted here). Each worker has D elements. A position is an index 0 … D − 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, gcd, isfinite, prod, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from powergossip import checks, randomness
from powergossip.network import Conversation, Gather, Mean, Network
from powergossip.parameters import Layout, put_in, take_out

_LEAST_SELECTED = 0.8  # fraction of the target below which the threshold is lowered
_LOWERING = 0.8  # factor by which it is lowered
_LEAST_IN_SAMPLE = 16  # elements above the threshold in a sample, for a reliable threshold
_BLOCK = 32  # elements that are compared with the threshold through their maximum
_BLOCKS_AT_ONCE = 2**14  # 2 MiB of elements, which the second pass finds in the CPU's cache


@dataclass(frozen=True)
class Config:
    """
    compress_ratio             fraction of each tensor's elements that is sent, after the warm-up
    sample_ratio               fraction of a tensor that is sampled for the threshold, at least
    max_adaptation_iterations  largest number of times that a threshold is lowered
    momentum, nesterov         as in torch.optim.SGD
    momentum_masking           clear the momentum of sent elements
    clip                       largest norm of a gradient, in units of the mean gradient
    warmup_epochs              epochs before compress_ratio applies
    warmup_ratios              fraction in each of these epochs, or None: see `share`
    fp16_values, int32_indices types of sent values and positions, else float32 and int64
    num_batches_per_step       calls of optimizer_step per step
    seed                       of the samples' offsets

    Raises ValueError for a value out of range.
    """

    compress_ratio: float = 0.001
    sample_ratio: float = 0.01
    max_adaptation_iterations: int = 10
    momentum: float = 0.9
    nesterov: bool = False
    momentum_masking: bool = True
    clip: float | None = None
    warmup_epochs: int = 0
    warmup_ratios: Sequence[float] | None = None
    fp16_values: bool = False
    int32_indices: bool = True
    num_batches_per_step: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, accepted: str) -> None:
            checks.check(name, getattr(self, name), ok, accepted)

        require("compress_ratio", 0 < self.compress_ratio <= 1, "a fraction above 0, at most 1")
        require("sample_ratio", 0.01 <= self.sample_ratio <= 1, "a fraction from 0.01 to 1")
        require("momentum", 0 <= self.momentum < 1, "0 or more, below 1")
        clip_is_norm = self.clip is None or (isfinite(self.clip) and self.clip > 0)
        require("clip", clip_is_norm, "a norm above 0, or None")
        for name, least in (
            ("max_adaptation_iterations", 0),
            ("warmup_epochs", 0),
            ("num_batches_per_step", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            ok = isinstance(value, int) and value >= least
            require(name, ok, f"an integer, {least} or more")
        if self.warmup_ratios is not None:
            enough = len(self.warmup_ratios) >= self.warmup_epochs
            require("warmup_ratios", enough, f"one for each of warmup_epochs={self.warmup_epochs}")
            in_range = all(0 < ratio <= 1 for ratio in self.warmup_ratios)
            require("warmup_ratios", in_range, "fractions above 0, at most 1")

    def share(self, epoch: float) -> float:
        """Return the fraction of elements sent in epoch e = ⌊epoch⌋.

        It is warmup_ratios[e] for e < warmup_epochs, or without that list
        compress_ratio^((e + 1) / (warmup_epochs + 1)). From then on it is compress_ratio. With
        0.001 and 4 epochs the warm-up is 0.251, 0.063, 0.016, 0.004, the paper's schedule (Lin et
        al. 2018, § 3.3).

        Raises ValueError for a negative epoch.
        """
        if not (isfinite(epoch) and epoch >= 0):
            raise ValueError(f"epoch={epoch}: use 0 or more")
        begun = floor(epoch)
        if begun >= self.warmup_epochs:
            return self.compress_ratio
        if self.warmup_ratios is not None:
            return self.warmup_ratios[begun]
        return self.compress_ratio ** ((begun + 1) / (self.warmup_epochs + 1))


class Selector:
    """Selection of the fraction · size elements of largest magnitude, without sorting.

        t ← the m-th largest of a sample, m slightly above the sample's part of the target
        while fewer than 0.8 · target elements exceed t: t ← 0.8 t
        the target largest of those that exceed t

    Lin et al. (2018), arXiv:1712.01887, § 5 (hierarchical selection). The threshold aims slightly
    low, because cutting a surplus exactly is cheap, and lowering the threshold is not. The result
    has `target` elements or, if there was no surplus, at least 0.8 · target. It has fewer only if
    all others are 0. All elements are sorted if the sample would be as large as the tensor, or if
    max_adaptation_iterations do not suffice.

    target  # round(fraction · size), at least 1
    stride  # of the sample, 1 for no sampling
    """

    def __init__(self, size: int, fraction: float, config: Config):
        self.size, self.target = size, max(1, round(fraction * size))
        self._iterations = config.max_adaptation_iterations
        sample = max(config.sample_ratio * size, _LEAST_IN_SAMPLE * size / self.target)
        # Coprime to the size: another stride could sample a few columns only.
        self.stride = max(1, floor(size / sample))
        while gcd(self.stride, size) > 1:
            self.stride -= 1
        # Maxima of blocks pay only where most blocks have no element above the threshold.
        self._block = _BLOCK if self.target * _BLOCK < size / 2 else 1

    def positions(self, values: Tensor, start: int) -> Tensor:
        """Select positions in values [size]: int64 [≤ target]. The sample begins at `start`, which
        is below the stride."""
        if self.stride == 1:
            return self._sorted(values)
        sample = values[start :: self.stride].abs()
        expected = self.target * len(sample) / self.size
        rank = min(len(sample), ceil(expected + 2 * sqrt(expected)))
        # All comparisons here select NaN, so that divergence stays visible.
        threshold = torch.topk(sample, rank, sorted=False).values.min().item()
        for iteration in range(self._iterations + 1):
            found = self._above(values, threshold)
            if len(found) > self.target:
                return found[self._sorted(values[found])]
            if len(found) >= _LEAST_SELECTED * self.target or (threshold == 0 and len(found)):
                return found
            if threshold == 0 or iteration == self._iterations:
                break
            threshold *= _LOWERING
        return self._sorted(values)

    def _sorted(self, values: Tensor) -> Tensor:
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


class DGCAggregation:
    """The mean of the workers' sparse gradients.

    Worker i accumulates the elements that it has not sent in v_i, with momentum u_i:

        g ← g · min(1, clip / (√n ‖g‖))                       local clipping
        u ← m u + g,    v ← v + u                             momentum correction
        u ← m (u + g),  v ← v + u + g                         with Nesterov's momentum, instead
        send v where it is largest,  v ← 0, u ← 0 there       momentum masking
        mean ← 1/n Σ_i of the sent elements

    Lin et al. (2018), arXiv:1712.01887, Algorithms 1 and 2 and § 3. `Selector` selects from each
    tensor of two or more dimensions. Other tensors, and all tensors at a fraction of 1, are sent
    whole and keep their momentum, so that a fraction of 1 is SGD with momentum. Rounding errors of
    16-bit values stay in v.

    Cost on the wire: an all-reduce of the whole tensors and, concurrently, one all-gather of the
    selected values and their positions.

    Raises ValueError for more elements than 32-bit positions can address.
    """

    owns_momentum: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def __init__(self, network: Network, layout: Layout, config: Config):
        if config.int32_indices and layout.size > torch.iinfo(torch.int32).max:
            raise ValueError(f"int32_indices=True: use False for {layout.size} elements")
        self._network, self._layout, self._config = network, layout, config
        self.momentum, self.nesterov = config.momentum, config.nesterov
        workers, device = network.rows, network.device
        self._momentum = torch.zeros(workers, layout.size, device=device)  # u
        self._kept = torch.zeros(workers, layout.size, device=device)  # v
        self._steps = 0
        matrices = [i for i, shape in enumerate(layout.shapes) if len(shape) >= 2]
        vectors = [i for i, shape in enumerate(layout.shapes) if len(shape) < 2]
        self._spans = layout.spans(vectors)
        # (first position, size), in the order of memory.
        self._tensors = sorted((layout.starts[i], prod(layout.shapes[i])) for i in matrices)
        size = sum(span.stop - span.start for span in self._spans)
        self._whole = Mean(torch.zeros(workers, size, device=device))
        self._everything = Mean(self._kept)
        self._chosen = Gather([])
        self._index = torch.int32 if config.int32_indices else torch.int64
        self._value = torch.float16 if config.fp16_values else torch.float32
        self._fraction = 0.0
        self.at_epoch(0)

    def at_epoch(self, epoch: float) -> None:
        """Set the fraction that is sent, which follows the warm-up."""
        self._set_fraction(self._config.share(epoch))

    def _set_fraction(self, fraction: float) -> None:
        if fraction == self._fraction:
            return
        self._fraction = fraction
        self._selectors = [Selector(size, fraction, self._config) for _, size in self._tensors]

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits of a worker's messages, at the current fraction."""
        size = self._layout.size
        if self._fraction == 1:
            return 1.0
        chosen = sum(selector.target for selector in self._selectors)
        bits = 8 * self._words(chosen) * self._index.itemsize + 32 * self._whole.tensor.shape[1]
        return 32 * size / bits

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """Accumulate gradient [worker, D] and clear it. Fill mean [worker, D]."""
        self._accumulate(gradient)
        self._steps += 1
        if self._fraction == 1:
            mean.copy_((yield self._everything)[0])
            self._kept.zero_()
            return
        messages: list[Mean | Gather] = []
        if self._spans:
            take_out(self._kept, self._spans, self._whole.tensor)
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
        """Update u and v with the clipped gradient."""
        config, u, v = self._config, self._momentum, self._kept
        if config.clip is not None:
            longest = config.clip / sqrt(self._network.n_workers)
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((longest / norms).clamp_(max=1))
        if config.momentum == 0:
            v.add_(gradient)
        elif config.nesterov:
            u.add_(gradient).mul_(config.momentum)
            v.add_(u).add_(gradient)
        else:
            u.mul_(config.momentum).add_(gradient)
            v.add_(u)
        gradient.zero_()

    def _select(self, row: int) -> Tensor:
        """A worker's message: selected positions, then their values, in words of a position's size.

        The values leave v, but for rounding errors, and their momentum is cleared.
        """
        config, kept = self._config, self._kept[row]
        worker = self._network.workers[row]
        random = randomness.generator(config.seed, "dgc", self._steps, worker)
        starts = random.integers([selector.stride for selector in self._selectors])
        parts = []
        for (first, size), selector, start in zip(
            self._tensors, self._selectors, starts.tolist(), strict=True
        ):
            parts.append(selector.positions(kept[first : first + size], start).add_(first))
        positions = torch.cat(parts)
        values = kept[positions]
        sent = values
        if config.fp16_values:
            largest = torch.finfo(self._value).max
            finite = values.clamp(-largest, largest)
            sent = torch.where(values.isinf(), values, finite).to(self._value)
        kept[positions] = values - sent
        if config.momentum_masking and config.momentum:
            self._momentum[row].index_fill_(0, positions, 0)
        count = len(positions)
        words = positions.new_zeros(self._words(count), dtype=self._index)
        words[:count] = positions
        words[count:].view(self._value)[:count] = sent
        return words

    def _words(self, count: int) -> int:
        """Words of a message with `count` positions and values."""
        return count + ceil(count * self._value.itemsize / self._index.itemsize)

    def _add_received(self, pieces: Sequence[Tensor], mean: Tensor) -> None:
        """mean += 1/n Σ_i, in the same order in all processes, so that the result is the same."""
        for words in pieces:
            size = self._index.itemsize
            count = len(words) * size // (size + self._value.itemsize)
            values = words[count:].view(self._value)[:count].float().div_(len(pieces))
            mean[0].index_add_(0, words[:count], values)
        for first, size in self._tensors if len(mean) > 1 else ():
            mean[1:, first : first + size] = mean[0, first : first + size]

    def state_dict(self) -> dict[str, Any]:
        """Number of steps, current fraction, and [worker, D]: momentum u, accumulated v."""
        return {
            "steps": self._steps,
            "share": self._fraction,
            "momentum": self._momentum.clone(),
            "kept": self._kept.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. Raises ValueError if it does not fit."""
        if state["kept"].shape != self._kept.shape:
            raise ValueError(
                f"DGC's state has shape {list(state['kept'].shape)} [worker, D], "
                f"not {list(self._kept.shape)}; use the same model"
            )
        self._steps = state["steps"]
        self._set_fraction(state["share"])
        self._momentum.copy_(state["momentum"])
        self._kept.copy_(state["kept"])
