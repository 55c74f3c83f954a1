"""Partition of the samples over the workers and their order.

IID, sorted by label, with label proportions from a Dirichlet distribution, or by a column.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from powergossip import checks
from powergossip.randomness import generator
from powergossip.tasks.loading import on_device
from powergossip.tasks.task import TaskOptions

NOBODY: frozenset[int] = frozenset()
KEPT_ORDERS = 4  # workers may be in different epochs
VALIDATION_SEED = 0  # of the held-out samples, fixed for all runs


class Partition:
    """A partition of the samples 0 … n−1 over the workers: each belongs to one worker per epoch.

    The sizes of shards differ by at most one, except in a partition by a column. The order of an
    epoch is computed at its first use, and only the latest ones are cached.

    The samples of lost workers can be partitioned over the others: see `indices`.

    Attributes:
        steps_per_epoch: Number of steps, the same for all workers. Those with more samples than the
            smallest shard leave out others in each epoch.
    """

    def __init__(
        self, labels: Tensor, options: TaskOptions, column: Sequence[Hashable] | None = None
    ) -> None:
        """Partition the samples.

        Args:
            labels: Labels int64 [sample].
            column: Values of options.column [sample], if the data have it.

        Raises:
            ValueError: If the options do not match the data.
        """
        n_samples, n_workers = len(labels), options.n_workers
        smallest = smallest_shard(n_samples, options)
        self._seed, self._device = options.seed, options.device
        self._batch_size = options.batch_size
        self._bounds = bounds(n_samples, n_workers)
        self._fixed: np.ndarray | None = None  # [sample], worker after worker
        if options.column is not None:
            _check_column(options, column)
            assert column is not None
            self._fixed, self._bounds = by_group(
                column, n_workers, generator(options.seed, "groups")
            )
            smallest = int(np.diff(self._bounds).min())
            accepted = f"{smallest} or less; the smallest shard has {smallest} samples"
            checks.check("batch_size", options.batch_size, options.batch_size <= smallest, accepted)
        elif options.dirichlet_alpha is not None:
            key, alpha = "decentralized_data_dirichlet_alpha", options.dirichlet_alpha
            checks.positive(key, alpha)
            accepted = "null with use_decentralized_data=true"
            checks.check(key, alpha, not options.decentralized, accepted)
            random = generator(options.seed, "dirichlet")
            self._fixed = skewed_by_label(labels, self._bounds, alpha, random)
        elif options.decentralized:
            self._fixed = sorted_by_label(
                labels, options.shuffled_ratio, generator(options.seed, "decentralize")
            )
        elif not options.reshuffle:
            self._fixed = generator(options.seed, "shards").permutation(n_samples)
        self.steps_per_epoch = n_batches(smallest, options.batch_size, options.drop_last)
        # Epoch, lost workers → samples, worker after worker, and where each worker's samples begin.
        self._orders: OrderedDict[tuple[int, frozenset[int]], tuple[Tensor, list[int]]] = (
            OrderedDict()
        )

    def indices(self, worker: int, epoch: int, lost: frozenset[int] = NOBODY) -> Tensor:
        """The samples of a worker, in the order of an epoch: int64 [sample of the shard].

        Args:
            lost: Workers without samples. The others have theirs too, each the same number up to
                one.
        """
        assert 0 <= worker < len(self._bounds) - 1
        assert worker not in lost
        order, starts = self._order(epoch, lost)
        return order[starts[worker] : starts[worker + 1]]

    def batch(self, worker: int, epoch: int, step: int, lost: frozenset[int] = NOBODY) -> Tensor:
        """The samples of a worker's batch, 0 ≤ step < steps_per_epoch. `lost` as in `indices`."""
        assert 0 <= step < self.steps_per_epoch
        size = self._batch_size
        return self.indices(worker, epoch, lost)[step * size : (step + 1) * size]

    def label_counts(self, labels: Tensor, n_labels: int, epoch: int) -> Tensor:
        """Number of samples per worker and label in an epoch: int64 [worker, label]."""
        shards = (labels[self.indices(worker, epoch)] for worker in range(len(self._bounds) - 1))
        return torch.stack([torch.bincount(shard, minlength=n_labels) for shard in shards]).cpu()

    def full_batches(self, workers: range, epoch: int, step: int) -> Tensor | None:
        """The samples of the workers' batches: int64 [worker, sample].

        None if a worker has fewer than a full batch.
        """
        size = self._batch_size
        order, starts = self._order(epoch, NOBODY)
        bounds = np.array(starts[workers.start : workers.stop + 1])
        if np.diff(bounds).min() < (step + 1) * size:
            return None
        places = bounds[:-1, None] + np.arange(step * size, (step + 1) * size)
        return order[on_device(torch.from_numpy(places), order.device)]

    def _order(self, epoch: int, lost: frozenset[int]) -> tuple[Tensor, list[int]]:
        """The samples of all workers in an epoch, and where each worker's samples begin."""
        key = epoch, lost
        if key not in self._orders:
            pieces = self._pieces(epoch, lost)
            starts = np.cumsum([0, *map(len, pieces)]).tolist()
            self._orders[key] = torch.from_numpy(np.concatenate(pieces)).to(self._device), starts
            if len(self._orders) > KEPT_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return self._orders[key]

    def _pieces(self, epoch: int, lost: frozenset[int]) -> list[np.ndarray]:
        """The samples of each worker in an epoch."""
        random = generator(self._seed, "shuffle", epoch)
        if self._fixed is None:
            shuffled = random.permutation(self._bounds[-1])
            if lost:
                return over_present(shuffled, len(self._bounds) - 1, lost)
            return np.split(shuffled, self._bounds[1:-1])
        pieces = np.split(self._fixed, self._bounds[1:-1])
        if lost:
            found = np.concatenate([pieces[worker] for worker in sorted(lost)])
            shuffled = generator(self._seed, "lost", *sorted(lost)).permutation(found)
            more = over_present(shuffled, len(pieces), lost)
            own = [piece[: 0 if i in lost else None] for i, piece in enumerate(pieces)]
            pieces = [np.concatenate(both) for both in zip(own, more, strict=True)]
        return [random.permutation(piece) for piece in pieces]


def held_out(labels: Tensor, ratio: float) -> np.ndarray:
    """True where a sample is held out for validation: bool [sample].

    A function of labels [sample] and ratio alone, hence the same for all workers and seeds. Each
    label loses the same fraction of its samples, up to rounding. Raises ValueError as
    `number_held_out` does.
    """
    held = np.zeros(len(labels), dtype=bool)
    _, label, available = np.unique(labels.cpu(), return_inverse=True, return_counts=True)
    size = number_held_out(len(labels), ratio)
    random = generator(VALIDATION_SEED, "validation")
    shuffled = random.permutation(len(labels))
    by_label = np.split(shuffled[label[shuffled].argsort(kind="stable")], np.cumsum(available)[:-1])
    order = random.permutation(len(available))  # equal remainders are rounded in this order
    counts = apportion(size, np.log(available[order]), available[order])
    for label_id, count in zip(order, counts, strict=True):
        held[by_label[label_id][:count]] = True
    return held


def number_held_out(n_samples: int, ratio: float, least: int = 1) -> int:
    """Number of samples held out for validation.

    Raises BadValue if the ratio is not in [0, 1), or if it is above 0 and leaves fewer than `least`
    samples on one of the two sides.
    """
    checks.below_one("validation_ratio", ratio)
    size = round(ratio * n_samples)
    ok = ratio == 0 or least <= size <= n_samples - least
    accepted = f"0, or a number that leaves {least} or more of {n_samples} samples on both sides"
    checks.check("validation_ratio", ratio, ok, accepted)
    return size


def bounds(n: int, n_workers: int) -> np.ndarray:
    """Boundaries of n elements split over the workers: worker i has those from [i] to [i + 1]."""
    return np.arange(n_workers + 1) * n // n_workers


def over_present(samples: np.ndarray, n_workers: int, lost: Collection[int]) -> list[np.ndarray]:
    """Samples split over the workers that are not lost: n_workers pieces, empty for the others."""
    present = [worker for worker in range(n_workers) if worker not in lost]
    pieces = iter(np.split(samples, bounds(len(samples), len(present))[1:-1]))
    return [samples[:0] if worker in lost else next(pieces) for worker in range(n_workers)]


def n_batches(n_samples: int, batch_size: int, drop_last: bool) -> int:
    """Number of batches in a shard, with or without a last batch of fewer samples.

    A single sample is never the rest of an epoch: batch norm needs two.
    """
    full, rest = divmod(n_samples, batch_size)
    return full + (rest >= 2 and not drop_last)


def smallest_shard(n_samples: int, options: TaskOptions, samples: str = "samples") -> int:
    """Number of samples in the smallest shard.

    Raises ValueError if it is less than a batch, or if n_workers or batch_size is below 1. The text
    calls the samples `samples`.
    """
    n_workers, batch_size = options.n_workers, options.batch_size
    checks.at_least_one("n_workers", n_workers)
    checks.at_least_one("batch_size", batch_size)
    smallest = n_samples // n_workers
    if batch_size > smallest:
        remedies = {"batch_size": smallest, "n_workers": n_samples // batch_size}
        remedy = " or ".join(f"{key} ≤ {most}" for key, most in remedies.items() if most)
        raise ValueError(
            f"batch_size={batch_size}: use {remedy or 'less of batch_size and n_workers'}; "
            f"{n_samples} {samples} for {n_workers} workers are {smallest} for each"
        )
    return smallest


def sorted_by_label(
    labels: Tensor, shuffled_ratio: float, random: np.random.Generator
) -> np.ndarray:
    """The samples sorted by label [sample], with a random fraction of them shuffled.

    Indices are sampled without replacement, and the samples at these indices are permuted
    uniformly. Raises ValueError if the fraction `shuffled_ratio` is not in [0, 1].
    """
    key, ok = "decentralized_data_shuffled_ratio", 0 <= shuffled_ratio <= 1
    accepted = "a number from 0 to 1, where 0 is sorted by label and 1 is shuffled"
    checks.check(key, shuffled_ratio, ok, accepted)
    order = labels.cpu().numpy().argsort(kind="stable")
    shuffled = random.choice(len(order), round(shuffled_ratio * len(order)), replace=False)
    order[np.sort(shuffled)] = order[shuffled]
    return order


def skewed_by_label(
    labels: Tensor, bounds: np.ndarray, alpha: float, random: np.random.Generator
) -> np.ndarray:
    """Order the samples such that worker i has label proportions q_i ~ Dirichlet(α·1): [sample].

    Worker i has the samples from bounds[i] to bounds[i + 1].

    Workers are served in order, without replacement. When a label is exhausted, its proportion goes
    to the remaining labels, in proportion to theirs. The last workers thus deviate most from q_i.
    The paper has Dirichlet(αp) with prior proportions p: for a uniform p, their α is ours times the
    number of labels.

    References:
        Hsu, Qi & Brown (2019), arXiv:1909.06335.
    """
    classes, label, available = np.unique(labels.cpu(), return_inverse=True, return_counts=True)
    shuffled = random.permutation(len(labels))
    by_label = shuffled[label[shuffled].argsort(kind="stable")]
    stop = np.cumsum(available)  # [label], the end of each label's samples in by_label
    order = []
    for size in np.diff(bounds):
        counts = apportion(size, _log_gamma_variates(alpha, len(classes), random), available)
        start = stop - available
        order += [by_label[i : i + count] for i, count in zip(start, counts, strict=True)]
        available = available - counts
    return np.concatenate(order)


def by_group(
    column: Sequence[Hashable], n_workers: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Samples with equal values in a column at one worker: order [sample], bounds [worker + 1].

    The largest group goes to the worker with the fewest samples so far, then the next one. Groups
    of one size are in random order. The largest shard then has at most 4/3 of its smallest possible
    size.

    Raises:
        ValueError: If there are fewer groups than workers.

    References:
        Graham (1969), doi:10.1137/0117039.
    """
    index: dict[Hashable, int] = {}
    group = np.array([index.setdefault(value, len(index)) for value in column])
    if len(index) < n_workers:
        raise ValueError(
            f"n_workers={n_workers}: use {len(index)} or fewer; the column of "
            f"decentralized_data_column has {len(index)} different values"
        )
    sizes = np.bincount(group)
    shuffled = random.permutation(len(sizes))
    worker_of = np.empty(len(sizes), dtype=np.int64)
    loads = [(0, worker) for worker in range(n_workers)]
    for largest in shuffled[(-sizes[shuffled]).argsort(kind="stable")].tolist():
        load, worker = loads[0]
        worker_of[largest] = worker
        heapq.heapreplace(loads, (load + int(sizes[largest]), worker))
    owners = worker_of[group]
    ends = np.cumsum(np.bincount(owners, minlength=n_workers))
    return owners.argsort(kind="stable"), np.concatenate([[0], ends])


def apportion(size: int, log_weights: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Number of samples of each label [label], `size` in total and at most `available` of each.

    The numbers are proportional to exp(log_weights) among the labels that are not exhausted. They
    are rounded by the largest remainder method.
    """
    exact = np.zeros(len(available))
    open_ = available > 0  # labels that are not exhausted
    while open_.any():
        weights = np.exp(
            log_weights - log_weights[open_].max(), where=open_, out=np.zeros(len(open_))
        )
        wanted = (size - exact[~open_].sum()) * weights / weights.sum()
        exhausted = open_ & (wanted >= available)
        exact = np.where(open_, np.minimum(wanted, available), exact)
        if not exhausted.any():
            break
        open_ = open_ & ~exhausted
    counts = np.floor(exact).astype(np.int64)
    by_remainder = (counts - exact).argsort(kind="stable")
    counts[by_remainder[: size - counts.sum()]] += 1
    return counts


def _log_gamma_variates(alpha: float, count: int, random: np.random.Generator) -> np.ndarray:
    """Logarithms of independent Gamma(α) variates. Normalized variates are Dirichlet(α·1).

    G_α = G_{α+1} U^{1/α}, U uniform.

    Logarithms, because for small α all variates but one underflow, and the remaining labels would
    have no proportions once the label of that one is exhausted.

    References:
        Marsaglia & Tsang (2000), doi:10.1145/358407.358414.
    """
    alpha = float(np.clip(alpha, 1e-300, 1e300))  # the same distribution, without overflow
    uniform = 1 - random.random(count)  # never 0
    return np.log(random.standard_gamma(alpha + 1, count)) + np.log(uniform) / alpha


def _check_column(options: TaskOptions, column: Sequence[Hashable] | None) -> None:
    key = f"decentralized_data_column={options.column}"
    if column is None:
        raise ValueError(f"{key}: use null; the data of task={options.task} have no columns")
    if options.decentralized or options.dirichlet_alpha is not None:
        other = (
            "use_decentralized_data=true"
            if options.decentralized
            else f"decentralized_data_dirichlet_alpha={options.dirichlet_alpha}"
        )
        raise ValueError(f"{key}: use null with {other}")
