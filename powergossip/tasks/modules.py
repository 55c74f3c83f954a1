"""Models of any kind: construction by name with derived randomness, evaluation mode."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from powergossip.randomness import torch_seed
from powergossip.tasks import task_options
from powergossip.tasks.task import TaskOptions
from powergossip.tasks.user_functions import Named, seeded

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
            having = [other for other in builders if key in task_options.defaults(builders[other])]
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


def fresh(
    architectures: Architectures, architecture: str, seed: int, device: torch.device
) -> nn.Module:
    """Build a model on the device. Its weights depend on architecture and seed only.

    Raises ValueError if the architecture is unknown or cannot be built.
    """
    if architecture not in architectures:
        raise ValueError(
            f'task_architecture "{architecture}" is unknown; choose from '
            f"{', '.join(architectures)}, or use package.module:callable"
        )
    with seeded(torch_seed(seed, "model")):
        return architectures[architecture]().to(device)


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
