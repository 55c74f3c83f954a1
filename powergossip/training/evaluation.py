"""Evaluation of the workers' models and of their mean during training.

Axes: worker (hosted by this process); D parameters of a worker.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from powergossip.network import Network
from powergossip.parameters import Parameters
from powergossip.tasks import MainMetric, Split, Task, main_metric
from powergossip.training.event_training import PresentParameters, Survivors
from powergossip.training.measurements import Rows, check_finite


class Evaluation:
    """Logs rows about the present models. All processes call its methods; no bits are counted.

    mean_model   # Parameters of one model: the mean of all workers' at the last evaluation
    main_metric  # the one of the score, after the first evaluation

    Raises Diverged, in all processes, for a metric of a worker that is not finite.
    """

    def __init__(
        self,
        config: Any,
        network: Network | Survivors,
        task: Task,
        parameters: Parameters | PresentParameters,
        steps_per_epoch: int,
        rows: Rows,
    ):
        self._config, self._network, self._task = config, network, task
        self._parameters, self._steps_per_epoch = parameters, steps_per_epoch
        model = task.model(config.task_architecture, config.seed)
        self.mean_model = Parameters([model], network.device)
        self.main_metric: MainMetric | None = None
        self._log = rows
        self._consensus_distance = 0.0

    def __call__(self, epoch: int, step: int, sums: Mapping[str, Tensor]) -> tuple[str, float]:
        """Log the rows after this number of epochs and steps.

        `sums` are those of the batches' metrics over the last epoch, each [worker]. Returns a text
        for the progress bar, and a score: the larger, the better. It is that of the mean model if
        it is evaluated, else the mean over workers; on validation data if there are any, else on
        test data. The text is about test data if they are evaluated.
        """
        network = self._network
        of_batches, of_workers = self._measure_workers(epoch, step, sums)
        for name, value in self._with_derived(of_batches).items():
            self._log(name, value, epoch, split="train")
        means = self._log_workers(epoch, of_workers) if of_workers else {}
        parameters = self._parameters
        mean_x = network.mean(parameters.x)
        mean_buffers = network.mean(parameters.buffers) if parameters.buffers.numel() else None
        self._log_consensus(epoch, mean_x, mean_buffers)
        batches = getattr(self._config, "optimizer_num_batches_per_step", None) or 1
        rounds = step // (self._config.local_steps * batches)
        uncompressed = int(network.bits_to_all(self._parameters.layout.size, rounds)[0])
        self._log("uncompressed_gossip_bits", uncompressed, epoch)

        shown, averaged = "", self._config.evaluate_average_model
        if averaged:
            means = self._of_mean_model(epoch, mean_x, mean_buffers)
        of_shown = next(iter(means.values()))
        main = self.main_metric = main_metric(self._task, of_shown)
        if averaged:
            shown = f"mean model{_shown(main, of_shown)}, "
        shown += f"consensus distance {self._consensus_distance:.2g}"
        return shown, main.score(means.get("valid", of_shown))

    def _splits(self) -> list[tuple[Split, str, str]]:
        """Splits to evaluate on; tag `split` of the workers' rows, and of the mean model's."""
        splits: list[tuple[Split, str, str]] = []
        if self._config.evaluate_test_data:
            splits.append(("test", "test", "test_avg"))
        if "valid" in self._task.samples:
            splits.append(("valid", "valid", "valid_avg"))
        if self._config.evaluate_training_data:
            splits.append(("train", "train_full", "train_avg"))
        return splits

    def _measure_workers(
        self, epoch: int, step: int, sums: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], dict[Split, dict[str, Tensor]]]:
        """Measure the hosted workers and gather all values at once: each gathering is a wait.

        Returns the mean over steps and workers of each metric of the batches, and the metrics of
        each worker's model by split and name, each [worker], for all n.
        """
        splits = [split for split, _, _ in self._splits()] if self._config.evaluate_workers else []
        tables = {
            split: [self._means(self._task.evaluate(m, split)) for m in self._parameters.models]
            for split in splits
        }
        columns = [total.double().cpu() / self._steps_per_epoch for total in sums.values()]
        for of_hosted in tables.values():
            for name in of_hosted[0]:
                column = [table[name] for table in of_hosted]
                columns.append(torch.tensor(column, dtype=torch.float64))
        if not columns:  # nothing to measure before the first step
            return {}, {}
        gathered = iter(self._network.gather(torch.stack(columns, 1)).unbind(1))
        of_batches = {name: next(gathered).mean().item() for name in sums}
        found: dict[Split, dict[str, Tensor]] = {}
        for split, of_hosted in tables.items():
            found[split] = {name: next(gathered) for name in of_hosted[0]}
            derived = self._task.derived(of_hosted[0])  # a perplexity may overflow
            for name, values in found[split].items():
                if name not in derived:
                    check_finite(f"{split} {name}", values, step, epoch)
        return of_batches, found

    def _log_workers(
        self, epoch: int, measured: Mapping[Split, Mapping[str, Tensor]]
    ) -> dict[Split, dict[str, float]]:
        """Log rows for each worker's model. Returns the means over workers, by split."""
        for split, workers_rows, _ in self._splits():
            for name, values in measured[split].items():
                for worker, value in zip(self._network.present, values.tolist(), strict=True):
                    self._log(name, value, epoch, split=workers_rows, worker=worker)
        return {
            split: {name: values.mean().item() for name, values in found.items()}
            for split, found in measured.items()
        }

    def _of_mean_model(
        self, epoch: int, mean_x: Tensor, mean_buffers: Tensor | None
    ) -> dict[Split, dict[str, float]]:
        """Log rows for the mean of all workers' models. Returns its metrics, by split.

        Batch norm's running statistics are the workers' mean, or recalibrated on training data.
        """
        processes = self._network.processes
        mean_model, of_splits = self.mean_model, dict[Split, dict[str, float]]()
        mean_model.x.copy_(mean_x)
        if mean_buffers is not None:
            mean_model.buffers.copy_(mean_buffers)
        if self._config.mean_model_statistics == "recalibrated":
            self._recalibrate()
        part = processes.rank, processes.size
        parts = {
            s: self._task.evaluate(mean_model.models[0], s, part) for s, _, _ in self._splits()
        }
        own = np.array([value for sums in parts.values() for value in sums.values()])
        totals = iter(processes.sum(own).tolist())
        for split, _, rows in self._splits():
            of_splits[split] = self._means({name: next(totals) for name in parts[split]})
            for name, value in of_splits[split].items():
                self._log(name, value, epoch, split=rows)
        return of_splits

    def _recalibrate(self) -> None:
        """Recompute the mean model's running statistics from its own activations on training data.

        Each worker contributes the same number of batches.
        """
        (model,) = self.mean_model.models
        layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not layers:
            return
        momenta = [layer.momentum for layer in layers]
        batches = min(self._config.recalibration_batches, self._task.steps_per_epoch)
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        carried = self._task.carried(model)
        with torch.no_grad():
            for worker in self._network.workers:
                for step in range(batches):
                    self._task.loss(model, self._task.batch(worker, 0, step))
        self._task.carry(model, carried)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        hosted_rows = self.mean_model.buffers.repeat(self._network.hosted, 1)
        self.mean_model.buffers.copy_(self._network.mean(hosted_rows))

    def _log_consensus(self, epoch: int, mean_x: Tensor, mean_buffers: Tensor | None) -> None:
        """Log the root mean square over workers of their distance to the mean.

        Of the parameters, of parameters with running statistics, and by parameter.
        """
        network, parameters = self._network, self._parameters
        x, buffers = parameters.x, parameters.buffers
        squares = (x - mean_x).double().square()
        numbers = range(len(parameters.names))
        spans = [span for i in numbers for span in parameters.layout.spans([i])]
        by_parameter = torch.stack([squares[:, span].sum(1) for span in spans], 1)
        of_buffers = squares.new_zeros(len(x), 1)
        if mean_buffers is not None:
            # A mask may have infinite elements, equal in all workers.
            differences = torch.where(buffers == mean_buffers, 0, buffers - mean_buffers)
            of_buffers = differences.double().square().sum(1, keepdim=True)
        totals = torch.cat([by_parameter, of_buffers], 1)  # [worker, parameter and buffers]
        means = network.mean(totals).tolist()
        of_parameters, of_all = sum(means[:-1]), sum(means)
        self._log("consensus_distance", math.sqrt(of_parameters), epoch, type="params_only")
        self._log("consensus_distance", math.sqrt(of_all), epoch, type="full_state_vector")
        for name, square in zip(parameters.names, means, strict=False):
            self._log(
                "consensus_distance", math.sqrt(square), epoch, type="parameter", parameter=name
            )
        self._consensus_distance = math.sqrt(of_parameters)

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn {metric: sum, "count": samples} into {metric: mean}, with derived metrics."""
        count = sums["count"]
        return self._with_derived({k: v / count for k, v in sums.items() if k != "count"})

    def _with_derived(self, means: dict[str, float]) -> dict[str, float]:
        return means | self._task.derived(means)

    def log_spectra(self, epoch: int) -> None:
        """Log the singular values of the difference of two workers' matrices, largest first."""
        layout, names = self._parameters.layout, self._parameters.names
        for parameter in self._config.spectrum_logging_params:
            (span,) = layout.spans([names.index(parameter)])
            shape = layout.shapes[names.index(parameter)]
            everyone = self._network.gather(self._parameters.x[:, span])  # [worker, element]
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
    return f"'s {main.name} {means[main.name]:.4g}"
