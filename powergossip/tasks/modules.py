"""Models of any kind: construction by name with derived randomness, evaluation mode, the base of
tasks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip.randomness import torch_seed
from powergossip.tasks import option_checks
from powergossip.tasks.task import TaskOptions
from powergossip.user_functions import Named, seeded

Architectures = Mapping[str, Callable[[], nn.Module]]


def architectures(
    builders: Mapping[str, Callable[..., nn.Module]],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Architectures:
    """Name → a function that builds the model with these arguments and task options.

    The function raises ValueError for an option that the model does not have.
    """

    def build(name: str) -> nn.Module:
        for key in options:
            having = [other for other in builders if key in option_checks.defaults(builders[other])]
            if name not in having:
                raise ValueError(
                    f"task_options.{key}: use it with task_architecture={' or '.join(having)}; "
                    f"{name} has no {key}"
                )
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # as the data of the library's tasks
        try:
            return builders[name](*arguments, **options)
        finally:
            torch.set_default_dtype(default)

    return {name: partial(build, name) for name in builders}


def with_own(
    known: Architectures, options: TaskOptions, offered: Mapping[str, Any]
) -> Architectures:
    """Add the user's architecture, if there is one.

    Args:
        offered: Values for parameters of the architecture of these names. Task options of these
            names take precedence.
    """
    own = options.architecture
    return known if own is None else {**known, own.name: partial(_build, own, options, offered)}


def _build(own: Named, options: TaskOptions, offered: Mapping[str, Any]) -> nn.Module:
    """The model that a function of the user returns. Raises ValueError if it is not an
    nn.Module."""
    model = own(options.task_options, offered)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{own.label} returned a {type(model).__name__}; return a torch.nn.Module")
    return model


class ModelTask:
    """The base of tasks: models by name. Nothing is carried from batch to batch, and no metrics are
    derived.

    Attributes:
        architectures: Name → a function that builds the model on the CPU with fresh random weights.
    """

    def __init__(self, architectures: Architectures, device: torch.device):
        self.architectures, self._device = architectures, device

    def model(self, architecture: str, seed: int) -> nn.Module:
        """Build a model on the task's device. Its weights depend on architecture and seed only.

        Raises ValueError if the architecture is unknown or cannot be built.
        """
        if architecture not in self.architectures:
            raise ValueError(
                f'task_architecture "{architecture}" is unknown; choose from '
                f"{', '.join(self.architectures)}, or use package.module:callable"
            )
        with seeded(torch_seed(seed, "model")):
            return self.architectures[architecture]().to(self._device)

    def carried(self, model: nn.Module) -> dict[str, Tensor]:
        """Empty: no state is carried from batch to batch."""
        return {}

    def carry(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Do nothing: no state is carried from batch to batch."""
        assert not state

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Empty: there are no derived metrics."""
        return {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode, and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
