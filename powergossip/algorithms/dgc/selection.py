"""Selection of elements of large magnitude by the threshold of a sample.

A position is an index 0 … D − 1.
"""

from math import ceil, floor, gcd, sqrt

import numpy as np
import torch
from torch import Tensor

from powergossip.algorithms.dgc.config import DGCConfig

_LEAST_IN_SAMPLE = 16  # elements above the threshold in a sample, for a reliable threshold
_BLOCK = 32  # elements that are compared with the threshold through their maximum
_BLOCKS_AT_ONCE = 2**14  # 2 MiB of elements, which the second pass finds in the CPU's cache


class Selector:
    """Selection of about fraction · size elements of largest magnitude, without sorting::

        t ← the m-th largest magnitude of a sample
        up to max_adaptation_iters times, while k elements exceed t:
            k > upper · target     return the `target` largest of them, if resample
                                   t ← upper · t, otherwise
            k < lower · target     t ← lower · t
        return the first `target` of those that exceed t, in the order of memory

    upper = compress_upper_bound, lower = compress_lower_bound. Lin et al. (2018), arXiv:1712.01887,
    § 5 (hierarchical selection), in the form of the published code. With upper = 1 and resample the
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

    def sample(self, random: np.random.Generator) -> slice | Tensor:
        """Draw the positions of a sample: a slice, or int64 [⌈size / stride⌉]."""
        if self.stride == 1:
            return slice(None)
        if self._config.strided_sample:
            return slice(int(random.integers(self.stride)), None, self.stride)
        return torch.from_numpy(random.integers(self.size, size=ceil(self.size / self.stride)))

    def positions(self, values: Tensor, sample: slice | Tensor) -> Tensor:
        """Select positions in values [size]: int64 [≤ target]. `sample` has some positions."""
        config = self._config
        if self.stride == 1:
            return self._largest(values)
        threshold = self._threshold(values[sample].abs())
        # All comparisons here select NaN, so that divergence stays visible.
        for iteration in range(config.max_adaptation_iters + 1):
            found = self._above(values, threshold)
            if len(found) > self._most:
                if config.resample:
                    return found[self._largest(values[found])]
                factor = config.compress_upper_bound
            elif len(found) >= self._least or (threshold == 0 and len(found)):
                break
            else:
                factor = config.compress_lower_bound
            if threshold == 0 or iteration == config.max_adaptation_iters:
                break
            threshold *= factor
        if len(found) < self._least and (threshold != 0 or not len(found)):
            return self._largest(values)
        if len(found) > self.target and not values[found].isfinite().all():
            return found[self._largest(values[found])]
        return found[: self.target]

    def _threshold(self, sample: Tensor) -> float:
        expected = self.target * len(sample) / self.size
        if self._config.resample and self._config.compress_upper_bound == 1:
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
