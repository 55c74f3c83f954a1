"""Laws of diffusion rates: the warning, `auto`, unbiased quantization."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import gossip_run
import train
from powergossip import algorithms, topologies
from powergossip.algorithms import rates
from powergossip.compressors import QSGD
from powergossip.consensus.sweep import Sweep
from powergossip.network import Network, Processes, processes
from powergossip.optimizers import GossipOptimizer
from powergossip.parameters import Layout
from powergossip.runs.metrics import Hooks
from powergossip.topologies import Topology
from powergossip.training.config_checks import checked
from powergossip.training.trainer import Trainer

LAYOUT = Layout([(4, 3), (5,)])
BOUNDED = ("dpsgd", "power-gossip")  # plain gossip bounds their rates


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Python shows a text once. Here, each call of `warnings.warn` counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def warned(build: Callable[[], Any]) -> list[str]:
    """The texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [str(warning.message) for warning in caught]


def make(name: str, topology: Topology, rate: Any, process: int = 0) -> Any:
    alone = Processes()
    network = Network(topology, alone)
    alone.rank = process
    return algorithms.make(name, network, LAYOUT, diffusion_rate=rate)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_rate_above_the_bound_gives_one_warning_with_the_bound_and_the_best(name: str) -> None:
    """A ring of 8: 2/λ_max = 1.5, γ* = 1.3084. The largest of several rates decides."""
    ring = topologies.make("ring", 8)
    assert warned(lambda: make(name, ring, 1.5)) == []
    rates = torch.linspace(0.1, 1.6, 8)
    (text,) = warned(lambda: [make(name, ring, rates), make(name, ring, 1.7)])
    assert all(word in text for word in ("1.6", "ring", "8 workers", "1.5 ", "1.308"))


@pytest.mark.parametrize(
    ("topology", "rate"),
    [
        (topologies.make("ring", 8), 1.4999),
        (topologies.make("ring", 8), 6 / (6 - 2**0.5)),
        (topologies.make("ring", 1), 9.0),
        (topologies.make("unidirectional-ring", 8), 9.0),
        (topologies.make("round-robin", 8), 9.0),
        (topologies.make("random-matching", 8), 9.0),
    ],
    ids=lambda value: value.name if isinstance(value, Topology) else None,
)
def test_no_warning_where_the_bound_holds_or_does_not_apply(
    topology: Topology, rate: float
) -> None:
    assert warned(lambda: make("dpsgd", topology, rate)) == []
    if topology.symmetric:
        assert warned(lambda: make("power-gossip", topology, rate)) == []


def test_no_warning_of_other_processes_and_of_other_algorithms() -> None:
    """Finite time has larger rates by design. CHOCO with another bound has no warning."""
    ring = topologies.make("ring", 8)
    network = Network(ring, Processes())
    assert warned(lambda: make("dpsgd", ring, 2.0, process=1)) == []
    assert warned(lambda: make("choco", ring, 2.0)) == []
    assert warned(lambda: algorithms.make("finite-time", network, LAYOUT)) == []
    assert len(warned(lambda: make("dpsgd", ring, 2.0))) == 1


def test_a_sweep_gives_one_warning_before_it_runs() -> None:
    """Two algorithms with 20 rates each, in batches of one."""
    config = OmegaConf.structured(gossip_run.Config)
    config |= {"n_workers": 16, "topology": "torus", "matrix_size": 4, "num_steps": 1}
    config |= {"algorithm": ["uncompressed", "power_gossip"], "hyperparameter_num_samples": 20}
    sweeps: list[Sweep] = []
    (text,) = warned(lambda: sweeps.append(Sweep(config, processes(), batch_elements=1)))
    assert all(word in text for word in ("1.308", "torus", "1.25 ", "rate of plain gossip is 1 "))
    assert warned(lambda: sweeps[0].run(Hooks())) == []


@pytest.mark.parallel([4])
def test_an_optimizer_with_two_parts_gives_one_warning_on_process_0() -> None:
    def build() -> None:
        model = nn.Linear(3, 4)
        local = torch.optim.SGD([model.weight], lr=0.1)
        optimizer = GossipOptimizer(local, "dpsgd", topology="star", diffusion_rate=2.5)
        optimizer.add_param_group({"params": [model.bias]})

    assert len(warned(build)) == (1 if processes().rank == 0 else 0)


# auto


@pytest.mark.parametrize("name", BOUNDED)
def test_auto_is_the_best_rate_of_plain_gossip(name: str) -> None:
    ring = topologies.make("ring", 8)
    x = torch.randn(8, LAYOUT.size)
    y = x.clone()
    for values, rate in ((x, "auto"), (y, 6 / (6 - 2**0.5))):
        averaging = make(name, ring, rate)
        Network(ring, Processes()).run(averaging.step(values))
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["choco", "deepsqueeze", "moniqua"])
def test_auto_is_rejected_where_it_is_too_large(name: str) -> None:
    """The sentence names the page with the default."""
    with pytest.raises(ValueError, match=rf"^diffusion_rate=auto: .*{name}\.md"):
        make(name, topologies.make("ring", 8), "auto")
    config = OmegaConf.structured(train.Config)
    config |= {"n_workers": 4, "optimizer": name, "optimizer_diffusion_rate": "auto"}
    with pytest.raises(ValueError, match=r"^optimizer_diffusion_rate=auto: "):
        Trainer(checked(config, processes()), processes())


# Unbiased quantization


@pytest.mark.parametrize("levels", [1, 127])
def test_errors_of_unbiased_quantization_shrink(levels: int) -> None:
    """The condition of QSGD.stable_rate, on a ring. Larger rates would break it."""
    qsgd = QSGD(levels, unbiased=True)
    rate: Any = rates.default_choco_rate(topologies.make("ring", 8), LAYOUT, qsgd)
    copy_rate: Any = rates.copy_rate(qsgd)
    for size in (1, 10, 100, 1000, 10**4, 10**6, 10**9):
        variance = qsgd.variance_bound(size)
        gamma, alpha = rate(size), copy_rate(size)

        def shrinks(factor: float, gamma: float = gamma, alpha: float = alpha) -> bool:
            error = (alpha + factor * gamma * 4 / 3) ** 2 * variance  # noqa: B023 called here
            return error < 1 - (1 - alpha) ** 2

        assert shrinks(1)
        assert gamma == pytest.approx(1) or not shrinks(2)


def test_tensors_have_rates_of_their_own() -> None:
    """By default, the increment of each is that of a rate of 1 times its own, and so are copies."""
    layout = Layout([(40, 30), (6, 5), (3,)])
    ring = topologies.make("ring", 4)
    x = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(0))

    def first(**rates: Any) -> tuple[torch.Tensor, torch.Tensor]:
        network = Network(ring, Processes())
        choco: Any = algorithms.make(
            "choco", network, layout, compressor="qsgd", unbiased=True, **rates
        )
        out = torch.empty_like(x)
        network.run(choco.increment(x, out))
        return out, choco.state_dict()["public"]

    whole, copies = first(diffusion_rate=1.0, copy_rate=1.0)
    own, own_copies = first()
    given, given_copies = first(diffusion_rate=0.25)
    start = 0
    for size in (1200, 30, 3):
        variance = QSGD(4, unbiased=True).variance_bound(size)
        of = slice(start, start + size)
        torch.testing.assert_close(own[:, of], whole[:, of] / max(1, 5 * variance))
        expected = copies[:, of] * min(0.5, 1 / (1 + variance))
        torch.testing.assert_close(own_copies[:, of], expected)
        start += size
    torch.testing.assert_close(given, 0.25 * whole)
    assert torch.equal(given_copies, own_copies)


def test_deepsqueeze_rejects_what_is_no_contraction() -> None:
    network = Network(topologies.make("ring", 4), Processes())
    with pytest.raises(ValueError, match=r"^unbiased=True: "):
        algorithms.make("deepsqueeze", network, LAYOUT, compressor="qsgd", unbiased=True)
