"""A task made of map-style data sets, with a model, a loss and metrics of the user.

Axis names: sample, worker, label.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import IterableDataset, default_collate

from powergossip.errors import BadInput
from powergossip.randomness import torch_seed
from powergossip.state_trees import sha256
from powergossip.tasks import modules
from powergossip.tasks.loading import Loader, Pending, Request, SampleSource, on_device
from powergossip.tasks.losses import IGNORED_TARGET, Metric, default_loss
from powergossip.tasks.sample_values import as_list, integers, sample_attribute
from powergossip.tasks.shards import NOBODY, Partition, held_out
from powergossip.tasks.task import FIRST, NAMES, MainMetric, Split, TaskOptions
from powergossip.user_functions import Named, users_code

EVALUATION_BATCHES = 2  # training batches in one of evaluation, which needs no gradients
_Ahead = deque[tuple[int, Pending]]  # step, its batch


@dataclass(frozen=True)
class Datasets:
    """Data sets of the user, and optionally a model, a loss and metrics.

    By default a batch is (inputs, ..., targets) as torch's default_collate makes it, and the
    outputs are model(inputs, ...). The loss is the cross entropy [nats] for integer targets, with
    the labels on the last axis of the outputs, and the metric accuracy beside it. Targets of −100
    are ignored. For floating-point targets it is the mean squared error. A loss is logged as
    cross_entropy or mse, or as loss if it is given. The main metric is the accuracy, or else the
    loss. Labels are the `targets` of the training data.

    Attributes:
        train: Training data, map-style: d[i] for 0 ≤ i < len(d). A sample is (input, ..., target).
        test: Test data, in the same form.
        valid: Validation data, in the same form, for rows valid and valid_avg. None: see
            validation_ratio.
        model: Function that returns the model. None: task_architecture is required.
        model_arguments: Values that follow from the data, for parameters of the model of these
            names, such as {"n_features": 12}.
        loss: loss(outputs, targets), the mean over the batch, a scalar tensor.
        metrics: Functions metric(outputs, targets) by name, each a mean over the batch.
        derived: Function of the means of the metrics that returns further metrics, such as {"rmse":
            mse ** 0.5}.
        main_metric: The metric that chooses the best checkpoint.
        larger_is_better: True if a larger main metric is better. It may be omitted for accuracy and
            for the loss.
        forward: forward(model, batch), which returns (outputs, targets).
        collate: Function of a list of samples that returns a batch.
        labels: Labels of the training data: an integer for each sample, for partitions by label.
            They are needed for these where the training data have no `targets`.
        columns: Columns of the training data by name, with a value for each sample, for partitions
            by column. A DataFrame is possible.
    """

    train: Any
    test: Any
    _: KW_ONLY
    valid: Any = None
    model: Callable[..., nn.Module] | None = None
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    loss: Metric | None = None
    metrics: Mapping[str, Metric] | None = None
    derived: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None
    main_metric: str | None = None
    larger_is_better: bool | None = None
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    labels: Any = None
    columns: Any = None


class DatasetTask(modules.ModelTask):
    """A `Task` on `Datasets`. A batch is what `collate` makes of samples, on the task's device.

    Samples are loaded when they are needed, with options.data_processes > 0 ahead of time by other
    processes. During this, the global generators of Python, NumPy and torch are seeded with (seed,
    epoch, worker, step): random augmentation is the same in any layout, and after a resume.
    """

    redistributes: ClassVar[bool] = True

    def __init__(self, datasets: Datasets, options: TaskOptions) -> None:
        """Raises ValueError if the options do not match the data, or if a field is wrong."""
        self._datasets, self._options = datasets, options
        self._place = place = f"task={options.task}"
        _check_fields(datasets, place)
        sets = {"train": datasets.train, "test": datasets.test}
        if datasets.valid is not None:
            sets["valid"] = datasets.valid
        sizes = {name: _size(data, f"{place}: the data set {name}") for name, data in sets.items()}
        collate = datasets.collate or default_collate
        self._loader = Loader(SampleSource(sets, collate), place, options.data_processes)
        # worker → epoch, lost workers, and batches of its next steps
        self._ahead: dict[int, tuple[tuple[int, frozenset[int]], _Ahead]] = {}
        self._evaluation_size = EVALUATION_BATCHES * options.batch_size  # samples in a batch

        needs_labels = options.decentralized or options.dirichlet_alpha is not None
        labels = self._find_labels(sizes["train"], needs_labels)
        held = self._held_out(labels, sizes["train"])
        kept = np.flatnonzero(~held)
        self._indices: dict[Split, np.ndarray] = {"train": kept, "test": np.arange(sizes["test"])}
        self._data: dict[Split, str] = {"train": "train", "test": "test", "valid": "valid"}
        if datasets.valid is not None:
            self._indices["valid"] = np.arange(sizes["valid"])
        elif held.any():
            self._indices["valid"], self._data["valid"] = np.flatnonzero(held), "train"

        self._labels = None if labels is None else labels[torch.from_numpy(kept)]
        column = None
        if options.column is not None:
            values = self._column(options.column, sizes["train"])
            column = [values[i] for i in kept.tolist()]
        unlabeled = torch.zeros(len(kept), dtype=torch.int64)
        on_cpu = replace(options, device=torch.device("cpu"))
        self._shards = Partition(
            unlabeled if self._labels is None else self._labels, on_cpu, column
        )
        self.steps_per_epoch = self._shards.steps_per_epoch
        self.samples = {split: len(indices) for split, indices in self._indices.items()}
        super().__init__(self._models(), options.device)

    # --- Data ---

    def _find_labels(self, size: int, needed: bool) -> Tensor | None:
        """A label for each training sample: int64 [sample], from 0 on. None if not known.

        Raises ValueError if labels are needed, or given, and are not an integer for each sample.
        """
        given = self._datasets.labels
        found = sample_attribute(self._datasets.train, "targets") if given is None else given
        labels = integers(found, size)
        if labels is None and (needed or given is not None):
            raise ValueError(
                f"{self._place}: a partition by label needs an integer for each of the {size} "
                "training samples; give labels to Datasets"
            )
        return None if labels is None else labels.unique(return_inverse=True)[1]

    def _held_out(self, labels: Tensor | None, size: int) -> np.ndarray:
        """True where a training sample is held out for validation: bool [sample]."""
        ratio = self._options.validation_ratio
        if self._datasets.valid is not None and ratio:
            raise ValueError(
                f"validation_ratio={ratio}: use 0; {self._place} has validation data of its own"
            )
        unlabeled = torch.zeros(size, dtype=torch.int64)
        return held_out(unlabeled if labels is None else labels, ratio)

    def _column(self, name: str, size: int) -> list[Any]:
        """The value of each training sample in a column. Raises ValueError."""
        key, columns = f"decentralized_data_column={name}", self._datasets.columns
        if columns is not None and name in columns:
            values = as_list(columns[name])
        else:
            values = as_list(sample_attribute(self._datasets.train, name))
        if values is None:
            known = ", ".join(map(str, columns)) if columns is not None else ""
            raise ValueError(
                f"{key}: {self._place} has no such column; use "
                f"{known or 'null, or give columns to Datasets'}"
            )
        if len(values) != size:
            raise ValueError(
                f"{key}: the column has {len(values)} values; give one for each of the {size} "
                "training samples"
            )
        return values

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the labels, if they are known, of the first samples and of worker 0's shard.

        Samples are loaded twice, one after the other. Tensors that differ are random.
        """
        found = {} if self._labels is None else {"the training labels": sha256(self._labels)}
        for split, indices in self._indices.items():
            twice = 2 * tuple(indices[:FIRST].tolist())
            batch = self._loader.request(Request(self._data[split], twice, 0)).wait()
            for i, tensor in enumerate(tree_flatten(batch)[0]):
                if isinstance(tensor, Tensor) and tensor.shape[:1] == (len(twice),):
                    first, again = map(sha256, tensor.chunk(2))
                    if first == again:
                        found[f"the first {NAMES[split]} samples (tensor {i})"] = first
        return found | {"the shards": sha256(self._shards.indices(0, 0))}

    def label_counts(self, epoch: int = 0) -> Tensor | None:
        """Number of samples per worker and label in an epoch: int64 [worker, label].

        None if labels are not known without loading all samples.
        """
        if self._labels is None:
            return None
        return self._shards.label_counts(self._labels, int(self._labels.max()) + 1, epoch)

    def batch(self, worker: int, epoch: int, step: int, lost: frozenset[int] = NOBODY) -> Any:
        """The batch of a worker at a step of an epoch, 0 ≤ step < steps_per_epoch.

        Args:
            lost: Workers whose samples the others have, see Partition.
        """
        assert 0 <= step < self.steps_per_epoch
        known, ahead = self._ahead.get(worker, (None, deque()))
        if known != (epoch, lost):
            _cancel(ahead)
            ahead = deque()
            self._ahead[worker] = (epoch, lost), ahead
        if not ahead or ahead[0][0] != step:
            _cancel(ahead)
            ahead.append((step, self._request(worker, epoch, step, lost)))
        _, pending = ahead.popleft()
        # The processes serve all workers that ask.
        last = min(step + -(-self._loader.ahead // len(self._ahead)), self.steps_per_epoch - 1)
        for following in range(ahead[-1][0] + 1 if ahead else step + 1, last + 1):
            ahead.append((following, self._request(worker, epoch, following, lost)))
        return _moved(pending.wait(), self._options.device)

    def _request(self, worker: int, epoch: int, step: int, lost: frozenset[int]) -> Pending:
        positions = self._shards.batch(worker, epoch, step, lost)
        samples = tuple(self._indices["train"][positions.numpy()].tolist())
        seed = torch_seed(self._options.seed, "samples", epoch, worker, step)
        return self._loader.request(Request("train", samples, seed))

    def close(self) -> None:
        """End the processes that load data. The next batch starts others."""
        self._ahead = {}
        self._loader.close()

    # --- Model ---

    def _models(self) -> modules.Architectures:
        """Name → a function that builds the model. Raises ValueError without a model."""
        datasets, options = self._datasets, self._options
        build: modules.Architectures = {}
        if datasets.model is not None and options.architecture is None:
            name = getattr(datasets.model, "__name__", "model")
            own = Named(f"the model of {self._place}", name, datasets.model)
            options = replace(options, architecture=own)
        if options.architecture is None:
            raise ValueError(
                f"task_architecture: use package.module:callable; {self._place} has no model"
            )
        return modules.with_own(build, options, datasets.model_arguments)

    # --- Loss and metrics ---

    @property
    def main_metric(self) -> MainMetric | None:
        """The metric that chooses the best checkpoint. None: accuracy, or else the loss."""
        name, higher = self._datasets.main_metric, self._datasets.larger_is_better
        if name is None:
            return None
        return MainMetric(name, name == "accuracy" if higher is None else higher)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, and the metrics: the loss and the data sets' metrics."""
        outputs, targets = self._forward(model, batch)
        return self._measured(outputs, targets)

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Outputs of the model and targets of a batch."""
        if self._datasets.forward is not None:
            found = self._datasets.forward(model, batch)
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise BadInput(f"{self._place}: let forward return two values, outputs and targets")
            return found[0], found[1]
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise BadInput(
                f"{self._place}: a batch is a {type(batch).__name__}; let a sample be (input, "
                "target), or give forward to Datasets"
            )
        *inputs, targets = batch
        return model(*inputs), targets

    def _measured(self, outputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the metrics of a batch. Each metric is detached."""
        metrics = self._datasets.metrics
        name, batch_loss = "loss", self._datasets.loss
        if batch_loss is None:
            name, batch_loss, own = default_loss(outputs, targets, self._place)
            metrics = own if metrics is None else metrics
        if metrics and name in metrics:
            raise BadInput(f'{self._place}: a metric is called "{name}", as the loss; rename it')
        loss = batch_loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise BadInput(f"{self._place}: the loss is {_described(loss)}; use a scalar tensor")
        with torch.no_grad():
            values = {name: loss} | {
                name: metric(outputs, targets) for name, metric in (metrics or {}).items()
            }
            dtype = torch.promote_types(loss.dtype, torch.float32)
            return loss, {
                name: torch.as_tensor(
                    self._number(name, value), dtype=dtype, device=loss.device
                ).detach()
                for name, value in values.items()
            }

    def _number(self, name: str, value: Any) -> Any:
        """A metric of a batch. Raises BadInput unless it is a number."""
        if value.ndim if isinstance(value, Tensor) else not isinstance(value, Real):
            raise BadInput(
                f"{self._place}: the metric {name} of a batch is {_described(value)}; return a "
                "number, the mean over the batch"
            )
        return value

    def evaluate(
        self, model: nn.Module, split: Split = "test", part: tuple[int, int] = (0, 1)
    ) -> dict[str, float]:
        """Sums of the loss and the metrics over the i-th of n parts of a split, part = (i, n).

        The mean over a batch counts with its number of samples, or of targets that are not ignored
        where the loss is the default one. "count" is the sum of these numbers. A part consists of
        whole batches, so that the total over all parts does not depend on n. Samples of the
        training data are loaded as in training, including random augmentation.
        """
        i, n = part
        assert 0 <= i < n
        batches = range(-(-len(self._indices[split]) // self._evaluation_size))
        first, last = (len(batches) * bound // n for bound in (i, i + 1))
        sums: dict[str, Tensor] = {}
        count = 0.0
        # A batch stands for an empty part and counts 0 times: all parts have metrics of the same
        # names.
        chosen = batches[first:last] or batches[:1]
        with torch.no_grad(), modules.evaluation_mode(model):
            for samples, batch in self._evaluation_batches(split, chosen):
                outputs, targets = self._forward(model, _moved(batch, self._options.device))
                weight = self._weight(targets, samples) if first < last else 0.0
                _, means = self._measured(outputs, targets)
                for name, mean in means.items():
                    # Not mean · 0: a metric of the user may be NaN where all targets are ignored.
                    value = mean.double() * weight if weight else torch.zeros_like(mean).double()
                    sums[name] = sums[name] + value if name in sums else value
                count += weight
        return {name: value.item() for name, value in sums.items()} | {"count": count}

    def _evaluation_batches(self, split: Split, chosen: range) -> Iterator[tuple[int, Any]]:
        """Numbers of samples, and batches, of these batches of a split."""
        size = self._evaluation_size
        samples = {
            i: tuple(self._indices[split][i * size : (i + 1) * size].tolist()) for i in chosen
        }
        loaded = self._loader.in_order(
            Request(self._data[split], samples[i], torch_seed(0, "evaluation", i)) for i in chosen
        )
        for i, batch in zip(chosen, loaded, strict=True):
            yield len(samples[i]), batch

    def _weight(self, targets: Any, samples: int) -> float:
        """The weight of a batch in the mean over all."""
        if self._datasets.loss is None and not targets.is_floating_point():
            return float((targets != IGNORED_TARGET).sum().item())
        return float(samples)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further metrics, as functions of the means of the metrics."""
        if self._datasets.derived is None:
            return {}
        found = self._datasets.derived(means)
        if not isinstance(found, Mapping):
            raise BadInput(f"{self._place}: derived returned {_described(found)}; return a dict")
        return dict(found)


# --- Checks and conversions ---


def _check_fields(datasets: Datasets, place: str) -> None:
    """Raise ValueError for a field of a wrong type."""
    if isinstance(datasets.model, nn.Module):
        raise ValueError(
            f"{place}: model is a module; give a function that returns a new one, such as its class"
        )
    for name in ("model", "loss", "derived", "forward", "collate"):
        value = getattr(datasets, name)
        if value is not None and not callable(value):
            raise ValueError(f"{place}: {name} is {_described(value)}; use a function, or None")
    for name in ("metrics", "model_arguments"):
        value = getattr(datasets, name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{place}: {name} is {_described(value)}; use a dict")
    for name, metric in (datasets.metrics or {}).items():
        if not callable(metric):
            raise ValueError(
                f"{place}: the metric {name} is {_described(metric)}; use a function of outputs "
                "and targets"
            )
    known = ("accuracy", "cross_entropy", "mse", "loss", None)
    if datasets.larger_is_better is None and datasets.main_metric not in known:
        raise ValueError(
            f"{place}: main_metric={datasets.main_metric} needs larger_is_better=True or False"
        )


def _size(data: Any, place: str) -> int:
    """The number of samples. Raises ValueError unless it is a map-style data set with some."""
    is_map = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not is_map or not hasattr(data, "__len__"):
        raise ValueError(
            f"{place} is {_described(data)}; use a map-style data set, with __getitem__ and __len__"
        )
    with users_code(f"the length of {place}"):
        size = len(data)
    if size < 1:
        raise ValueError(f"{place} is empty; use one with samples")
    return size


def _cancel(ahead: _Ahead) -> None:
    """Empty the queue of batches."""
    while ahead:
        ahead.popleft()[1].cancel()


def _described(value: object) -> str:
    """The type of a value, and the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of the shape {list(value.shape)} and type {value.dtype}"
    return f"of the type {type(value).__name__}"


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors, and other parts that have a method `to`, on a device."""

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            return on_device(part, device)
        return part.to(device) if hasattr(part, "to") else part

    return tree_map(moved, batch, is_leaf=lambda part: hasattr(part, "to"))
