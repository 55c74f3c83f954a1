"""What the workers' models, and their mean, are worth while they learn: rows for metrics.jsonl.

Axes: worker (hosted by this process), D numbers of a worker's model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from powergossip.network import Network
from powergossip.parameters import Parameters
from powergossip.tasks import Split, Task

Log = Callable[..., None]  # (name, value, epoch, **tags)


class Evaluation:
    """Measures the models as they are. All its methods are called by all processes; what they send
    is not counted.

    refuse_divergence(worker, what, value, epoch) raises for a value that is not finite
    """

    def __init__(
        self,
        config: Any,
        network: Network,
        task: Task,
        parameters: Parameters,
        mean_model: Parameters,
        steps_per_epoch: int,
        log: Log,
        refuse_divergence: Callable[[int, str, float, int], None],
    ):
        self._config, self._network, self._task = config, network, task
        self._parameters, self._mean_model = parameters, mean_model
        self._steps_per_epoch = steps_per_epoch
        self._log, self._refuse_divergence = log, refuse_divergence
        self._consensus_distance = 0.0

    def __call__(self, epoch: int, step: int, sums: Mapping[str, Tensor]) -> tuple[str, float]:
        """Rows on the models as they are after so many epochs and steps; `sums` are those of the
        batches' metrics over the last epoch, each [worker].

        Returns what the progress bar says, and a score: the larger, the better.
        """
        network, steps = self._network, self._steps_per_epoch
        of_batches = {
            name: network.gather(total.double() / steps).mean().item()
            for name, total in sums.items()
        }
        for name, value in self._with_derived(of_batches).items():
            self._log(name, value, epoch, split="train")
        mean_of_workers = self._of_workers(epoch)
        self._log_consensus(epoch)
        rounds = step // self._config.local_steps
        uncompressed = int(network.bits_to_all(self._parameters.layout.size, rounds)[0])
        self._log("uncompressed_gossip_bits", uncompressed, epoch)

        shown, of_mean_model = "", {}
        if self._config.evaluate_average_model:
            of_mean_model = self._of_mean_model(epoch)
            if "accuracy" in of_mean_model:
                shown = f"mean model {100 * of_mean_model['accuracy']:.1f} %, "
            if "perplexity" in of_mean_model:
                shown = f"mean model's perplexity {of_mean_model['perplexity']:.1f}, "
        means = of_mean_model or mean_of_workers
        by_accuracy = "accuracy" in means and "perplexity" not in means
        score = means["accuracy"] if by_accuracy else -means["cross_entropy"]
        return f"{shown}consensus distance {self._consensus_distance:.2g}", score

    def _splits(self) -> list[tuple[Split, str, str]]:
        """What to evaluate on, and the names that workers' and the mean model's rows have there."""
        splits: list[tuple[Split, str, str]] = [("test", "test", "test_avg")]
        if self._config.evaluate_training_data:
            splits.append(("train", "train_full", "train_avg"))
        return splits

    def _of_workers(self, epoch: int) -> dict[str, float]:
        """Rows for each worker's model; the means over workers on test data."""
        network, means = self._network, dict[str, float]()
        for split, workers_rows, _ in self._splits():
            tables = [self._means(self._task.evaluate(m, split)) for m in self._parameters.models]
            for name in tables[0]:
                for worker, table in zip(network.workers, tables, strict=True):
                    if name != "perplexity":  # which may overflow
                        # the update of the last step is seen here first
                        self._refuse_divergence(worker, f"{split} {name}", table[name], epoch)
                of_hosted = torch.tensor([table[name] for table in tables], dtype=torch.float64)
                values = network.gather(of_hosted)
                for worker, value in enumerate(values.tolist()):
                    self._log(name, value, epoch, split=workers_rows, worker=worker)
                if split == "test":
                    means[name] = values.mean().item()
        return means

    def _of_mean_model(self, epoch: int) -> dict[str, float]:
        """Rows for the mean of all workers' models; its means on test data.

        Batch norm's running statistics are the workers' averaged, or taken anew from training data.
        """
        who, network = self._network.processes, self._network
        mean_model, of_test = self._mean_model, dict[str, float]()
        mean_model.x.copy_(network.mean(self._parameters.x))
        mean_model.buffers.copy_(network.mean(self._parameters.buffers))
        if self._config.mean_model_statistics == "recalibrated":
            self._recalibrate()
        for split, _, rows in self._splits():
            part = self._task.evaluate(mean_model.models[0], split, (who.rank, who.size))
            sums = who.sum(np.array(list(part.values()))).tolist()
            means = self._means(dict(zip(part, sums, strict=True)))
            for name, value in means.items():
                self._log(name, value, epoch, split=rows)
            if split == "test":
                of_test = means
        return of_test

    def _recalibrate(self) -> None:
        """Give the mean model the statistics that its own activations have on training data: of as
        many batches of each worker."""
        (model,) = self._mean_model.models
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
        hosted_rows = self._mean_model.buffers.repeat(self._network.hosted, 1)
        self._mean_model.buffers.copy_(self._network.mean(hosted_rows))

    def _log_consensus(self, epoch: int) -> None:
        """How far workers are from their mean, as the root of the mean square over workers: in all,
        with running statistics, and by parameter."""
        network, parameters = self._network, self._parameters
        x, buffers = parameters.x, parameters.buffers
        squares = (x - network.mean(x)).double().square()
        numbers = range(len(parameters.names))
        spans = [span for i in numbers for span in parameters.layout.spans([i])]
        by_parameter = torch.stack([squares[:, span].sum(1) for span in spans], 1)
        of_buffers = (buffers - network.mean(buffers)).double().square().sum(1, keepdim=True)
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
        """{metric: sum, "count": samples} as {metric: mean}, and what follows from the means."""
        count = sums["count"]
        return self._with_derived({k: v / count for k, v in sums.items() if k != "count"})

    def _with_derived(self, means: dict[str, float]) -> dict[str, float]:
        return means | self._task.derived(means)

    def log_spectra(self, epoch: int) -> None:
        """Singular values of the difference of two workers' matrices, largest first."""
        layout, names = self._parameters.layout, self._parameters.names
        for parameter in self._config.spectrum_logging_params:
            (span,) = layout.spans([names.index(parameter)])
            shape = layout.shapes[names.index(parameter)]
            everyone = self._network.gather(self._parameters.x[:, span])  # [worker, number]
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
