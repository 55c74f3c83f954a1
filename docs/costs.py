"""Bits that a worker sends in a step, for each method, counted by running it."""

from collections.abc import Callable
from typing import Any

import torch

import algorithms
import topologies
from powergossip.algorithms.aggregation import make
from powergossip.algorithms.dgc import DGCAggregation
from powergossip.algorithms.dgc import DGCConfig as DGCConfig
from powergossip.algorithms.power_sgd import PowerSGDAggregation, PowerSGDConfig
from powergossip.network import Conversation, Network
from powergossip.parameters import Layout
from powergossip.tasks.models import ResNet20

WORKERS = 8
STEPS = (
    2  # PowerGossip and PowerSGD send one side of their factors in a step, the other in the next
)

Step = Callable[[torch.Tensor], Conversation]
Build = Callable[[Network, Layout], Step]


def _averaging(name: str, **options: Any) -> Build:
    return lambda network, layout: algorithms.make(name, network, layout, **options).step


def _power_sgd(network: Network, layout: Layout) -> Step:
    config = PowerSGDConfig(1, num_iters_per_step=2, start_compressing_after_num_steps=0)
    aggregation = PowerSGDAggregation(network, layout, config)
    return lambda x: aggregation.step(x, torch.zeros_like(x))


def _dgc(network: Network, layout: Layout) -> Step:
    aggregation = DGCAggregation(
        network, layout, DGCConfig(compress_ratio=0.01, compress_upper_bound=1, int32_indices=True)
    )
    return lambda x: aggregation.step(x, torch.zeros_like(x))


def _aggregation(name: str, **options: Any) -> Build:
    def build(network: Network, layout: Layout) -> Step:
        aggregation = make(name, network, layout, **options)
        return lambda x: aggregation.step(x.clone(), torch.zeros_like(x))

    return build


METHODS: dict[str, Build] = {
    "D-PSGD": _averaging("dpsgd"),
    "PowerGossip, rank 1, 1 iteration": _averaging("power-gossip", num_iterations=1),
    "PowerGossip, rank 1, 2 iterations": _averaging("power-gossip", num_iterations=2),
    "PowerGossip, rank 2, 1 iteration": _averaging("power-gossip", rank=2, num_iterations=1),
    "PowerGossip, rank 4, 1 iteration": _averaging("power-gossip", rank=4, num_iterations=1),
    "PowerGossip, rank 4, 1 iteration, 4 bits": _averaging(
        "power-gossip", rank=4, num_iterations=1, bits=4
    ),
    "CHOCO or DeepSqueeze, sign": _averaging("choco", compressor="sign-and-norm"),
    "CHOCO or DeepSqueeze, top 1 %": _averaging("choco", compressor="top-k", keep_ratio=0.01),
    "CHOCO or DeepSqueeze, random 1 %": _averaging("choco", compressor="random-k", keep_ratio=0.01),
    "CHOCO or DeepSqueeze, QSGD, 4 levels": _averaging("choco", compressor="qsgd", levels=4),
    "Moniqua, 2 bits": _averaging("moniqua"),
    "all-reduce": _averaging("all-reduce"),
    "PowerSGD, rank 1, 2 half-iterations": _power_sgd,
    "DGC, 1 %": _dgc,
    "error feedback, sign": _aggregation("ef-sgd"),
    "error feedback, top 1 %": _aggregation("ef-sgd", compressor="top-k"),
    "error feedback, random 1 %": _aggregation("ef-sgd", compressor="random-k"),
    "signSGD": _aggregation("signsgd"),
}


def table() -> str:
    """The table of choosing.md, for ResNet-20 on a ring."""
    layout = Layout(p.shape for p in ResNet20((3, 32, 32), 10).parameters())
    sent = {name: _bytes(build, layout) for name, build in METHODS.items()}
    lines = ["| method | bytes a step | fewer than D-PSGD |", "| --- | --- | --- |"]
    for name, count in sent.items():
        lines.append(f"| {name} | {count:,.0f} | {sent['D-PSGD'] / count:.1f}× |")
    return "\n".join(lines)


def _bytes(build: Build, layout: Layout) -> float:
    network = Network(topologies.make("ring", WORKERS))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WORKERS, layout.size, generator=generator)
    step = build(network, layout)
    for _ in range(2 * STEPS):  # messages of few bits begin with whole ones
        network.run(step(x))
    before = int(network.bits[0])
    for _ in range(STEPS):
        network.run(step(x))
    return (int(network.bits[0]) - before) / 8 / STEPS
