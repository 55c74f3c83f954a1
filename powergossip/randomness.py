"""Random numbers that depend on a seed, a purpose and ids (worker, edge, epoch, …) alone.

No generator is global or shared. The layout of workers over processes and the order of computation
thus do not affect the numbers. There are two kinds:

- `generator(seed, purpose, *ids)`: a numpy generator, for rare or bulk sampling (shuffling, data,
  graphs).
- `keys` with `bits`, `uniform` or `normal`: counter-based streams. The numbers are a function of
  (key, counter). Streams have no state to save, the two ends of an edge cannot fall out of step,
  and the streams of all edges are sampled by one batched expression on any device.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def seed_sequence(seed: int, purpose: str, *ids: int) -> np.random.SeedSequence:
    """The root of all randomness: one sequence for each `(seed, purpose, *ids)`.

    `purpose` is a word such as "shuffle". `ids` are non-negative integers below 2³², such as worker
    and epoch. Different arguments give independent streams (numpy's `spawn_key`).
    """
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "little")
    return np.random.SeedSequence(seed, spawn_key=(word, *ids))


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator for this purpose alone, such as `generator(seed, "shuffle", epoch)`."""
    return np.random.default_rng(seed_sequence(seed, purpose, *ids))


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit seed for `torch.manual_seed`.

    For layers that use torch's global generator: initialization, dropout.
    """
    return int(seed_sequence(seed, purpose, *ids).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of a device, as `torch.manual_seed` does.

    That function also seeds all other devices, even absent ones, which takes longer than the
    gradient of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def keys(seed: int, purpose: str, ids: Iterable[tuple[int, ...]]) -> Tensor:
    """One 64-bit key for each tuple of ids: int64 [number of tuples], for `bits`."""
    found = [seed_sequence(seed, purpose, *own).generate_state(1, np.uint64) for own in ids]
    return torch.from_numpy(np.array(found, dtype=np.uint64).reshape(-1).view(np.int64))


def bits(keys: Tensor, counter: int, shape: tuple[int, ...], start: Tensor | int = 0) -> Tensor:
    """64 independent random bits per element: int64 `[*keys.shape, *shape]`, on the keys' device.

    The stream of a key at a counter does not depend on the other keys of the call. `start`, below
    2³², is the index of the first element in that stream, and broadcasts with the keys. The 2⁶⁴
    elements of a key, over all counters, are distinct.

    Key and counter are hashed by SplitMix64's finalizer.

    References:
        Steele, Lea & Flood (2014), doi:10.1145/2714064.2660195.
    """
    count = math.prod(shape)
    # A tensor made of an int would be copied to a GPU, for which the host would wait.
    first = (start[..., None] if isinstance(start, Tensor) else start) + (counter << 32)
    index = torch.arange(count, device=keys.device) + first
    hashed = _splitmix(keys[..., None] + index.mul_(_GOLDEN))
    return hashed.view(*hashed.shape[:-1], *shape)


def uniform(keys: Tensor, counter: int, count: int, first: int = 0) -> Tensor:
    """Independent uniform random numbers on [0, 1), for rounding: float32 `[*keys.shape, count]`.

    They are odd multiples of 2⁻¹⁷, so that their mean is ½ exactly and the mean of ⌊y + u⌋ is y up
    to 2⁻¹⁷. Each element of `bits` gives four numbers. `first` is the index of the first number.
    """
    start, skipped = divmod(first, 4)
    drawn = bits(keys, counter, (-(-(skipped + count) // 4),), start).view(torch.int16)
    drawn = drawn[..., skipped : skipped + count]
    return drawn.float().add_(2**15 + 0.5).mul_(2**-16)


def normal(keys: Tensor, counter: int, shape: tuple[int, ...], start: Tensor | int = 0) -> Tensor:
    """Independent standard normal numbers: float32 `[*keys.shape, *shape]`.

    Arguments as for `bits`. The two halves of the 64 bits are the inputs of a Box–Muller transform.
    """
    drawn = bits(keys, counter, shape, start)
    high = _shift_right(drawn, 32).double()
    low = (drawn & 0xFFFFFFFF).double()
    radius = ((high + 0.5) / 2**32).log_().mul_(-2).sqrt_()
    angle = low * (2 * math.pi / 2**32)
    return radius.mul_(angle.cos_()).float()


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's increment, as a signed integer


def _splitmix(z: Tensor) -> Tensor:
    """SplitMix64's mixing function, in place, on int64, which wraps around as uint64 does.

    Allocating the result of each operation would cost more than the operation.
    """
    part = torch.empty_like(z)
    z.bitwise_xor_(_shift_right(z, 30, part)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    z.bitwise_xor_(_shift_right(z, 27, part)).mul_(0x94D049BB133111EB - 2**64)
    return z.bitwise_xor_(_shift_right(z, 31, part))


def _shift_right(z: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Logical right shift (torch's >> repeats the sign bit)."""
    shifted = torch.bitwise_right_shift(z, bits, out=out)
    return shifted.bitwise_and_((1 << (64 - bits)) - 1)
