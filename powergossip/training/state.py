"""The state of the hosted models and of a run in a checkpoint. Tensors are [worker, ...]."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip.parameters import Parameters
from powergossip.runs.clock import PhaseTime
from powergossip.tasks import Task
from powergossip.training.execution import Computation
from powergossip.trees import Stateful, map_tensors


@dataclass(frozen=True)
class Parts:
    """The parts of a run that have state.

    Attributes:
        method: Parts by their names in the state: local optimizer and learning rule, or events.
    """

    run: Computation
    method: Mapping[str, Stateful]

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts."""
        return {
            **model_state(self.run.task, self.run.parameters),
            **{name: part.state_dict() for name, part in self.method.items()},
            "network": self.run.network.state_dict(),
            "batched_gradients": self.run.gradients.are_batched,
            "phases": {
                name: [spent.instances, spent.total, spent.squares]
                for name, spent in self.run.clock.phases.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any], with_method: bool) -> None:
        """Restore the state returned by `state_dict()`: for an evaluation, without the method's."""
        load_models(self.run.task, self.run.parameters, saved)
        if with_method:
            self.run.gradients.resume(saved["batched_gradients"])
            device = self.run.parameters.x.device
            for name, part in self.method.items():
                part.load_state_dict(map_tensors(partial(_moved, device), saved[name]))
        self.run.network.load_state_dict(saved["network"])
        for name, values in saved["phases"].items():
            self.run.clock.phases[name] = PhaseTime(*values)


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def model_state(task: Task, parameters: Parameters) -> dict[str, Any]:
    """Parameters, buffers and the state that a model carries from batch to batch."""
    integer_buffers = [_integer_buffers(model) for model in parameters.models]
    return {
        "x": parameters.x,
        "buffers": parameters.buffers,
        "whole_number_buffers": _stacked(integer_buffers),
        "carried": _stacked([task.carried(model) for model in parameters.models]),
    }


def load_models(task: Task, parameters: Parameters, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `model_state()`, on any device."""
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
