"""Gradients and steps for the tests of gradient aggregations (PowerSGD, DGC)."""

import torch
from torch import Tensor, nn

from powergossip.algorithms.aggregation import Aggregation
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.randomness import generator


def gradients(n_workers: int, layout: Layout, *ids: int) -> Tensor:
    """Standard normal gradients [worker, D], which differ by `ids`."""
    drawn = generator(3, "test", *ids).standard_normal((n_workers, layout.size))
    return torch.from_numpy(drawn).float()


def step(network: Network, aggregation: Aggregation, gradient: Tensor) -> Tensor:
    """The mean [worker, D] that a step returns, which is the same for all workers."""
    mean = torch.full_like(gradient, torch.nan)
    network.run(aggregation.step(gradient, mean))
    same = torch.allclose(mean, mean[:1].expand_as(mean), rtol=0, atol=0, equal_nan=True)
    assert same, "all workers apply the same"
    return mean


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))


def backward(net: nn.Module, worker: int, t: int, weight: float = 1.0) -> None:
    x = gradients(8, Layout([(12,)]), worker, t)
    outputs = net(x.to(next(net.parameters()).dtype))
    (weight * nn.functional.cross_entropy(outputs, x[:, :4].argmax(1))).backward()


def vector(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach()
