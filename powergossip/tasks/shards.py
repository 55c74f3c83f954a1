"""Which samples each worker has, and in which order it sees them."""

import math

import numpy as np
import torch
from torch import Tensor

from powergossip.randomness import generator
from powergossip.tasks.task import Options


class Shards:
    """The samples 0 … n−1 dealt out to workers; every sample has exactly one worker in an epoch.

    Shards differ in size by at most one. An epoch's order is computed when first asked for, and
    only the latest is kept.
    """

    def __init__(self, labels: Tensor, options: Options) -> None:
        """labels: int64 [sample]. Raises ValueError if the options do not fit the data."""
        n_samples, n_workers = len(labels), options.n_workers
        self.steps_per_epoch = smallest_shard(n_samples, options) // options.batch_size
        self._seed = options.seed
        self._device = options.device
        self._bounds = bounds(n_samples, n_workers)
        self._fixed: np.ndarray | None = None  # [sample], worker after worker
        if options.dirichlet_alpha is not None:
            _refuse_alpha(options.dirichlet_alpha, options.decentralized)
            random = generator(options.seed, "dirichlet")
            self._fixed = skewed_by_label(labels, self._bounds, options.dirichlet_alpha, random)
        elif options.decentralized:
            self._fixed = sorted_by_label(
                labels, options.shuffled_ratio, generator(options.seed, "decentralize")
            )
        elif not options.reshuffle:
            self._fixed = generator(options.seed, "shards").permutation(n_samples)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)  # [sample], worker after worker

    def indices(self, worker: int, epoch: int) -> Tensor:
        """The samples of a worker in the order of an epoch: int64 [sample in shard]."""
        assert 0 <= worker < len(self._bounds) - 1
        if epoch != self._epoch:
            self._order = torch.from_numpy(self._ordered(epoch)).to(self._device)
            self._epoch = epoch
        return self._order[self._bounds[worker] : self._bounds[worker + 1]]

    def _ordered(self, epoch: int) -> np.ndarray:
        random = generator(self._seed, "shuffle", epoch)
        if self._fixed is None:
            return random.permutation(self._bounds[-1])
        pieces = np.split(self._fixed, self._bounds[1:-1])
        return np.concatenate([random.permutation(piece) for piece in pieces])


def bounds(n: int, n_workers: int) -> np.ndarray:
    """Where each worker's piece of n things begins, and the last one's ends: [worker + 1]."""
    return np.arange(n_workers + 1) * n // n_workers


def smallest_shard(n_samples: int, options: Options, samples: str = "samples") -> int:
    """How many samples every worker has at least.

    Raises ValueError, calling them `samples`, if these are not enough for a batch, or if there are
    no workers or no batches.
    """
    n_workers, batch_size = options.n_workers, options.batch_size
    if n_workers < 1:
        raise ValueError(f"n_workers={n_workers} is not possible; use at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not possible; use at least 1")
    smallest = n_samples // n_workers
    if batch_size > smallest:
        remedies = {"batch_size": smallest, "n_workers": n_samples // batch_size}
        remedy = " or ".join(f"{key} ≤ {most}" for key, most in remedies.items() if most)
        raise ValueError(
            f"batch_size={batch_size} is larger than the smallest shard: {n_samples} {samples} "
            f"for {n_workers} workers are {smallest} for each; use {remedy or 'fewer of both'}"
        )
    return smallest


def sorted_by_label(
    labels: Tensor, shuffled_ratio: float, random: np.random.Generator
) -> np.ndarray:
    """Samples in the order of their labels [sample], but for a share that is mixed back uniformly:
    so many places are drawn, and the samples in them change places among themselves.

    Raises ValueError if the ratio is not in [0, 1].
    """
    if not 0 <= shuffled_ratio <= 1:
        raise ValueError(
            f"decentralized_data_shuffled_ratio={shuffled_ratio} is not a share; "
            "use a number from 0 (sorted by label) to 1 (shuffled)"
        )
    order = labels.cpu().numpy().argsort(kind="stable")
    mixed = random.choice(len(order), round(shuffled_ratio * len(order)), replace=False)
    order[np.sort(mixed)] = order[mixed]
    return order


def skewed_by_label(
    labels: Tensor, bounds: np.ndarray, alpha: float, random: np.random.Generator
) -> np.ndarray:
    """Samples [sample] such that worker i, who has those from bounds[i] to bounds[i + 1], has
    labels in the proportions q_i ~ Dirichlet(α·1).    Hsu, Qi & Brown (2019), arXiv:1909.06335

    Workers take theirs one after another, without replacement. When a label runs out, its share
    goes to the labels left, in proportion; so the last workers are furthest from what they drew.
    Hsu et al. write Dirichlet(αp) with prior proportions p: for a uniform p, their α is ours times
    the number of labels.
    """
    kinds, label, available = np.unique(labels.cpu(), return_inverse=True, return_counts=True)
    shuffled = random.permutation(len(labels))
    by_label = shuffled[label[shuffled].argsort(kind="stable")]
    stop = np.cumsum(available)  # [label], where each label's samples end in by_label
    order = []
    for size in np.diff(bounds):
        counts = apportion(size, _log_gamma_variates(alpha, len(kinds), random), available)
        start = stop - available
        order += [by_label[i : i + count] for i, count in zip(start, counts, strict=True)]
        available = available - counts
    return np.concatenate(order)


def apportion(size: int, log_shares: np.ndarray, available: np.ndarray) -> np.ndarray:
    """How many of each label [label], `size` in all, in proportion to exp(log_shares) among the
    labels that do not run out, and at most `available` of each.

    The parts after the decimal point are rounded up where they are largest.
    """
    exact = np.zeros(len(available))
    left = available > 0
    while left.any():
        shares = np.exp(log_shares - log_shares[left].max(), where=left, out=np.zeros(len(left)))
        wanted = (size - exact[~left].sum()) * shares / shares.sum()
        used_up = left & (wanted >= available)
        exact = np.where(left, np.minimum(wanted, available), exact)
        if not used_up.any():
            break
        left = left & ~used_up
    counts = np.floor(exact).astype(np.int64)
    largest_parts = (counts - exact).argsort(kind="stable")
    counts[largest_parts[: size - counts.sum()]] += 1
    return counts


def _log_gamma_variates(alpha: float, count: int, random: np.random.Generator) -> np.ndarray:
    """Logarithms of independent Gamma(α) variates, which are Dirichlet(α·1) but for their sum.

    G_α = G_{α+1} U^{1/α}, U uniform: for small α all but one of them are too small for a float,
    and the labels left when that one has run out would have no shares.    Marsaglia & Tsang (2000),
    doi:10.1145/358407.358414
    """
    alpha = float(np.clip(alpha, 1e-300, 1e300))  # which is no difference, but cannot overflow
    uniform = 1 - random.random(count)  # never 0
    return np.log(random.standard_gamma(alpha + 1, count)) + np.log(uniform) / alpha


def _refuse_alpha(alpha: float, decentralized: bool) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"decentralized_data_dirichlet_alpha={alpha}: use a number above 0")
    if decentralized:
        raise ValueError(
            f"decentralized_data_dirichlet_alpha={alpha} and use_decentralized_data=true are two "
            "ways to deal the data out; use one of them"
        )
