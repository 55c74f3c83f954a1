"""The state of the hosted models in a checkpoint. Tensors are [worker, ...]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powergossip.parameters import Parameters
from powergossip.tasks import Task


def of_models(task: Task, parameters: Parameters) -> dict[str, Any]:
    """Parameters, buffers and the state that a model carries from batch to batch."""
    integer_buffers = [_integer_buffers(model) for model in parameters.models]
    return {
        "x": parameters.x,
        "buffers": parameters.buffers,
        "whole_number_buffers": _stacked(integer_buffers),
        "carried": _stacked([task.carried(model) for model in parameters.models]),
    }


def load_models(task: Task, parameters: Parameters, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `of_models()`, on any device."""
    parameters.x.copy_(state["x"])
    parameters.buffers.copy_(state["buffers"])
    device = parameters.x.device
    for i, model in enumerate(parameters.models):
        for name, buffer in _integer_buffers(model).items():
            buffer.copy_(state["whole_number_buffers"][name][i])
        task.carry(model, {k: v[i].to(device) for k, v in state["carried"].items()})


def _integer_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers that are not floating-point, such as batch norm's count of batches."""
    return {name: b for name, b in model.named_buffers() if not b.is_floating_point()}


def _stacked(by_worker: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in by_worker]) for name in by_worker[0]}
