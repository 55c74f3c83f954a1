"""Local optimizers over the rows of the flat buffer."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergossip.parameters import Parameters
from powergossip.training.config import Settings
from powergossip.training.local_optimizers import LOCAL_OPTIMIZERS, LocalOptimizer

CONFIG: dict[str, Any] = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.1,
}
CONFIG |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-8}
CONFIG |= {"muon_precision": "fp32"}
WIDTHS = (3, 17, 10, 17, 3)  # matrices of sizes that are not multiples of 64 bytes
SIZE = sum((inputs + 1) * outputs for inputs, outputs in pairwise(WIDTHS))


def optimized(kind: str, x: Tensor) -> tuple[Parameters, LocalOptimizer]:
    parameters = Parameters([nn.Sequential(*map(nn.Linear, WIDTHS, WIDTHS[1:])) for _ in x])
    parameters.x[:] = x
    c = Settings(local_optimizer=kind, **CONFIG)
    return parameters, LocalOptimizer(parameters, c)


@pytest.mark.parametrize("displaces", [False, True])
@pytest.mark.parametrize("kind", LOCAL_OPTIMIZERS)
def test_an_update_does_not_depend_on_the_row(kind: str, displaces: bool) -> None:
    """To the bit, also with a state restored in a local optimizer that has made a step."""
    x, gradients = torch.randn(3, SIZE), torch.randn(4, 3, SIZE)

    def take(parameters: Parameters, local: LocalOptimizer, gradient: Tensor) -> None:
        parameters.grad[:] = gradient
        if displaces:
            parameters.x.add_(local.displacement(parameters.grad))
        else:
            local.step(parameters.grad)

    def updated(rows: slice, resumes: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        parameters, local = optimized(kind, x[rows])
        for step, gradient in enumerate(gradients[:, rows]):
            if step == 2 and resumes:
                kept, restored = parameters.x.clone(), copy.deepcopy(local.state_dict())
                parameters, local = optimized(kind, kept)
                take(parameters, local, gradient.flip(1))  # forgotten by loading
                parameters.x[:] = kept
                local.load_state_dict(restored)
            take(parameters, local, gradient)
        return parameters.x, local.state_dict()

    together, state = updated(slice(3), True)
    for row in range(3):
        alone, of_alone = updated(slice(row, row + 1), False)
        assert torch.equal(alone[0], together[row])
        for name, value in of_alone.items():
            assert value is not None
            both = state[name]
            assert both is not None
            assert torch.equal(value, both[row : row + 1] if value.ndim else both)
