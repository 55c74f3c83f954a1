"""Random numbers that depend on a seed, a purpose and who asks — on nothing else.

No generator is global and none is shared, so that neither the layout of workers over processes nor
the order in which they are served shows in the numbers.

Two kinds:

- `generator(seed, purpose, *ids)`: a numpy generator, for what is drawn rarely or in bulk
  (shuffling, data, graphs).
- `keys` with `bits`, `uniform` or `normal`: a counter-based stream. The numbers are a function of
  (key, counter), so there is no state to keep or save, the two ends of an edge cannot fall out of
  step, and the streams of all edges are drawn in one batched expression on any device.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def seed_sequence(seed: int, purpose: str, *ids: int) -> np.random.SeedSequence:
    """The root of all randomness: one sequence for each (seed, purpose, worker, edge, epoch, ...).

    `purpose` is a word such as "shuffle"; `ids` are non-negative numbers below 2³².
    Different arguments give independent streams (numpy's `spawn_key`).
    """
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "little")
    return np.random.SeedSequence(seed, spawn_key=(word, *ids))


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator of its own for this purpose, e.g. `generator(seed, "shuffle", epoch)`."""
    return np.random.default_rng(seed_sequence(seed, purpose, *ids))


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number to hand to `torch.manual_seed`, for layers that draw from torch's global
    generator (initialization, dropout)."""
    return int(seed_sequence(seed, purpose, *ids).generate_state(1, np.uint64)[0] >> np.uint64(1))


def keys(seed: int, purpose: str, ids: Iterable[tuple[int, ...]]) -> Tensor:
    """One 64-bit key for each tuple of ids: int64 [number of tuples], for `bits`."""
    words = [seed_sequence(seed, purpose, *i).generate_state(1, np.uint64)[0] for i in ids]
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


def bits(keys: Tensor, counter: int, shape: tuple[int, ...], start: Tensor | int = 0) -> Tensor:
    """64 independent random bits each: int64 [*keys.shape, *shape], on the keys' device.

    The stream of one key at one counter is always the same, whatever other keys are drawn beside
    it; `start` (below 2³²; it and the keys broadcast) takes it up from a later number. No two of a
    key's 2⁶⁴ numbers, at all counters together, are the same.

    SplitMix64's finalizer (Steele, Lea & Flood 2014, doi:10.1145/2714064.2660195) hashes key and
    counter.
    """
    count = math.prod(shape)
    first = torch.as_tensor(start, device=keys.device)[..., None] + (counter << 32)
    index = first + torch.arange(count, device=keys.device)
    hashed = _splitmix(keys[..., None] + index.mul_(_GOLDEN))
    return hashed.view(*hashed.shape[:-1], *shape)


def uniform(keys: Tensor, counter: int, count: int, start: Tensor | int = 0) -> Tensor:
    """Independent numbers uniform on [0, 1), for rounding: float32 [*keys.shape, count].

    They are odd multiples of 2⁻¹⁷, so their mean is ½ exactly, and ⌊y + u⌋ is y on average to 2⁻¹⁷.
    Four come from each number of `bits`, the first four from number `start`.
    """
    drawn = bits(keys, counter, (-(-count // 4),), start).view(torch.int16)[..., :count]
    return drawn.float().add_(2**15 + 0.5).mul_(2**-16)


def normal(keys: Tensor, counter: int, shape: tuple[int, ...], start: Tensor | int = 0) -> Tensor:
    """Independent standard normal numbers [*keys.shape, *shape], float32; see `bits`.

    The two halves of the bits feed a Box–Muller transform.
    """
    drawn = bits(keys, counter, shape, start)
    high = _shift_right(drawn, 32).double()
    low = (drawn & 0xFFFFFFFF).double()
    radius = ((high + 0.5) / 2**32).log_().mul_(-2).sqrt_()
    angle = low * (2 * math.pi / 2**32)
    return radius.mul_(angle.cos_()).float()


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment, as a signed number


def _splitmix(z: Tensor) -> Tensor:
    """SplitMix64's mixing function on int64, which wraps around as the original's uint64 does.

    In place: new memory for each operation would cost more than the operation.
    """
    part = torch.empty_like(z)
    z.bitwise_xor_(_shift_right(z, 30, part)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    z.bitwise_xor_(_shift_right(z, 27, part)).mul_(0x94D049BB133111EB - 2**64)
    return z.bitwise_xor_(_shift_right(z, 31, part))


def _shift_right(z: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Shift in zeros from the left (torch's >> repeats the sign)."""
    shifted = torch.bitwise_right_shift(z, bits, out=out)
    return shifted.bitwise_and_((1 << (64 - bits)) - 1)
