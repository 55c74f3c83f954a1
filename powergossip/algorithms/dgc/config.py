"""Options of Deep Gradient Compression."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Any

from powergossip import checks
from powergossip.algorithms.dgc.clipping import CLIPPING


@dataclass(frozen=True)
class DGCConfig:
    """Options, with the names and defaults of the published code, where it has them.

    Args:
        compress_ratio: Fraction of each tensor's elements that is sent after the warm-up. A ratio r
            above 1 stands for the fraction 1/r.
        sample_ratio: Fraction of a tensor that is sampled for the threshold, at least.
        strided_sample: Sample at equal distances from a random start. Otherwise uniformly.
        compress_upper_bound: Where more elements than this times the target exceed the threshold,
            the largest are sent. Otherwise the first in memory; 1: the largest always.
        compress_lower_bound: While fewer elements than this times the target exceed the threshold,
            it is multiplied by this.
        max_adaptation_iters: Corrections of the threshold, at most. See `Selector`.
        resample: Select the largest elements of a surplus. Otherwise the threshold is multiplied by
            compress_upper_bound.
        momentum: Momentum, as in torch.optim.SGD.
        nesterov: Nesterov's momentum.
        momentum_masking: Clear the momentum of sent elements.
        clip: Threshold c of the clipping of a worker's gradient.
        clip_by: Kind of clipping at c. gradient: a worker's gradient has
            a norm of √n · c at most, for n workers. norm, value: each tensor has a norm, or
            elements, of c at most.
            global-norm: each tensor is multiplied by c over the root mean square of its norm in all
            workers, if that is larger. global-value: its elements are limited to that root mean
            square, without c. See `Clipping`.
        warmup_epochs: Epochs before compress_ratio applies.
        warmup_coeff: Fraction in each of these epochs, or a number c for c, c², c³, … down to
            compress_ratio. By default the fraction falls evenly, see `fraction`.
        fp16_values: Send values with 16 bits. Otherwise in the precision of the gradient.
        int32_indices: Send positions with 32 bits. Otherwise with 64.
        seed: Seed of the samples.

    Raises:
        ValueError: For a value out of range.
    """

    compress_ratio: float = 0.001
    sample_ratio: float = 0.01
    strided_sample: bool = True
    compress_upper_bound: float = 1.3
    compress_lower_bound: float = 0.8
    max_adaptation_iters: int = 10
    resample: bool = True
    momentum: float = 0.9
    nesterov: bool = False
    momentum_masking: bool = True
    clip: float | None = None
    clip_by: str = "gradient"
    warmup_epochs: int = 0
    warmup_coeff: float | Sequence[float] | None = None
    fp16_values: bool = False
    int32_indices: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, accepted: str) -> None:
            checks.check(name, getattr(self, name), ok, accepted)

        checks.positive("compress_ratio", self.compress_ratio)
        require("sample_ratio", 0.01 <= self.sample_ratio <= 1, "a fraction from 0.01 to 1")
        lower = self.compress_lower_bound
        require("compress_lower_bound", 0 < lower < 1, "a fraction above 0, below 1")
        self._check_upper_bound()
        require("momentum", 0 <= self.momentum < 1, "0 or more, below 1")
        checks.one_of("clip_by", self.clip_by, CLIPPING)
        self._check_clip()
        for name, least in (("max_adaptation_iters", 0), ("warmup_epochs", -1), ("seed", 0)):
            value = getattr(self, name)
            ok = isinstance(checks.plain(value), int) and value >= least
            require(name, ok, f"an integer, {least} or more")
        if self.warmup_coeff is not None:
            self._check_warmup_coeff()

    def _check_upper_bound(self) -> None:
        upper = self.compress_upper_bound
        if self.resample:
            checks.check("compress_upper_bound", upper, upper >= 1, "1 or more")
        else:
            accepted = "a number above 1, or resample=True"
            checks.check("compress_upper_bound", upper, isfinite(upper) and upper > 1, accepted)

    def _check_clip(self) -> None:
        if self.clip_by == "global-value":
            accepted = "None with clip_by=global-value, which has no threshold"
            checks.check("clip", self.clip, self.clip is None, accepted)
        elif self.clip is None:
            accepted = f"a number above 0 with clip_by={self.clip_by}"
            checks.check("clip", self.clip, self.clip_by == "gradient", accepted)
        else:
            accepted = "a number above 0, or None"
            checks.check("clip", self.clip, isfinite(self.clip) and self.clip > 0, accepted)

    def _check_warmup_coeff(self) -> None:
        given: Any = self.warmup_coeff
        accepted = "a fraction above 0, at most 1, or a list of them"
        listed = list(given) if isinstance(given, Sequence) else [given]
        ok = all(checks.is_finite(ratio) and 0 < ratio <= 1 for ratio in listed)
        checks.check("warmup_coeff", given, ok, accepted)
        listed = listed if isinstance(given, Sequence) else [given] * self.warmup_epochs
        ok = 0 < len(listed) == self.warmup_epochs
        accepted = f"one for each of warmup_epochs={self.warmup_epochs}"
        checks.check("warmup_coeff", given, ok, accepted)

    def fraction(self, epoch: float) -> float:
        """Return the fraction of elements sent in epoch e = ⌊epoch⌋.

        After the warm-up of W epochs, and without one, it is r = compress_ratio. Before, it is::

            warmup_coeff[e]                   for a list
            max(r, warmup_coeff^(e + 1))      for a number
            r^((e + 1) / (W + 1))             for None

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
        if isinstance(self.warmup_coeff, Sequence):
            return self.warmup_coeff[begun]
        return max(final, self.warmup_coeff ** (begun + 1))
