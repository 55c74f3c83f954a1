"""Laws of learning rules in GossipOptimizer, in a loop of plain PyTorch.

The problem: worker i minimizes f_i(x) = ½ Σ_k a_i[k] (x[k] − b_i[k])². The parameters are a matrix
and a vector, so that PowerGossip compresses. The optimum of the mean loss is far from those of the
workers.

Axes: worker, one per process; D parameters of a worker's model.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powergossip import algorithms, topologies
from powergossip.algorithms import learning
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, processes
from powergossip.optimizers import GossipOptimizer
from powergossip.parameters import Layout, Parameters
from powergossip.training.config import Settings
from powergossip.training.config_checks import checked
from powergossip.training.local_optimizers import LocalOptimizer
from tests.harness.training import after_steps, configured

N, ROWS, COLUMNS = 4, 6, 5
D = ROWS * COLUMNS + ROWS
ALONE = Processes()
SIGN = ("choco", {"diffusion_rate": 0.2})
TOP_K = ("choco", {"compressor": "top-k", "keep_ratio": 0.3, "diffusion_rate": 0.2})
QSGD = (
    "choco",
    {
        "compressor": "qsgd",
        "unbiased": True,
        "levels": 64,
        "diffusion_rate": 0.5,
        "copy_rate": 0.5,
    },
)
PLAIN: tuple[str, dict[str, Any]] = ("dpsgd", {})
CHAIN = ("dpsgd", {"topology": "chain"})
RELAYED: tuple[str, dict[str, Any]] = ("choco", {"topology": "chain"})
POWER = ("power-gossip", {"rank": 1})
QUARTER = ("power-gossip", {"rank": 1, "diffusion_rate": 0.25})
IN_FLIGHT = ("power-gossip", {"num_iterations": 4, "diffusion_rate": 0.5})


class Quadratic(nn.Module):
    """The model of a worker, and its loss."""

    def __init__(self, worker: int, start: float = 0.0):
        super().__init__()
        k = torch.arange(D, dtype=torch.float64)
        values = start * torch.sin(k).float()
        self.weight = nn.Parameter(values[: ROWS * COLUMNS].view(ROWS, COLUMNS).clone())
        self.bias = nn.Parameter(values[ROWS * COLUMNS :].clone())
        self.a, self.b = (1 + (k + worker) % 5 / 4).float(), (3 * torch.cos(worker + k)).float()

    def forward(self) -> Tensor:
        x = nn.utils.parameters_to_vector(self.parameters())
        return (self.a * (x - self.b).square()).sum() / 2

    def hidden_matrices(self) -> list[str]:
        return ["weight"]

    @property
    def x(self) -> Tensor:
        """A copy of the parameters: [D]."""
        return nn.utils.parameters_to_vector(self.parameters()).detach().clone()


def run(model: Quadratic, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The loop of a user."""
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, **options})


# --- The rules of train.py ------------------------------------------------------------------------

# rule → averaging, keywords of GossipOptimizer
CASES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "dpsgd": [(PLAIN, {}), (POWER, {"overlapping": True}), (SIGN, {"local_steps": 2})],
    "quasi-global-momentum": [
        (PLAIN, {}),
        (POWER, {"overlapping": True}),
        (PLAIN, {"learning_options": {"local_optimizer": "adamw", "adam_beta1": 0.8}}),
    ],
    "gradient-tracking": [
        (PLAIN, {}),
        (POWER, {"overlapping": True}),
        (SIGN, {"overlapping": True}),
    ],
    "k-gt": [(PLAIN, {}), (POWER, {"local_steps": 3})],
    "momentum-tracking": [(PLAIN, {"overlapping": True}), (POWER, {})],
    "gt-nsgd": [(PLAIN, {}), (POWER, {"overlapping": True})],
    "exact-diffusion": [
        (PLAIN, {}),
        (QUARTER, {"learning_options": {"dual_rate": 0.5}}),
        (QSGD, {}),
    ],
    "beer": [(SIGN, {}), (SIGN, {"overlapping": True})],
    "motef": [(TOP_K, {}), (TOP_K, {"overlapping": True})],
    "relay-sgd": [(RELAYED, {}), (CHAIN, {"learning_options": {"correction": 2.0}})],
    "diloco": [
        (PLAIN, {"local_steps": 2}),
        (POWER, {"local_steps": 3, "learning_options": {"gradient_correction": True}}),
        (PLAIN, {"local_steps": 2, "learning_options": {"fragments": 2, "outer_rate": 1.0}}),
        (("dpsgd", {"diffusion_rate": 0.5}), {"local_steps": 2, "overlapping": True}),
        (IN_FLIGHT, {"local_steps": 3, "overlapping": True}),
    ],
    "gasloc": [(SIGN, {}), (POWER, {"learning_options": {"gradient_correction": True}})],
    "noloco": [(PLAIN, {}), (POWER, {"learning_options": {"consensus_rate": 0.5}})],
}


def directly(
    name: str,
    averaging: tuple[str, dict[str, Any]],
    rates: list[float],
    decay: float,
    options: dict[str, Any],
) -> tuple[Tensor, int]:
    """x [D] and bits of this worker, after a step of the rule at each of the learning rates."""
    method, given = averaging
    model = Quadratic(processes().rank, start=1.0)
    parameters = Parameters([model])
    given = dict(given)
    who = processes()
    network = Network(topologies.make(given.pop("topology", "ring"), who.size), who)
    kind = options.pop("local_optimizer", "sgd")
    own = learning.rule(name, kind).directs()
    c = Settings(
        local_optimizer=kind,
        learning_rate=1.0,
        momentum=0.9,
        nesterov=False,
        weight_decay=decay,
        muon_scale="original",
    )
    local = LocalOptimizer(parameters, c, *((0.0, "sgd") if own else ()))

    def make(layout: Layout) -> algorithms.Averaging:
        return algorithms.make(method, network, layout, **given)

    workers = learning.Workers(network, make, parameters, local, local.coupled_decay)
    rule = learning.make(name, workers, kind, **options)
    for rate in rates:
        local.rate = rate
        rule.start()
        model().backward()
        rule.finish()
    return model.x, int(network.bits[0])


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize("name", learning.LEARNING)
def test_a_step_is_that_of_the_rule(name: str) -> None:
    """With momentum, weight decay and a learning rate that changes: the same parameters, but for
    the rounding of displacements, and the same bits. Also in a single process, which averages
    nothing."""
    if processes().size == 1 and learning.rule(name).relays:
        return  # nothing to relay
    has_momentum = learning.rule(name).directs()
    for averaging, keywords in CASES[name]:
        overlaps = keywords.get("overlapping", False)
        # The wrapped optimizer applies its weight decay after the messages, if these overlap.
        decay = 0.0 if overlaps and not has_momentum else 0.1
        rates = [0.02] * 3 + [0.01] * 3
        given = {"overlapping": overlaps, "local_steps": keywords.get("local_steps", 1)}
        more = dict(keywords.get("learning_options", {}))
        expected, bits = directly(name, averaging, rates, decay, given | more)

        model = Quadratic(processes().rank, start=1.0)
        local = sgd(model, momentum=0.0 if has_momentum else 0.9, weight_decay=decay)
        method, options = averaging
        optimizer = GossipOptimizer(local, method, learning=name, **keywords, **options)
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            run(model, optimizer, 1)
        torch.testing.assert_close(model.x, expected, rtol=1e-4, atol=1e-5)
        assert optimizer.bits == bits
        assert bits > 0 or processes().size == 1
        assert (model.x - Quadratic(0, start=1.0).x).abs().max() > 0.01


@pytest.mark.parallel([4])
def test_muon_and_adamw_side_by_side_are_local_optimizer_muon() -> None:
    """torch.optim.Muon takes matrices alone, so that the vectors have an optimizer of their own."""
    options = {"local_optimizer": "muon", "overlapping": False}
    expected, bits = directly("dpsgd", PLAIN, [0.02] * 6, 0.0, options)
    own = Quadratic(processes().rank, start=1.0)
    makers = (
        torch.optim.Muon([own.weight], lr=0.02, weight_decay=0.0, nesterov=False),
        torch.optim.AdamW([own.bias], lr=0.02, weight_decay=0.0),
    )
    optimizers = [GossipOptimizer(made, "dpsgd") for made in makers]
    for _ in range(6):
        own.zero_grad()
        own().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own.x, expected, rtol=1e-4, atol=1e-5)
    assert sum(optimizer.bits for optimizer in optimizers) == bits > 0


# --- The loop -------------------------------------------------------------------------------------


@pytest.mark.parallel([4])
def test_overflowing_gradients_keep_the_mean_of_the_tracked_variable() -> None:
    """The worker's displacement is 0, and its neighbors receive its messages."""
    who = processes()
    for name in ("gradient-tracking", "k-gt", "momentum-tracking", "gt-nsgd"):
        model = Quadratic(who.rank)
        optimizer = GossipOptimizer(sgd(model), "dpsgd", learning=name)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(4):
            optimizer.zero_grad()
            scaler.scale(model()).backward()
            if (t, who.rank) == (1, 2):
                model.bias.grad = torch.full_like(model.bias, torch.inf)
            scaler.step(optimizer)
            scaler.update()
            (state,) = optimizer.state_dict()["param_groups"][0]["gossip"]["averaging"]
            tracked = state["y"] - state["v"] if "y" in state else state["c"]
            rows = torch.cat(who.gather(tracked))
            torch.testing.assert_close(rows.mean(0), torch.zeros(D), rtol=0, atol=1e-5)
            if name == "gradient-tracking":
                assert bool(state["v"].any()) == ((t, who.rank) != (1, 2))
        assert model.x.isfinite().all()


@pytest.mark.parallel([4])
def test_messages_of_a_round_stay_in_flight_between_steps() -> None:
    """Reading a state or the mean model in between receives them, and changes nothing."""
    models = []
    for looks in (False, True):
        model = Quadratic(processes().rank)
        optimizer = GossipOptimizer(
            sgd(model),
            "power-gossip",
            num_iterations=3,
            learning="diloco",
            local_steps=6,
            overlapping=True,
        )
        sent = []
        for step in range(15):
            run(model, optimizer, 1)
            sent.append(optimizer.messages)
            if looks and processes().rank == step % N:
                optimizer.state_dict()
            if looks and step % 4 == 0:
                with optimizer.mean_model():
                    pass
        models.append(model.x)
        if not looks:  # first round: one iteration a step, then every second step
            assert sent == [6, 8, 8, 8, 8, 8, 12, 14, 14, 16, 16, 16, 20, 22, 22]
    assert torch.equal(*models)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", learning.LEARNING)
def test_a_restored_optimizer_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    """Through a file, and between the messages of K-GT."""
    file = tmp_path / f"{processes().rank}.pt"
    averaging, keywords = CASES[name][-1]
    method, options = averaging
    momentum = 0.0 if learning.rule(name).directs() else 0.9

    def made(start: float) -> tuple[Quadratic, GossipOptimizer]:
        model = Quadratic(processes().rank, start)
        local = sgd(model, momentum=momentum)
        return model, GossipOptimizer(local, method, learning=name, **keywords, **options)

    straight = made(1.0)
    run(*straight, 4)
    torch.save([part.state_dict() for part in straight], file)
    run(*straight, 5)
    resumed = made(2.0)
    run(*resumed, 2)  # forgotten by loading
    of_model, of_optimizer = torch.load(file)
    resumed[0].load_state_dict(of_model)
    resumed[1].load_state_dict(of_optimizer)
    run(*resumed, 5)
    assert torch.equal(resumed[0].x, straight[0].x)
    assert resumed[1].bits == straight[1].bits


@pytest.mark.parametrize("name", ["gradient-tracking", "k-gt", "exact-diffusion"])
def test_alone_it_is_the_wrapped_optimizer_to_the_bit(name: str) -> None:
    for make in (
        lambda m: sgd(m, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
    ):
        model, reference = Quadratic(0, 1.0), Quadratic(0, 1.0)
        optimizer = GossipOptimizer(make(model), "dpsgd", learning=name, process_group=ALONE)
        run(model, optimizer, 5)
        run(reference, make(reference), 5)
        assert torch.equal(model.x, reference.x)
        assert optimizer.bits == 0


def momentum_tracking(model: nn.Module) -> GossipOptimizer:
    return GossipOptimizer(sgd(model), "dpsgd", learning="momentum-tracking", process_group=ALONE)


def test_a_missing_gradient_is_0() -> None:
    """And remains missing. Other gradients stay those of the user."""
    found = []
    for missing in (False, True):
        model = Quadratic(0, 1.0)
        optimizer = momentum_tracking(model)
        for t in range(4):
            optimizer.zero_grad()
            model().backward()
            if t % 2:
                model.bias.grad = None if missing else torch.zeros_like(model.bias)
            gradient = model.weight.grad
            assert gradient is not None
            before = gradient.clone()
            optimizer.step()
            assert model.weight.grad is gradient
            assert torch.equal(gradient, before)
        assert (model.bias.grad is None) == missing
        found.append(model.x)
    assert torch.equal(*found)


def test_closures_are_called_once() -> None:
    with_closure, without = Quadratic(0, 1.0), Quadratic(0, 1.0)
    optimizer = momentum_tracking(with_closure)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = with_closure()
        value.backward()
        losses.append(value)
        return value

    for _ in range(3):
        assert optimizer.step(closure) is losses[-1]
    run(without, momentum_tracking(without), 3)
    assert len(losses) == 3
    assert torch.equal(with_closure.x, without.x)


# --- Defaults and bad input -----------------------------------------------------------------------


def test_defaults_of_averaging_depend_on_the_rule() -> None:
    def method(name: str, learning: str = "exact-diffusion", **options: Any) -> Mapping[str, Any]:
        local = sgd(Quadratic(0))
        optimizer = GossipOptimizer(local, name, learning=learning, process_group=ALONE, **options)
        return optimizer.method.options

    quantized: dict[str, Any] = {"compressor": "qsgd", "unbiased": True}
    assert method("choco", **quantized)["levels"] == 64
    assert method("choco", **quantized, levels=100)["levels"] == 100
    assert method("choco", **quantized)["copy_rate"] is None  # by the sizes of tensors


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.2}]
    return torch.optim.SGD(groups, lr=0.1)


def half(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model.bfloat16())


Make = Callable[[nn.Module], torch.optim.Optimizer]
GT, QG, MT = "gradient-tracking", "quasi-global-momentum", "momentum-tracking"
REJECTED: dict[str, tuple[Make, str, dict[str, Any], str]] = {
    "not a name": (sgd, "dpsgd", {"learning": 3}, "^learning=3: use"),
    "option": (sgd, "dpsgd", {"learning": GT, "learning_options": {"momentum": 0.9}}, "momentum="),
    "options": (sgd, "dpsgd", {"learning": GT, "learning_options": 3}, "^learning_options=3"),
    "range": (sgd, "dpsgd", {"learning": QG, "learning_options": {"momentum": 1.0}}, "momentum=1"),
    "form": (
        sgd,
        "dpsgd",
        {"learning": QG, "learning_options": {"local_optimizer": "rmsprop"}},
        "local_optimizer=rmsprop",
    ),
    "moniqua": (sgd, "moniqua", {"learning": GT}, "learning=gradient-tracking"),
    "weighted": (sgd, "push-sum", {"learning": QG}, "learning=quasi-global-momentum"),
    "local steps": (sgd, "dpsgd", {"learning": GT, "local_steps": 2}, "^local_steps=2"),
    "momentum twice": (partial(sgd, momentum=0.9), "dpsgd", {"learning": MT}, "^momentum=0.9: "),
    "ascent": (partial(sgd, maximize=True), "dpsgd", {"learning": MT}, "^maximize=True: use False"),
    "adam": (adam, "dpsgd", {"learning": MT}, "^optimizer=Adam: use"),
    "several rates": (two_rates, "dpsgd", {"learning": "k-gt"}, "^lr=0.1 and 0.2: use"),
    "half precision": (half, "dpsgd", {"learning": GT}, "torch.bfloat16; use torch.float32"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_bad_combinations_are_rejected(name: str) -> None:
    make, method, keywords, text = REJECTED[name]
    with pytest.raises(BadInput, match=text):
        GossipOptimizer(make(Quadratic(0)), method, process_group=ALONE, **keywords)


@pytest.mark.parametrize("home", ["script", "powergossip.algorithms.learning.every"])
def test_options_of_an_own_rule_are_the_same_by_both_doors(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Every(learning.DPSGD):
        __module__ = home

        def __init__(
            self,
            workers: learning.Workers,
            *,
            every: int = 7,
            overlapping: bool = True,
            local_steps: int = 1,
        ) -> None:
            super().__init__(workers, overlapping=overlapping, local_steps=local_steps)

    monkeypatch.setitem(learning.LEARNING, "every", Every)
    keys = {"optimizer": "dpsgd", "learning": "every"}
    for given in ({}, {"every": 9}):
        ours = checked(configured(**keys, learning_options=given), ALONE).method
        after_steps(1, **keys, learning_options=given)
        model = Quadratic(0)
        optimizer = GossipOptimizer(
            sgd(model), "dpsgd", learning="every", learning_options=given, process_group=ALONE
        )
        run(model, optimizer, 2)
        theirs = optimizer.method
        assert ours.learning_options["every"] == theirs.learning_options["every"]
        assert ours.learning_options["every"] == given.get("every", 7)
    for wrong in ("abc", 1.5, True):
        text = f"every={wrong!r}: use a whole number"
        with pytest.raises(BadInput, match=text):
            GossipOptimizer(
                sgd(model), "dpsgd", learning="every", learning_options={"every": wrong}
            )
        with pytest.raises(ValueError, match=f"^learning_options.{text}"):
            after_steps(1, **keys, learning_options={"every": wrong})


@pytest.mark.parallel([4])
def test_rates_that_become_different_are_rejected() -> None:
    """Before anything is changed, so that a step with one rate can follow."""
    model = Quadratic(processes().rank)
    first, second = model.parameters()
    groups = [{"params": [first]}, {"params": [second]}]
    local = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    optimizer = GossipOptimizer(local, "dpsgd", learning="k-gt")
    model().backward()
    optimizer.param_groups[1]["lr"] = 0.3
    with pytest.raises(ValueError, match=r"^lr=0.1 and 0.3: use"):
        optimizer.step()
    assert not local.state
    optimizer.param_groups[0]["lr"] = 0.3
    run(model, optimizer, 1)


def test_the_state_of_another_rule_is_rejected() -> None:
    def made(**keywords: Any) -> GossipOptimizer:
        return GossipOptimizer(sgd(Quadratic(0)), "dpsgd", process_group=ALONE, **keywords)

    def beta(value: float) -> dict[str, Any]:
        return {"learning": MT, "learning_options": {"momentum": value}}

    with pytest.raises(ValueError, match=r"learning='dpsgd' \(here 'gradient-tracking'\)"):
        made(learning=GT).load_state_dict(made().state_dict())
    with pytest.raises(ValueError, match=r"momentum=0.8 \(here 0.9\)"):
        made(**beta(0.9)).load_state_dict(made(**beta(0.8)).state_dict())
    other = GossipOptimizer(adam(Quadratic(0)), "dpsgd", process_group=ALONE)
    for optimizer, state, kinds in (
        (made(), other, "Adam; .* SGD"),
        (other, made(), "SGD; .* Adam"),
    ):
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=kinds):
            optimizer.load_state_dict(state.state_dict())
        assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    made(**beta(0.9)).load_state_dict(made(**beta(0.9)).state_dict())


# Clipping and the correction of the gradient.


def clipped(way: str, steps: int) -> Tensor:
    """The mean model's distance from the optimum of quadratics, with clipped gradients."""
    who = processes()
    a = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    b = torch.tensor([4.0, -4.0, 2.0, 8.0], dtype=torch.float64)
    x = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = GossipOptimizer(
        torch.optim.SGD([x], lr=0.04),
        "dpsgd",
        learning="diloco",
        local_steps=3,
        learning_options={"gradient_correction": True, "correction_rate": 0.5},
        max_norm=1.0 if way == "max_norm" else None,
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (a[who.rank] * (x - b[who.rank]).square().sum() / 2).backward()
        if way != "max_norm":
            nn.utils.clip_grad_norm_([x], 1.0)
        optimizer.step()
    with optimizer.mean_model():
        return x.detach() - (a * b).sum() / a.sum()


@pytest.mark.parallel([4])
def test_clipped_corrected_gradients_have_no_bias() -> None:
    assert clipped("max_norm", 500).abs().max() < 5e-5
    assert clipped("before the step alone", 150).abs().max() > 0.5
