"""A training loop of plain PyTorch, its optimizers, and the same computation in one process.

Axes: worker, one per process; D parameters of a worker's model.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powergossip import topologies
from powergossip.network import Processes, processes, torch_group
from powergossip.optimizers import GossipState, gossip_hook

N = 4


ALONE = Processes()


METHODS: dict[str, dict[str, Any]] = {  # arguments of GossipOptimizer
    "all-reduce": {"method": "all-reduce"},
    "all-reduce, 2 bits": {"method": "all-reduce", "bits": 2},
    "dpsgd": {"method": "dpsgd", "diffusion_rate": 0.7},
    "power-gossip": {"method": "power-gossip"},
    "power-gossip, rank 2": {
        "method": "power-gossip",
        "rank": 2,
        "num_iterations": 2,
        "warm_start": False,
        "seed": 3,
    },
    "choco": {"method": "choco", "diffusion_rate": 0.4},
    "choco, qsgd": {
        "method": "choco",
        "diffusion_rate": 0.4,
        "compressor": "qsgd",
        "levels": 8,
        "topology": "star",
    },
    "deepsqueeze": {
        "method": "deepsqueeze",
        "diffusion_rate": 0.2,
        "compressor": "top-k",
        "keep_ratio": 0.3,
    },
    "moniqua": {"method": "moniqua", "diffusion_rate": 0.3, "theta": 0.5},
    "sparta": {"method": "sparta", "keep_ratio": 0.2},
    "push-sum": {"method": "push-sum", "topology": "star"},
    "push-sum, running sums": {"method": "push-sum", "running_sums": True},
}


Make = Callable[[nn.Module], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4),
    "groups": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() == 2], "lr": 0.05},
            {"params": [p for p in model.parameters() if p.dim() == 1], "momentum": 0.9},
        ],
        lr=0.2,
    ),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def loss(model: nn.Module, worker: int, t: int) -> Tensor:
    """The loss of a batch that depends on the worker and the step only."""
    generator = torch.Generator().manual_seed(1000 * worker + t)
    inputs = torch.randn(8, 6, generator=generator)
    labels = torch.randint(3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(inputs), labels)


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, worker: int | None = None
) -> None:
    """The loop of a user."""
    for t in steps:
        optimizer.zero_grad()
        loss(model, processes().rank if worker is None else worker, t).backward()
        optimizer.step()


def numbers(model: nn.Module) -> Tensor:
    """A copy of the parameters: [D]."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def fill(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(), x.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))


def everywhere(model: nn.Module) -> Tensor:
    """[worker, D]"""
    return torch.stack(processes().gather(numbers(model)))


def dense(
    make: Make,
    W: Tensor,
    steps: int,
    local_steps: int = 1,
    skipped: tuple[int, int] | None = None,
) -> Tensor:
    """x ← W (x − lr u(g)) of all workers, one after the other, in this process: [worker, D].

    Args:
        skipped: A step in which one worker has no local update, and that worker.
    """
    models = [mlp() for _ in range(N)]
    optimizers = [make(model) for model in models]
    for t in range(steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if (t, worker) != skipped:
                run(model, optimizer, range(t, t + 1), worker)
        if (t + 1) % local_steps == 0:
            for model, x in zip(models, W @ torch.stack([*map(numbers, models)]), strict=True):
                fill(model, x)
    return torch.stack([*map(numbers, models)])


def mixing(topology: str = "ring") -> Tensor:
    """W [worker, worker]"""
    (of_round,) = topologies.make(topology, N).rounds
    return torch.from_numpy(of_round.matrix().toarray()).float()


def barriers_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int | None]]:
    """The number of steps that each barrier knows: those at the exit, then those since."""
    at_exit: list[Callable[[], int | None]] = []
    since: list[int | None] = []
    monkeypatch.setattr(
        "powergossip.network.checked_barrier_at_exit",
        lambda processes, steps: at_exit.append(steps),
    )
    monkeypatch.setattr(
        "powergossip.network.checked_barrier", lambda processes, place, steps: since.append(steps)
    )
    return lambda: [*(steps() for steps in at_exit), *since]


CPU = torch.device("cpu")


def hooked(
    method: Any = "dpsgd",
    local: str = "momentum",
    model: nn.Module | None = None,
    broadcast_buffers: bool = False,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer, GossipState]:
    """A DDP module, its optimizer and the state of its hook."""
    options.setdefault("process_group", processes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers, since torch 2.13
        ddp = DistributedDataParallel(
            mlp() if model is None else model,
            process_group=torch_group(processes(), CPU),
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=1e-4,  # several buckets
        )
    optimizer = OPTIMIZERS[local](ddp.module)
    state = GossipState(optimizer, method, **options)
    ddp.register_comm_hook(state, gossip_hook)
    return ddp, optimizer, state
