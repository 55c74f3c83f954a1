"""Which samples each worker has, and in which order it sees them."""

import numpy as np
import torch
from torch import Tensor

from randomness import generator
from tasks.task import Options


class Shards:
    """The samples 0 … n−1 dealt out to workers; every sample has exactly one worker in an epoch.

    Shards differ in size by at most one. An epoch's order is computed when first asked for, and
    only the latest is kept.
    """

    def __init__(self, labels: Tensor, options: Options) -> None:
        """labels: int64 [sample]. Raises ValueError if the options do not fit the data."""
        n_samples, n_workers, batch_size = len(labels), options.n_workers, options.batch_size
        if n_workers < 1:
            raise ValueError(f"n_workers={n_workers} is not possible; use at least 1")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not possible; use at least 1")
        smallest = n_samples // n_workers
        if batch_size > smallest:
            remedies = {"batch_size": smallest, "n_workers": n_samples // batch_size}
            remedy = " or ".join(f"{key} ≤ {most}" for key, most in remedies.items() if most)
            raise ValueError(
                f"batch_size={batch_size} is larger than the smallest shard: {n_samples} samples "
                f"for {n_workers} workers are {smallest} for each; use {remedy or 'fewer of both'}"
            )
        self.steps_per_epoch = smallest // batch_size
        self._seed = options.seed
        self._device = options.device
        self._bounds = np.arange(n_workers + 1) * n_samples // n_workers  # [worker + 1]
        self._fixed: np.ndarray | None = None  # [sample], worker after worker
        if options.decentralized:
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
