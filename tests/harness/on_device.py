"""Averaging rules on a device, and the difference of results from those of the CPU.

Axes: worker, all in one process by default; D parameters of a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powergossip import algorithms, topologies
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from tests.harness.averaging import ALONE, steps

CPU = torch.device("cpu")
WORKERS = 8
# Of a small convolutional network, with a matrix large enough for LAPACK's and cuSOLVER's blocks.
SHAPES = [(16, 3, 3, 3), (16, 16, 3, 3), (16,), (16, 16, 3, 3), (128, 96), (10, 64), (10,), ()]
# Rules that round or select: a difference in the last bit may change single elements by more.
ROUNDING = {
    *("sign-and-norm", "qsgd", "rounding", "top-k"),
    *("moniqua", "round_weights", "signsgd", "dgc", "demo", "sparse-loco"),
}
FEW = 1e-3  # fraction of such elements
# Differences between devices, relative to the root mean square of the values. Sums in another order
# differ by about 1e-6, and a few steps of power iteration amplify that.
TOLERANCE = 1e-4
LEAST = 1e-2  # values that are 0 but for rounding are compared with this


@dataclass(frozen=True)
class Difference:
    """
    largest  # difference, relative to the root mean square of the expected values, or to LEAST
    off      # fraction of the elements that differ by more than TOLERANCE
    """

    largest: float
    off: float

    def __str__(self) -> str:
        off = f", {self.off:.2g} of the elements off" if self.off else ""
        return f"{self.largest:.1g}{off}"


def difference(found: Tensor, expected: Tensor) -> Difference:
    """Compare tensors of any devices. NaN and infinity differ from everything."""
    a, b = (tensor.detach().double().cpu() for tensor in (found, expected))
    scale = b.square().mean().sqrt().clamp(min=LEAST)
    apart = ((a - b).abs() / scale).nan_to_num(nan=torch.inf)
    return Difference(float(apart.max()), float((apart > TOLERANCE).double().mean()))


def allowed(name: str, given: Mapping[str, Any]) -> float:
    """The fraction of elements that may differ by more than rounding."""
    return FEW if {name, given.get("compressor"), *given} & ROUNDING else 0.0


def described(name: str, options: dict[str, Any]) -> str:
    """A case by its options, without those that fit random x."""
    shown = (f"{k}={v}" for k, v in options.items() if k not in ("diffusion_rate", "theta"))
    return " ".join([name, *shown])


def layout() -> Layout:
    return Layout(SHAPES)


def values(seed: int) -> Tensor:
    """Random x or gradients [worker, D], on the CPU."""
    return torch.randn(WORKERS, layout().size, generator=torch.Generator().manual_seed(seed))


def ring(device: torch.device, processes: Processes = ALONE, **more: Any) -> Network:
    return Network(topologies.make("ring", WORKERS), processes, device, **more)


class Rule:
    """An averaging rule, and a copy of the x [worker, D] from which it starts."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        network: Network,
        start: Tensor,
        shapes: Layout | None = None,
    ):
        self.network, self.start = network, start.to(network.device)
        self.averaging = algorithms.make(name, network, shapes or layout(), **options)
        self.x = self.start.clone()

    def steps(self, count: int) -> Tensor:
        """Return x after further steps."""
        return steps(self.network, self.averaging, self.x, count)

    def reset(self) -> None:
        """Set x, but not the state of the rule, to its start."""
        self.x.copy_(self.start)
