"""The averaging rules that are checked: every row of the registry with every compressor."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powergossip import algorithms, compressors, topologies
from powergossip.algorithms import AVERAGING, CONSENSUS_ONLY, aggregation
from powergossip.network import Network, Processes
from powergossip.parameters import Layout

WORKERS = 8
# Of a small convolutional network, with a matrix large enough for LAPACK's and cuSOLVER's blocks.
SHAPES = [(16, 3, 3, 3), (16, 16, 3, 3), (16,), (16, 16, 3, 3), (128, 96), (10, 64), (10,), ()]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "power-gossip": [
        {},
        {"rank": 4},
        {"num_iterations": 2},
        {"warm_start": False},
        {"round_weights": True},
    ],
    "push-sum": [{}, {"running_sums": True}],
}
# Rules that round or select: a difference in the last bit may change single elements by more.
ROUNDING = {"sign-and-norm", "qsgd", "top-k", "moniqua", "round_weights", "signsgd", "dgc"}
FEW = 1e-3  # fraction of such elements


class GPUCase(NamedTuple):
    """A row of a registry with options."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.options.items() if k not in FIX)])

    @property
    def allowed(self) -> float:
        """The fraction of elements that may differ by more than rounding."""
        words = {self.name, self.options.get("compressor"), *self.options}
        return FEW if words & ROUNDING else 0.0


FIX = ("diffusion_rate", "theta")  # fit random x, and are not shown


def averaging_cases(some: bool = False) -> Iterator[GPUCase]:
    """All averaging rules, with rates at which random x converge; or each one with its defaults."""
    for name in {**AVERAGING, **CONSENSUS_ONLY}:
        known = algorithms.defaults(name)
        fixed: dict[str, Any] = {"theta": 6.0} if "theta" in known else {}
        if {"compressor", "theta"} & {*known}:
            fixed["diffusion_rate"] = 0.1
        for options in VARIANTS.get(name, [{}])[: 1 if some else None]:
            if "compressor" not in known or some:
                yield GPUCase(name, fixed | options)
                continue
            for compressor in compressors.COMPRESSORS:
                yield GPUCase(name, fixed | options | {"compressor": compressor})


def aggregation_cases() -> Iterator[GPUCase]:
    """All gradient aggregations."""
    for name in aggregation.AGGREGATIONS:
        if name != "ef-sgd":
            yield GPUCase(name, {})
            continue
        for compressor in compressors.COMPRESSORS:
            yield GPUCase(name, {"compressor": compressor})


def network(device: torch.device, processes: Processes | None = None, **more: Any) -> Network:
    """A ring of `WORKERS` workers, by default in this process."""
    topology = topologies.make("ring", WORKERS)
    return Network(topology, processes or Processes(), device, **more)


def layout() -> Layout:
    return Layout(SHAPES)


def values(seed: int, rows: int = WORKERS) -> Tensor:
    """Random x or gradients [worker, D], on the CPU."""
    return torch.randn(rows, layout().size, generator=torch.Generator().manual_seed(seed))
