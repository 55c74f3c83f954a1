"""Deep Gradient Compression: all workers apply one mean gradient, of which each sends its largest
numbers; the others wait, with their momentum, until they have grown.

In anyone's training loop, one worker a process (`mpirun -np 8 python mine.py`):

    dgc = DGC(model.named_parameters(), Config(compress_ratio=0.001, warmup_epochs=4))
    for epoch in range(num_epochs):
        dgc.at_epoch(epoch)
        for batch in batches:
            loss(model, batch).backward()
            optimizer_step(optimizer, dgc)  # in place of optimizer.step() and zero_grad()

The optimizer has no momentum of its own: it is corrected for what waits, so it is in here.
`DGCAggregation` is the same on the flat buffers of train.py.

Axes: worker (hosted here). D numbers a worker. A position is a number's place among the D.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, gcd, isfinite, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from powergossip import randomness
from powergossip.network import Conversation, Gather, Mean, Network
from powergossip.parameters import Layout, put_in, take_out

_LEAST_SELECTED = 0.8  # of the target; with fewer the threshold was too high
_LOWERING = 0.8  # by which it is then multiplied
_LEAST_IN_SAMPLE = 16  # numbers above the threshold; with fewer it would say little
_BLOCK = 32  # numbers that are looked at by their largest
_BLOCKS_AT_ONCE = 2**14  # whose numbers (2 MiB) stay in the cache for a second look


@dataclass(frozen=True)
class Config:
    """
    compress_ratio             share of each tensor's numbers that travels, after the warm-up
    sample_ratio               share of a tensor's numbers, at least, that the threshold is from
    max_adaptation_iterations  times that a threshold is lowered, at most
    momentum, nesterov         as of torch.optim.SGD
    momentum_masking           whether what is sent also loses its momentum
    clip                       a gradient (of the mean's scale) longer than this is scaled down
    warmup_epochs              until compress_ratio is reached
    warmup_ratios              the share in each of them; None: see `share`
    fp16_values, int32_indices how numbers and positions travel; else float32 and int64
    num_batches_per_step       calls of optimizer_step that make a step
    seed                       of where samples start

    Raises ValueError for a value that makes no sense.
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
        if not 0 < self.compress_ratio <= 1:
            raise ValueError(
                f"compress_ratio={self.compress_ratio}: use a share above 0, at most 1"
            )
        if not 0.01 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio={self.sample_ratio}: use a share from 0.01 to 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: use 0 or more, below 1")
        if self.clip is not None and not (isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip={self.clip}: use a length above 0, or None")
        for name, least in (
            ("max_adaptation_iterations", 0),
            ("warmup_epochs", 0),
            ("num_batches_per_step", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value}: use a whole number, {least} or more")
        if self.warmup_ratios is not None:
            if len(self.warmup_ratios) < self.warmup_epochs:
                raise ValueError(
                    f"warmup_ratios={list(self.warmup_ratios)} has {len(self.warmup_ratios)} "
                    f"entries; use one for each of warmup_epochs={self.warmup_epochs}"
                )
            for ratio in self.warmup_ratios:
                if not 0 < ratio <= 1:
                    raise ValueError(
                        f"warmup_ratios={list(self.warmup_ratios)} has {ratio}; "
                        "use shares above 0, at most 1"
                    )

    def share(self, epoch: float) -> float:
        """The share that travels in an epoch e = 0, 1, … (fractions count as the epoch begun).

        warmup_ratios[e] while e < warmup_epochs, or without a list
        compress_ratio^((e + 1) / (warmup_epochs + 1)); then compress_ratio. With 0.001 and 4
        epochs that is 0.251, 0.063, 0.016, 0.004, the paper's schedule (Lin et al. 2018, § 3.3).

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
    """Finds the largest of `size` numbers by absolute value, without sorting them.

        t ← the m-th largest of a sample, m a little more than its share of the target
        while fewer than 0.8 · target numbers are above t: t ← 0.8 t
        the target largest of those above t

    Lin et al. (2018), arXiv:1712.01887, § 5 (hierarchical selection). The threshold aims a little
    low, since a surplus, which costs next to nothing to cut exactly, is likelier to be right than
    a shortage. So the numbers found are `target` or, if the last line has no surplus to cut, at
    least 0.8 · target; fewer only if others are 0. Where a sample would be as large as the tensor
    or the threshold cannot be lowered in max_adaptation_iterations, all numbers are sorted.

    target  # round(share · size), at least 1
    stride  # of the sample; 1: none is taken
    """

    def __init__(self, size: int, share: float, config: Config):
        self.size, self.target = size, max(1, round(share * size))
        self._iterations = config.max_adaptation_iterations
        sample = max(config.sample_ratio * size, _LEAST_IN_SAMPLE * size / self.target)
        # No factor in common with the size: else a stride could see a few columns only.
        self.stride = max(1, floor(size / sample))
        while gcd(self.stride, size) > 1:
            self.stride -= 1
        # A block is worth a look by its largest only where most have nothing.
        self._block = _BLOCK if self.target * _BLOCK < size / 2 else 1

    def positions(self, values: Tensor, start: int) -> Tensor:
        """int64 [≤ target], of values [size]; `start` (below stride) is where the sample starts."""
        if self.stride == 1:
            return self._sorted(values)
        sample = values[start :: self.stride].abs()
        expected = self.target * len(sample) / self.size
        rank = min(len(sample), ceil(expected + 2 * sqrt(expected)))
        # As all comparisons here it lets NaN through, for a run that diverged shall show it.
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
        """Positions of the numbers with |number| > threshold, or NaN: int64."""
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
    """What all workers apply; what worker i does not send waits in v_i, with momentum u_i.

        g ← g · min(1, clip / (√n ‖g‖))                       local clipping
        u ← m u + g;    v ← v + u                             momentum correction
        u ← m (u + g);  v ← v + u + g                         with Nesterov's momentum, instead
        send v where it is largest;  v ← 0, u ← 0 there       momentum masking
        mean ← 1/n Σ_i of what is sent

    Lin et al. (2018), arXiv:1712.01887, Algorithms 1 and 2 and § 3. `Selector` chooses in each
    tensor of two or more dimensions. Other tensors, and all where the share is 1, are sent whole;
    nothing of their momentum is masked, so that a share of 1 is SGD with momentum. What 16 bits
    do not tell of a number stays in v.

    Sends an all-reduce of the tensors sent whole and one all-gather of the others' chosen numbers
    and positions, at the same time.

    Raises ValueError for more numbers than positions of 32 bits can tell apart.
    """

    owns_momentum = clips = True

    def __init__(self, network: Network, layout: Layout, config: Config):
        if config.int32_indices and layout.size > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"int32_indices cannot tell {layout.size} numbers apart; use int32_indices=False"
            )
        self._network, self._layout, self._config = network, layout, config
        workers, device = network.rows, network.device
        self._momentum = torch.zeros(workers, layout.size, device=device)  # u
        self._kept = torch.zeros(workers, layout.size, device=device)  # v
        self._steps = 0
        matrices = [i for i, shape in enumerate(layout.shapes) if len(shape) >= 2]
        vectors = [i for i, shape in enumerate(layout.shapes) if len(shape) < 2]
        self._spans = layout.spans(vectors)
        # In the order of their places, in which they are also read.
        self._places = sorted((layout.starts[i], prod(layout.shapes[i])) for i in matrices)
        size = sum(span.stop - span.start for span in self._spans)
        self._whole = Mean(torch.zeros(workers, size, device=device))
        self._everything = Mean(self._kept)
        self._chosen = Gather([])
        self._index = torch.int32 if config.int32_indices else torch.int64
        self._value = torch.float16 if config.fp16_values else torch.float32
        self._share = 0.0
        self.at_epoch(0)

    def at_epoch(self, epoch: float) -> None:
        """The share that travels follows the warm-up."""
        self._set_share(self._config.share(epoch))

    def _set_share(self, share: float) -> None:
        if share == self._share:
            return
        self._share = share
        self._selectors = [Selector(size, share, self._config) for _, size in self._places]

    @property
    def compression_rate(self) -> float:
        """Bits of a gradient over the bits that a worker tells of it, at the present share."""
        size = self._layout.size
        if self._share == 1:
            return 1.0
        chosen = sum(selector.target for selector in self._selectors)
        bits = 8 * self._words(chosen) * self._index.itemsize + 32 * self._whole.tensor.shape[1]
        return 32 * size / bits

    def step(self, gradient: Tensor, mean: Tensor) -> Conversation:
        """gradient [worker, D]: taken in, left 0. mean [worker, D]: what all apply."""
        self._take_in(gradient)
        self._steps += 1
        if self._share == 1:
            mean.copy_((yield self._everything)[0])
            self._kept.zero_()
            return
        messages: list[Mean | Gather] = []
        if self._spans:
            take_out(self._kept, self._spans, self._whole.tensor)
            messages.append(self._whole)
        if self._places:
            self._chosen.pieces = [self._take_chosen(row) for row in range(len(gradient))]
            messages.append(self._chosen)
        received = iter((yield tuple(messages)))
        mean.zero_()
        if self._spans:
            put_in(next(received), self._spans, mean)
        if self._places:
            self._give_chosen(next(received), mean)

    def _take_in(self, gradient: Tensor) -> None:
        """The update of u and v, by the gradient as clipped."""
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

    def _take_chosen(self, row: int) -> Tensor:
        """What a worker sends: its positions, then their numbers, in words of a position's size."""
        config, kept = self._config, self._kept[row]
        worker = self._network.workers[row]
        random = randomness.generator(config.seed, "dgc", self._steps, worker)
        starts = random.integers([selector.stride for selector in self._selectors])
        parts = []
        for (place, size), selector, start in zip(
            self._places, self._selectors, starts.tolist(), strict=True
        ):
            parts.append(selector.positions(kept[place : place + size], start).add_(place))
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
        """Words that so many positions and numbers take."""
        return count + ceil(count * self._value.itemsize / self._index.itemsize)

    def _give_chosen(self, pieces: Sequence[Tensor], mean: Tensor) -> None:
        """mean += 1/n Σ_i, in the order of the workers, so that all get the same."""
        for words in pieces:
            size = self._index.itemsize
            count = len(words) * size // (size + self._value.itemsize)
            values = words[count:].view(self._value)[:count].float().div_(len(pieces))
            mean[0].index_add_(0, words[:count], values)
        for place, size in self._places if len(mean) > 1 else ():
            mean[1:, place : place + size] = mean[0, place : place + size]

    def state_dict(self) -> dict[str, Any]:
        """Number of steps and share; momentum u and what is kept, v: [worker, D]."""
        return {
            "steps": self._steps,
            "share": self._share,
            "momentum": self._momentum.clone(),
            "kept": self._kept.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another instance was. Raises ValueError for a state of another model."""
        if state["kept"].shape != self._kept.shape:
            raise ValueError(
                f"DGC's state is of {list(state['kept'].shape)} numbers [worker, D], "
                f"here they are {list(self._kept.shape)}; use the same model"
            )
        self._steps = state["steps"]
        self._set_share(state["share"])
        self._momentum.copy_(state["momentum"])
        self._kept.copy_(state["kept"])


# --- In someone else's training loop -------------------------------------------------------------
