"""The laws of signSGD with majority vote."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergossip import topologies
from powergossip.algorithms.learning import CentralizedSGD
from powergossip.algorithms.sign_sgd import SignSGDAggregation, SignSGDConfig
from powergossip.network import Network, Processes, processes
from powergossip.optimizers import sign_sgd as loop
from powergossip.parameters import Layout, Parameters
from tests.harness.loops import backward, gradients, model, step, vector

LAYOUT = Layout([(6, 5), (7,), ()])


def aggregation(n_workers: int, momentum: float = 0.0) -> tuple[Network, SignSGDAggregation]:
    network = Network(topologies.make("ring", n_workers), Processes())
    return network, SignSGDAggregation(network, LAYOUT, SignSGDConfig(momentum))


@pytest.mark.parametrize(("n_workers", "momentum"), [(1, 0.8), (3, 0.0), (4, 0.8)])
def test_the_vote_is_the_sign_of_the_sum_of_the_signs(n_workers: int, momentum: float) -> None:
    """The signs are those of the momentum β u + (1 − β) g. A tie is 0. A worker sends a bit for
    each element to each other."""
    network, a = aggregation(n_workers, momentum=momentum)
    u, ties = torch.zeros(n_workers, LAYOUT.size), 0
    for t in range(4):
        g = gradients(n_workers, LAYOUT, t)
        u = momentum * u + (1 - momentum) * g
        vote = step(network, a, g)
        assert (g == 0).all(), "the gradient is cleared"
        assert torch.equal(vote[0], u.sign().sum(0).sign())
        ties += int((vote[0] == 0).sum())
        # 38 elements; 32: the length
        assert network.bits.tolist() == [(t + 1) * (n_workers - 1) * (40 + 32)] * n_workers
    assert (ties > 0) == (n_workers == 4)
    assert a.compression_rate == 32


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_votes_on_zeros_cancel(n_workers: int) -> None:
    """In each step of an even number of workers, or in two steps."""
    network, a = aggregation(n_workers)
    zeros = torch.zeros(n_workers, LAYOUT.size)
    first = step(network, a, zeros.clone())
    assert (first == 0).all() == (n_workers == 2)
    assert torch.equal(first + step(network, a, zeros.clone()), zeros)


def test_weight_decay_is_added_to_the_vote_without_momentum() -> None:
    """x ← x − η (vote + λ x), Algorithm 1 of Bernstein et al. (2019)."""
    network = Network(topologies.make("ring", 2), Processes())
    net = nn.Linear(4, 3)
    parameters = Parameters([copy.deepcopy(net) for _ in range(2)])
    a = SignSGDAggregation(network, parameters.layout, SignSGDConfig(0.9))
    rate, decay, x = 0.01, 0.5, parameters.x.clone()

    def update(g: Tensor) -> None:
        parameters.x.sub_(rate * g)

    rule = CentralizedSGD(network, a, parameters, update, weight_decay=decay)
    for t in range(5):
        rule.start()
        if t < 2:
            parameters.grad.fill_(-1.0)
        rule.finish()  # the momentum keeps its sign when the gradients end
        x = x - rate * (decay * x - 1)
        torch.testing.assert_close(parameters.x, x)


@pytest.mark.parallel(nprocs=[1, 4])
def test_five_lines_in_a_loop() -> None:
    who = processes()
    net, reference = model(who.rank), model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, weight_decay=0.1)
    signs = loop.SignSGD(net.named_parameters(), loop.SignSGDConfig(momentum=0.0))
    for t in range(6):
        backward(net, who.rank, t)
        loop.optimizer_step(optimizer, signs)
        votes: Any = 0
        for worker in range(who.size):
            backward(reference, worker, t)
            g = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
            votes = votes + torch.where(g == 0, (-1.0) ** (worker + t), g.sign())
            reference.zero_grad()
        x = vector(reference)
        nn.utils.vector_to_parameters(x - 0.01 * (votes.sign() + 0.1 * x), reference.parameters())
        torch.testing.assert_close(vector(net), vector(reference))
    twice = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with pytest.raises(ValueError, match="momentum"):
        loop.optimizer_step(twice, signs)
