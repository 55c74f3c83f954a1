"""What tasks do with models of any kind: build them by name, evaluate them without a trace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from powergossip.randomness import torch_seed
from powergossip.tasks import task_options

Architectures = Mapping[str, Callable[[], nn.Module]]


def architectures(
    builders: Mapping[str, Callable[..., nn.Module]],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Architectures:
    """Name → a function that builds the model with these arguments and task options.

    The function raises ValueError if the model does not take one of the options.
    """

    def build(name: str) -> nn.Module:
        for key in options:
            takers = [other for other in builders if key in task_options.of_model(builders[other])]
            if name not in takers:
                raise ValueError(
                    f"task_options.{key}: {name} has no {key}; use task_architecture="
                    f"{' or '.join(takers)}, or leave {key} out"
                )
        return builders[name](*arguments, **options)

    return {name: partial(build, name) for name in builders}


def fresh(
    architectures: Architectures, architecture: str, seed: int, device: torch.device
) -> nn.Module:
    """A new model on the device; its weights depend on architecture and seed only.

    Raises ValueError if the architecture is unknown or cannot be built.
    """
    if architecture not in architectures:
        raise ValueError(
            f'task_architecture "{architecture}" is unknown; choose from {", ".join(architectures)}'
        )
    # On the CPU alone: torch.manual_seed would seed the GPU's generator too, which the fork does
    # not restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "model"))
        return architectures[architecture]().to(device)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
