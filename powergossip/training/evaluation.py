"""Evaluation of the workers' models and of their mean during training.

Axes: worker (hosted by this process); D parameters of a worker.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from powergossip.network.collectives import all_reduce_cost
from powergossip.parameters import Parameters
from powergossip.tasks import MainMetric, Split, Task, main_metric
from powergossip.training.config import Settings
from powergossip.training.final_merge import recalibrate
from powergossip.training.live_models import AliveWorkers
from powergossip.training.measurements import Rows, check_finite

# Values of each worker by kind and name: float64 [worker], first of the hosted ones, then of all n.
# The kind is "batches", "squares", a split, or the tag of the mean model's rows on a split.
Columns = dict[tuple[str, str], Tensor]
BUFFERS = ""  # their name among "squares": no parameter has it
DISAGREEMENT = 0.05  # difference of the mean model's accuracy from the workers' mean
AGREEMENT = 1e-6  # consensus distance, relative to the mean model's norm, of rounding
_AT_ONCE = 2**18  # elements of all workers whose squares are in memory


class Evaluation:
    """Logs rows about the present models. All processes call its methods. No bits are counted.

    Attributes:
        mean_model: Parameters of one model: the mean of all workers' at the last evaluation.
        main_metric: Metric of the score, after the first evaluation.
        defect: After the last epoch, a sentence about workers that do not agree and a model no
            better than a guess. "" without such a defect.

    Raises:
        Diverged: In all processes, for a metric of a worker that is not finite.
    """

    def __init__(
        self,
        config: Settings,
        view: AliveWorkers,
        task: Task,
        steps_per_epoch: int,
        rows: Rows,
    ):
        self._config, self._view, self._task = config, view, task
        self._steps_per_epoch = steps_per_epoch
        model = task.model(config.architecture, config.seed)
        self.mean_model = Parameters([model], view.device, gradients=False)
        self.main_metric: MainMetric | None = None
        self.defect = ""
        self._log = rows
        self._consensus_distance = 0.0

    def __call__(self, epoch: int, step: int, sums: Mapping[str, Tensor]) -> tuple[str, float]:
        """Log the rows after this number of epochs and steps.

        `sums` are sums of the batches' metrics over the last epoch, each [worker]. Returns a text
        for the progress bar, and a score: the larger, the better. The score is the mean model's if
        that is evaluated, else the mean over workers. Validation data come before test data. The
        text is about test data if they are evaluated.
        """
        view = self._view
        # The messages are in flight while the workers' models are evaluated.
        pending = [view.start_mean(view.x, self.mean_model.x)]
        if view.buffers.numel():
            pending.append(view.start_mean(view.buffers, self.mean_model.buffers))
        columns = self._worker_columns(sums)
        mean_x, mean_buffers, *_ = [*(wait() for wait in pending), None]
        columns |= self._squares(mean_x, mean_buffers)
        if self._config.evaluate_average_model:
            columns |= self._mean_model_columns()
        gathered = self._gathered(columns)
        self._check_finite(gathered, epoch, step)

        batch_means = {name: gathered["batches", name].mean().item() for name in sums}
        for name, value in self._with_derived(batch_means).items():
            self._log(name, value, epoch, split="train")
        means = of_workers = self._log_workers(epoch, gathered)
        self._log_consensus(epoch, gathered)
        batches = self._config.options.get("num_batches_per_step", 1)
        rounds = step // (self._config.local_steps * batches)
        uncompressed = int(view.bits_to_all(view.layout.size, rounds)[0])
        self._log("uncompressed_gossip_bits", uncompressed, epoch)
        agree = self._consensus_distance <= AGREEMENT * float(self.mean_model.x.norm())
        bits = 8 * view.x.element_size() * view.layout.size
        merge = 0 if agree else all_reduce_cost(len(view.alive), bits)[0]
        self._log("merge_bits", merge, epoch)

        shown, averaged = "", self._config.evaluate_average_model
        if averaged:
            means = self._log_mean_model(epoch, gathered)
        last_means = next(iter(means.values()))
        main = self.main_metric = main_metric(self._task, last_means)
        if epoch == self._config.num_epochs:
            accuracies = last_means if main.name == "accuracy" else {}
            self.defect = self._defect(accuracies, next(iter(of_workers.values()), {}))
        if averaged:
            shown = f"mean model{_shown(main, last_means)}, "
        shown += f"consensus distance {self._consensus_distance:.2g}"
        return shown, main.score(means.get("valid", last_means))

    def _splits(self) -> list[tuple[Split, str, str]]:
        """Splits to evaluate on. Tag `split` of the workers' rows, and of the mean model's."""
        splits: list[tuple[Split, str, str]] = []
        if self._config.evaluate_test_data:
            splits.append(("test", "test", "test_avg"))
        if "valid" in self._task.samples:
            splits.append(("valid", "valid", "valid_avg"))
        if self._config.evaluate_training_data:
            splits.append(("train", "train_full", "train_avg"))
        return splits

    def _worker_columns(self, sums: Mapping[str, Tensor]) -> Columns:
        """The means over steps of the batches' metrics, and the metrics of each hosted model."""
        columns = {
            ("batches", name): self._view.alive_rows(total).double().cpu() / self._steps_per_epoch
            for name, total in sums.items()
        }
        for split, _, _ in self._splits() if self._config.evaluate_workers else ():
            tables = [self._means(self._task.evaluate(m, split)) for m in self._view.models]
            for name in tables[0]:
                values = [table[name] for table in tables]
                columns[split, name] = torch.tensor(values, dtype=torch.float64)
        return columns

    def _squares(self, mean_x: Tensor, mean_buffers: Tensor | None) -> Columns:
        """The squared distance of each worker to the mean, by parameter and of the buffers."""
        x, buffers, layout = self._view.x, self._view.buffers, self._view.layout
        width = max(1, _AT_ONCE // len(x))
        columns: Columns = {}
        for i, name in enumerate(self._view.names):
            (span,) = layout.spans([i])
            squares = columns["squares", name] = x.new_zeros(len(x), dtype=torch.float64)
            for part, mean in zip(
                x[:, span].split(width, 1), mean_x[span].split(width), strict=True
            ):
                squares += (part - mean).double().square_().sum(1)
        buffer_squares = x.new_zeros(len(x), dtype=torch.float64)
        if mean_buffers is not None:
            # A mask may have infinite elements, equal in all workers.
            differences = torch.where(buffers == mean_buffers, 0, buffers - mean_buffers)
            buffer_squares = differences.double().square().sum(1)
        return columns | {("squares", BUFFERS): buffer_squares}

    def _mean_model_columns(self) -> Columns:
        """The sums of metrics of the mean of all workers' models, on this process's part of data.

        They are in the row of the first hosted worker; the rows of the others are zero. Batch
        norm's running statistics are the workers' mean, or recalibrated on training data.
        """
        mean_model, processes = self.mean_model, self._view.processes
        if self._config.mean_model_statistics == "recalibrated":
            self._recalibrate()
        part, columns = (processes.rank, processes.size), {}
        for split, _, tag in self._splits():
            for name, total in self._task.evaluate(mean_model.models[0], split, part).items():
                columns[tag, name] = torch.zeros(len(self._view.workers), dtype=torch.float64)
                columns[tag, name][0] = total
        return columns

    def _gathered(self, columns: Columns) -> Columns:
        """The columns of all n workers. Gathered at once, since each gathering is a wait."""
        table = torch.stack([column.cpu() for column in columns.values()], 1)
        return dict(zip(columns, self._view.gather(table).unbind(1), strict=True))

    def _check_finite(self, gathered: Columns, epoch: int, step: int) -> None:
        """Raise Diverged for a metric of a worker's model that is infinite or NaN."""
        for split, _, _ in self._splits():
            found = self._columns_of(split, gathered)
            if not found:  # the workers' models are not evaluated
                continue
            derived = self._task.derived({name: values[0].item() for name, values in found.items()})
            for name, values in found.items():
                if name not in derived:  # a perplexity may overflow
                    check_finite(f"{split} {name}", values, step, epoch)

    def _columns_of(self, tag: str, gathered: Columns) -> dict[str, Tensor]:
        return {name: values for (of, name), values in gathered.items() if of == tag}

    def _log_workers(self, epoch: int, gathered: Columns) -> dict[Split, dict[str, float]]:
        """Log rows for each worker's model. Returns the means over workers, by split."""
        means: dict[Split, dict[str, float]] = {}
        for split, tag, _ in self._splits():
            found = self._columns_of(split, gathered)
            for name, values in found.items():
                for worker, value in zip(self._view.alive, values.tolist(), strict=True):
                    self._log(name, value, epoch, split=tag, worker=worker)
            if found:
                means[split] = {name: values.mean().item() for name, values in found.items()}
        return means

    def _log_mean_model(self, epoch: int, gathered: Columns) -> dict[Split, dict[str, float]]:
        """Log rows for the mean model. Returns its metrics, by split."""
        split_means: dict[Split, dict[str, float]] = {}
        for split, _, tag in self._splits():
            sums = self._columns_of(tag, gathered)
            split_means[split] = self._means({name: sums[name].sum().item() for name in sums})
            for name, value in split_means[split].items():
                self._log(name, value, epoch, split=tag)
        return split_means

    def _recalibrate(self) -> None:
        """Recompute the mean model's running statistics from its own activations on training data.

        Each worker contributes the same number of batches.
        """
        (model,), workers = self.mean_model.models, self._view.workers
        if recalibrate(self._task, model, workers, self._config.recalibration_batches):
            hosted_rows = self.mean_model.buffers.repeat(len(workers), 1)
            self.mean_model.buffers.copy_(self._view.mean(hosted_rows))

    def _log_consensus(self, epoch: int, gathered: Columns) -> None:
        """Log the root mean square over workers of their distance to the mean.

        Of the parameters, of parameters with running statistics, and by parameter.
        """
        found = self._columns_of("squares", gathered)
        means = {name: squares.mean().item() for name, squares in found.items()}
        buffer_squares = means.pop(BUFFERS)
        parameter_square = sum(means.values())
        whole_square = parameter_square + buffer_squares
        self._consensus_distance = math.sqrt(parameter_square)
        self._log("consensus_distance", self._consensus_distance, epoch, type="params_only")
        self._log("consensus_distance", math.sqrt(whole_square), epoch, type="full_state_vector")
        for name, square in means.items():
            self._log(
                "consensus_distance", math.sqrt(square), epoch, type="parameter", parameter=name
            )

    def _defect(self, means: Mapping[str, float], of_workers: Mapping[str, float]) -> str:
        """A sentence about models that differ by more than the norm of their mean, or in accuracy
        from it, or that are no better than a guess, up to three standard deviations."""
        found, c = [], self._config
        distance, norm = self._consensus_distance, float(self.mean_model.x.norm())
        if distance > norm:
            found.append(
                f"the workers do not agree, since the consensus distance of {distance:.3g} exceeds "
                f"the norm of their mean model, {norm:.3g}"
            )
        own, of_mean = (values.get("accuracy", math.nan) for values in (of_workers, means))
        if not found and abs(of_mean - own) > DISAGREEMENT:
            found.append(
                f"the workers do not agree, since their accuracies are {own:.1%} on average, and "
                f"their mean model's is {of_mean:.1%}"
            )
        counts, samples = self._task.label_counts(), self._task.samples[self._splits()[0][0]]
        if "accuracy" in means and counts is not None:
            guess = float(counts.sum(0).max() / counts.sum())
            if means["accuracy"] <= guess + 3 * math.sqrt(guess * (1 - guess) / samples):
                model = "mean model is" if c.evaluate_average_model else "workers are"
                found.append(
                    f"the {model} no better than a guess, since the most frequent label has "
                    f"{guess:.2%} of the training data"
                )
        rates = "learning_rate or optimizer_diffusion_rate"
        rates = rates if "diffusion_rate" in c.options else "learning_rate"
        return (
            f"{', and '.join(found)}; train for longer, or use a smaller {rates}" if found else ""
        )

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn {metric: sum, "count": samples} into {metric: mean}, with derived metrics."""
        count = sums["count"]
        return self._with_derived({k: v / count for k, v in sums.items() if k != "count"})

    def _with_derived(self, means: dict[str, float]) -> dict[str, float]:
        return means | self._task.derived(means)

    def log_spectra(self, epoch: int) -> None:
        """Log the singular values of the difference of two workers' matrices, largest first."""
        layout, names = self._view.layout, self._view.names
        for parameter in self._config.spectrum_logging_params:
            (span,) = layout.spans([names.index(parameter)])
            shape = layout.shapes[names.index(parameter)]
            everyone = self._view.gather(self._view.x[:, span])  # [worker, element]
            for first, second in self._config.spectrum_logging_worker_pairs:
                difference = (everyone[first] - everyone[second]).view(shape[0], -1)
                for index, value in enumerate(torch.linalg.svdvals(difference).tolist()):
                    self._log(
                        "spectrum",
                        value,
                        epoch,
                        index=index,
                        workers=f"{first}-{second}",
                        parameter=parameter,
                    )


def _shown(main: MainMetric, means: Mapping[str, float]) -> str:
    """The main metric for the progress bar. Of language models, the perplexity."""
    if "perplexity" in means:
        return f"'s perplexity {means['perplexity']:.1f}"
    if main.name == "accuracy":
        return f" {100 * means['accuracy']:.1f} %"
    return f"'s {main.name.replace('_', ' ')} {means[main.name]:.4g}"
