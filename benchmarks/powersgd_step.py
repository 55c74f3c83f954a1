"""The time of averaging a gradient: this PowerSGD, PyTorch's hook, and a plain all-reduce.

    mpirun -np 4 python -m benchmarks.powersgd_step rank=4 model=resnet50

prints one JSON line. Times are milliseconds beyond the backward pass: of a step (backward and
averaging, no update) minus the backward pass alone. They are medians of interleaved rounds.

    ours_ms        optimizers.PowerSGD, two half-iterations per step
    hook_ms        torch.distributed's powerSGD_hook in DistributedDataParallel (gloo), same rank
    all_reduce_ms  DistributedDataParallel without a hook
    ratio          ours_ms / hook_ms

The model has a network's parameters only. Its backward pass writes a fixed random gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shapes import Shapes, resnet50
from benchmarks.timing import in_turns, report
from powergossip import checks
from powergossip.network import processes, torch_group
from powergossip.optimizers import Config as PowerSGDConfig
from powergossip.optimizers import PowerSGD, optimizer_step
from powergossip.runs import configuration

SECONDS = 60.0


@dataclass
class PowerSGDStep:
    """Settings of a measurement."""

    model: str = "resnet50"  # resnet50, or small for a quick try
    rank: int = 1
    rounds: int = 9


class _Gradients(nn.Module):
    """A module with constant gradients g_k, the gradients of Σ_k p_k · g_k."""

    def __init__(self, shapes: Shapes, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.given = [torch.randn(shape) for shape in shapes]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self) -> Tensor:
        return torch.stack(
            [
                torch.dot(p.flatten(), g.flatten())
                for p, g in zip(self.weights, self.given, strict=True)
            ]
        ).sum()


class _Still(torch.optim.Optimizer):
    """An optimizer that changes nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "small": lambda: [(64, 3, 7, 7), (64,), (256, 128, 3, 3), (128, 256), (10, 512), (10,)],
}


def main(arguments: list[str]) -> None:
    """Measure and print one line."""
    comm = processes()
    config = OmegaConf.structured(PowerSGDStep)
    with comm.agreed():
        configuration.read_command_line(config, arguments, __doc__ or "")
        checks.one_of("model", config.model, MODELS)
    shapes = MODELS[config.model]()
    group = torch_group(comm, torch.device("cpu"))

    def distributed(with_hook: bool) -> Callable[[], None]:
        # One bucket, because gloo mixes up the hook's messages of several buckets.
        model = DistributedDataParallel(
            _Gradients(shapes, comm.rank), process_group=group, bucket_cap_mb=10**4
        )
        if with_hook:
            state = hooks.PowerSGDState(group, config.rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, hooks.powerSGD_hook)

        def step() -> None:
            model.zero_grad(set_to_none=False)
            model().backward()

        return step

    module = _Gradients(shapes, comm.rank)
    powersgd = PowerSGD(module.parameters(), PowerSGDConfig(config.rank, 2, 2, 0))
    apart = _Gradients(shapes, comm.rank)

    still = _Still(module.parameters(), {})

    def ours() -> None:
        module().backward()  # adds to the error
        optimizer_step(still, powersgd)

    def backward() -> None:
        apart.zero_grad(set_to_none=False)
        apart().backward()

    functions = {
        "backward_ms": backward,
        "ours_ms": ours,
        "hook_ms": distributed(True),
        "all_reduce_ms": distributed(False),
    }
    times = in_turns(functions, config.rounds, SECONDS, comm, torch.device("cpu"))
    found = {name: median(of_function) for name, of_function in times.items()}
    beyond = {n: found[n] - found["backward_ms"] for n in list(functions)[1:]}
    report(
        comm,
        model=config.model,
        numbers=sum(p.numel() for p in module.parameters()),
        rank=config.rank,
        processes=comm.size,
        backward_ms=round(found["backward_ms"], 1),
        **{name: round(value, 1) for name, value in beyond.items()},
        ratio=round(beyond["ours_ms"] / beyond["hook_ms"], 3),
        compression_rate=round(powersgd.compression_rate, 1),
    )


if __name__ == "__main__":
    configuration.run_entry_point(main)
