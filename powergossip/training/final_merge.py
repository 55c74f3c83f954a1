"""The end of a run with final_merge: one model in all workers."""

from collections.abc import Sequence

import torch
from torch import nn

from powergossip.tasks import Task
from powergossip.training.stepping import Computation


def merge(run: Computation) -> None:
    """Give all workers the mean of their models. Collective. Counted.

    Batch norm's running statistics are recalibrated, each worker's on its own training data, and
    averaged, too. What all workers have to the bit is not sent.
    """
    parameters = run.parameters
    run.network.merge(parameters.x)
    if parameters.buffers.numel():
        for worker, model in zip(run.network.workers, parameters.models, strict=True):
            recalibrate(run.task, model, [worker], run.config.recalibration_batches)
        run.network.merge(parameters.buffers)


def recalibrate(task: Task, model: nn.Module, workers: Sequence[int], most: int) -> bool:
    """Recompute batch norm's running statistics from the model's own activations on training data.

    They are the mean over the first batches, at most `most`, of each worker. False without any.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return False
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    carried = task.carried(model)
    with torch.no_grad():
        for worker in workers:
            for step in range(min(most, task.steps_per_epoch)):
                task.loss(model, task.batch(worker, 0, step))
    task.carry(model, carried)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return True
