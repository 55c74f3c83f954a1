"""The state of the hosted models and of a run in a checkpoint. Tensors are [worker, ...]."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powergossip.runs.clock import PhaseTime
from powergossip.state_trees import Stateful, map_tensors
from powergossip.training.stepping import Computation


def run_state(run: Computation, method: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of the models and of all parts of a run.

    Args:
        method: Parts by their names in the state: local optimizer and learning rule, or events.
    """
    task, models = run.task, run.parameters.models
    return {
        "x": run.parameters.x,
        "buffers": run.parameters.buffers,
        "whole_number_buffers": _stacked([_integer_buffers(model) for model in models]),
        "carried": _stacked([task.carried(model) for model in models]),
        **{name: part.state_dict() for name, part in method.items()},
        "network": run.network.state_dict(),
        "batched_gradients": run.gradients.are_batched,
        "phases": {
            name: [spent.instances, spent.total, spent.squares]
            for name, spent in run.clock.phases.items()
        },
    }


def load_run(
    run: Computation, method: Mapping[str, Stateful], saved: Mapping[str, Any], with_method: bool
) -> None:
    """Restore the state of `run_state`, on any device: for an evaluation, without the method's."""
    run.parameters.x.copy_(saved["x"])
    run.parameters.buffers.copy_(saved["buffers"])
    device = run.parameters.x.device
    for i, model in enumerate(run.parameters.models):
        for name, buffer in _integer_buffers(model).items():
            buffer.copy_(saved["whole_number_buffers"][name][i])
        run.task.carry(model, {k: v[i].to(device) for k, v in saved["carried"].items()})
    if with_method:
        run.gradients.resume(saved["batched_gradients"])
        for name, part in method.items():
            part.load_state_dict(map_tensors(lambda tensor: tensor.to(device), saved[name]))
    run.network.load_state_dict(saved["network"])
    for name, values in saved["phases"].items():
        run.clock.phases[name] = PhaseTime(*values)


def _integer_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers that are not floating-point, such as batch norm's count of batches."""
    return {name: b for name, b in model.named_buffers() if not b.is_floating_point()}


def _stacked(by_worker: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in by_worker]) for name in by_worker[0]}
