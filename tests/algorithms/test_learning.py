"""Laws of the learning rules for data that differ between workers, on quadratics."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, topologies
from powergossip.algorithms import learning
from powergossip.algorithms.ddp_hooks import DDPHook
from powergossip.algorithms.learning.gossip_rule import COPIES
from powergossip.algorithms.learning.quasi_global import QuasiGlobalAdam, QuasiGlobalMomentum
from powergossip.network import Network, Processes
from tests.harness.averaging import graph
from tests.harness.laws import (
    EXACT,
    IN_TABLE,
    REJECTED,
    TABLE_ROWS,
    WITH_ADAM,
    Law,
    error,
    is_accepted,
    law_of,
)
from tests.harness.quadratics import (
    AVERAGING,
    COLUMNS,
    ROWS,
    SGD,
    WORKERS,
    Quadratics,
    rule_of,
    train,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "law",
    [
        pytest.param(
            law, marks=pytest.mark.slow if law.slow else (), id=f"{law.name}-{law.averaging}"
        )
        for law in EXACT
    ],
)
def test_exact_fixed_points(law: Law) -> None:
    """All workers reach the optimum of the mean loss, from which their own optima are far. Of the
    steps of the table, 1500 suffice here."""
    assert error(law, most=None if law.slow else 1500) < 1e-9


@pytest.mark.long
def test_the_page_of_learning_rules_has_the_pairs_that_are_accepted() -> None:
    """A pair has an error in the table of `python -m tests.harness.laws`, or is rejected."""
    lines = (ROOT / "docs" / "different-data.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| `learning` | plain |"))
    columns = [cell.strip() for cell in lines[first].split("|")[2:-1]]
    rows = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :]):
        label, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        rows[label.replace("`", "")] = cells
    assert columns == [*IN_TABLE, WITH_ADAM]
    assert sorted(rows) == sorted(TABLE_ROWS)
    for label, cells in rows.items():
        name, variant = TABLE_ROWS[label]
        for averaging, cell in zip(IN_TABLE.values(), cells[:-1], strict=True):
            assert is_accepted(name, averaging, variant) == (cell != REJECTED), (label, averaging)
            if law_of(name, averaging, variant) in EXACT:
                assert float(cell) < 1e-9, (label, averaging)
        if variant:
            assert float(cells[-1]) < 0.05


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("gradient-tracking", "directed"),
        ("k-gt", "directed"),
        ("momentum-tracking", "directed"),
        ("k-gt", "one-peer-exponential"),
    ],
)
def test_exact_on_directed_graphs(name: str, topology: str) -> None:
    """A doubly stochastic W is enough for tracking, static or not."""
    problem = Quadratics()
    train(rule_of(name, "plain", problem, 0.02, topology=topology), problem, 1500)
    assert problem.error < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("averaging", ["plain", "power-gossip"])
def test_quasi_global_momentum_does_not_change_the_fixed_point(averaging: str) -> None:
    """At the fixed point nothing moves, the momentum is 0, and D-PSGD's bias is left."""
    problem = Quadratics()
    rule = rule_of("quasi-global-momentum", averaging, problem, 0.02)
    train(rule, problem, 1500)
    plain = Quadratics()
    method, _ = AVERAGING[averaging]
    network = Network(topologies.make("ring", WORKERS), dtype=torch.float64)
    gossip = algorithms.make(method, network, plain.layout)
    for _ in range(1500):
        plain.x.sub_(plain.gradients(), alpha=0.02)
        network.run(gossip.step(plain.x))
    assert plain.error > 0.1
    assert problem.error == pytest.approx(plain.error, rel=1e-3 if averaging == "plain" else 0.3)


INVARIANTS = {  # rule → (tensor of the state whose mean is that of the other, or 0; the other)
    "gradient-tracking": ("y", "v"),
    "gt-nsgd": ("y", "v"),
    "k-gt": ("c", None),
    "momentum-tracking": ("c", None),
    "exact-diffusion": ("d", None),
    "beer": ("y", "v"),
    "motef": ("y", "v"),
    "diloco": ("c", None),
    "noloco": ("c", None),
}


@pytest.mark.long
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_quasi_global_momentum_is_stable_up_to_its_largest_rate(
    nesterov: bool, overlapping: bool
) -> None:
    """On a directed ring, without gradients."""
    name, topology = "quasi-global-momentum", "unidirectional-ring"
    given = {"momentum": 0.5, "nesterov": nesterov, "overlapping": overlapping}
    largest = learning.rule(name).largest_rate(graph(topology, WORKERS), given)
    assert largest < 2
    for factor, decays in ((0.95, True), (1.05, False)):
        problem = Quadratics()
        problem.a.zero_()
        problem.x.copy_(problem.b)
        rate = {"diffusion_rate": factor * largest}
        train(rule_of(name, "plain", problem, 1.0, topology, rate, **given), problem, 1500)
        apart, before = (x - x.mean(0) for x in (problem.x, problem.b))
        assert (apart.norm() < before.norm()) == decays


@pytest.mark.parametrize("averaging", ["plain", "power-gossip"])
def test_quasi_global_momentum_survives_a_learning_rate_of_0(averaging: str) -> None:
    """Cosine decay to 0 and a restart. The displacements by gossip did not vanish with the rate."""
    problem = Quadratics()
    local = SGD(0.05)
    rule = rule_of("quasi-global-momentum", averaging, problem, local)
    rates = [0.05 * (1 + math.cos(math.pi * t / 200)) / 2 for t in range(201)]
    train(rule, problem, 300)
    errors = [problem.error]
    for rate in [*rates, 0.0, 0.0, *[0.05] * 300]:
        local.rate = rate
        train(rule, problem, 1)
        errors.append(problem.error)
    assert max(errors) < 1.5 * errors[0]
    assert errors[-1] == pytest.approx(errors[0], rel=0.1)


def test_k_gt_keeps_its_correction_in_a_step_with_a_learning_rate_of_0() -> None:
    problem = Quadratics()
    local = SGD(0.05)
    rule = rule_of("k-gt", "plain", problem, local)
    train(rule, problem, 600)
    for rate in (0.0, 0.0, 0.05, 0.05):
        local.rate = rate
        train(rule, problem, 1)
        assert problem.error < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "averaging"),
    [
        ("k-gt", "plain"),
        ("gradient-tracking", "plain"),
        ("exact-diffusion", "power-gossip"),
    ],
)
def test_a_decay_of_the_learning_rate_disturbs_all_but_k_gt(name: str, averaging: str) -> None:
    """For at most 100 steps, as the page of learning rules says."""
    problem = Quadratics()
    local = SGD(0.05)
    rule = rule_of(name, averaging, problem, local)
    train(rule, problem, 1500)
    local.rate = 0.005
    errors = []
    for _ in range(100):
        train(rule, problem, 1)
        errors.append(problem.error)
    if name == "k-gt":
        assert max(errors) < 1e-9
    else:
        assert 1 < max(errors) < 5
        assert errors[-1] < 0.1


@pytest.mark.long
def test_clipping_has_the_bias_of_all_reduce() -> None:
    biased = []
    for name, averaging, topology in (
        ("quasi-global-momentum", "all-reduce", "ring"),
        ("gradient-tracking", "plain", "ring"),
        ("k-gt", "plain", "ring"),
        ("exact-diffusion", "plain", "ring"),
        ("relay-sgd", "plain", "binary-tree"),
    ):
        problem = Quadratics()
        train(rule_of(name, averaging, problem, 0.05, topology, clip=5.0), problem, 1000)
        biased.append(problem.error)
    assert biased == pytest.approx([2.5] * len(biased), abs=0.05)


def test_quasi_global_momentum_over_all_reduce_is_exact_by_default() -> None:
    """Its messages follow the local update, as those of SGD do: equal models in all workers."""
    problem, network = Quadratics(), Network(topologies.make("ring", WORKERS))
    gossip = algorithms.make("all-reduce", network, problem.layout)
    overlapping = learning.overlapping("quasi-global-momentum", gossip)
    rule = rule_of("quasi-global-momentum", "all-reduce", problem, 0.05, overlapping=overlapping)
    train(rule, problem, 600)
    assert problem.error < 1e-9


@pytest.mark.parametrize("name", ["gradient-tracking", "k-gt", "momentum-tracking", "gt-nsgd"])
def test_sums_over_the_workers_need_weights_that_conserve_them(name: str) -> None:
    """Columns of the rounds of `epidemic` do not sum to 1."""
    with pytest.raises(ValueError, match=f"topology=epidemic: .*{name}"):
        rule_of(name, "plain", Quadratics(), 0.02, "epidemic")
    rule_of("quasi-global-momentum", "plain", Quadratics(), 0.02, "epidemic")


@pytest.mark.parametrize(("name", "of"), INVARIANTS.items())
def test_tracked_means(name: str, of: tuple[str, str | None]) -> None:
    """The mean of the tracked variable is that of what it tracks; corrections add up to 0."""
    for averaging in ("top-k",) if name in ("beer", "motef") else ("plain", "power-gossip"):
        problem = Quadratics()
        corrected: dict[str, Any] = {"gradient_correction": True} if name in OUTER else {}
        rule = rule_of(name, averaging, problem, 0.01, **corrected)
        for _ in range(50):
            train(rule, problem, 1)
            state = rule.state_dict()
            tracked, target = state[of[0]], 0 if of[1] is None else state[of[1]]
            torch.testing.assert_close(
                (tracked - target).mean(0), torch.zeros_like(problem.x[0]), atol=1e-12, rtol=0
            )
        assert tracked.abs().max() > 1e-3


def trajectory(steps: int, name: str, averaging: str, rate: float, **options: Any) -> Tensor:
    problem = Quadratics()
    train(rule_of(name, averaging, problem, rate, **options), problem, steps)
    return problem.x


@pytest.mark.parametrize("name", ["gradient-tracking", "k-gt", "exact-diffusion"])
def test_power_gossip_of_full_rank_is_the_uncompressed_method(name: str) -> None:
    """PowerGossip cannot compress a matrix with rank min(rows, columns), and sends all of it."""
    own = {"dual_rate": 1} if name == "exact-diffusion" else {}
    full = trajectory(20, name, "power-gossip", 0.05, averaging_options={"rank": COLUMNS}, **own)
    torch.testing.assert_close(full, trajectory(20, name, "plain", 0.05), rtol=0, atol=1e-12)


def test_exact_diffusion_over_copies_without_compression_is_exact_diffusion() -> None:
    """LEAD with the identity and α = 1 is NIDS."""
    lead = trajectory(20, "exact-diffusion", "identity", 0.05)
    torch.testing.assert_close(
        lead, trajectory(20, "exact-diffusion", "plain", 0.05), rtol=0, atol=1e-5
    )


def test_k_gt_with_one_local_step_is_gradient_tracking() -> None:
    """c_i = y_i − u_i, once y has started with the workers' own first displacements."""
    k_gt = trajectory(300, "k-gt", "plain", 0.05)
    tracking = trajectory(300, "gradient-tracking", "plain", 0.05)
    assert (k_gt - tracking).abs().max() < 1e-6


def test_motef_without_momentum_is_beer() -> None:
    """λ = 1"""
    motef = trajectory(30, "motef", "top-k", 0.02, momentum=0.0)
    assert torch.equal(motef, trajectory(30, "beer", "top-k", 0.02))


@pytest.mark.parametrize("name", sorted(learning.LEARNING))
def test_one_worker_is_the_local_optimizer(name: str) -> None:
    """Without neighbors, each rule is SGD with the same momentum, if it has one."""
    problem = Quadratics(workers=1)
    averaging = "top-k" if name in ("beer", "motef") else "plain"
    plain = {"momentum": 0.0, "outer_momentum": 0.0, "outer_rate": 1.0}
    own: dict[str, Any] = {
        option: plain[option] for option in plain.keys() & learning.options(name).keys()
    }
    train(rule_of(name, averaging, problem, 0.1, **own), problem, 3)
    x = torch.zeros_like(problem.x)
    for _ in range(3):
        g = problem.a * (x - problem.b)
        x -= 0.1 * (g / g.norm() if name == "gt-nsgd" else g)
    torch.testing.assert_close(problem.x, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("averaging", ["plain", "power-gossip"])
def test_exact_diffusion_damps_all_eigenvectors(averaging: str) -> None:
    """Its mode for the eigenvalue λ of W shrinks by (1 + λ)/2, that of D² grows below λ = −1/3, the
    smallest one here. PowerGossip averages vectors with a rate of their own, 1."""
    problem = Quadratics(shapes=[(ROWS, COLUMNS), (4,)])
    problem.a.fill_(1e-9)  # where the limit is
    alternating = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(WORKERS // 2)
    problem.x.copy_(alternating[:, None].expand_as(problem.x))
    train(rule_of("exact-diffusion", averaging, problem, 0.1), problem, 200)
    damped = problem.x if averaging == "plain" else problem.x[:, -4:]
    assert damped.abs().max() < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("levels", [4, 64])
def test_exact_diffusion_over_quantization_of_large_tensors(levels: int) -> None:
    """At its default rates. Those that depend on the levels alone diverge with 4."""
    problem = Quadratics(dtype=torch.float32, shapes=[(64, 64), (6, 5)])
    first = problem.error
    options = {"levels": levels, "diffusion_rate": None, "copy_rate": None}
    train(
        rule_of("exact-diffusion", "qsgd", problem, 0.05, averaging_options=options), problem, 200
    )
    assert problem.error < first / 3


NOT_ACCEPTED = [
    ("beer", "plain", "beer"),
    ("k-gt", "sign", "k-gt"),
    ("momentum-tracking", "qsgd", "momentum-tracking"),
    ("exact-diffusion", "top-k", "exact-diffusion"),
    ("exact-diffusion", "sign", "exact-diffusion"),
    ("k-gt", "all-reduce", "k-gt with optimizer=all-reduce: the mean of all models has no bias"),
]


@pytest.mark.parametrize(("name", "averaging", "found"), NOT_ACCEPTED)
def test_pairs_without_a_law_are_rejected(name: str, averaging: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"learning={found}"):
        rule_of(name, averaging, Quadratics(), 0.1)


SINGLE = [
    ("gradient-tracking", "plain", 0.1, {}, 1e-5),
    ("gradient-tracking", "power-gossip", 0.05, {}, 1e-5),
    ("k-gt", "plain", 0.1, {}, 1e-5),
    ("k-gt", "power-gossip", 0.05, {}, 1e-5),
    ("exact-diffusion", "plain", 0.1, {}, 1e-5),
    ("exact-diffusion", "power-gossip", 0.1, {"diffusion_rate": 0.25}, 1e-5),
    ("beer", "top-k", 0.02, {}, 1e-4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "averaging", "rate", "given", "bound"), SINGLE)
def test_rounding_errors_in_single_precision_do_not_add_up(
    name: str, averaging: str, rate: float, given: dict[str, Any], bound: float
) -> None:
    """20,000 steps in float32. The difference form of D² ends at 7e-3."""
    problem = Quadratics(dtype=torch.float32)
    train(rule_of(name, averaging, problem, rate, averaging_options=given), problem, 20_000)
    assert problem.error < bound


OUTER = ("diloco", "gasloc", "noloco")
# Rules with an averaging rule and a topology that they accept, and options.
TYPICAL = [
    *((name, {"local_steps": 2} if name == "k-gt" else {}) for name in learning.LEARNING),
    *((name, {"gradient_correction": True, "local_steps": 2}) for name in OUTER),
    ("diloco", {"local_steps": 3, "overlapping": True, "gradient_correction": True}),
    ("quasi-global-momentum", {"local_optimizer": "adamw"}),
    ("gradient-tracking", {"overlapping": True}),
]


def typical(
    name: str,
    problem: Quadratics,
    who: Processes | None = None,
    rate: float | learning.Local = 0.05,
    **options: Any,
) -> learning.GossipRule:
    found = learning.rule(name)
    averaging = "top-k" if found.kinds == COPIES else "plain"
    topology = graph("double-binary-tree" if found.relays else "tail", problem.n_workers)
    network = Network(topology, who, dtype=problem.x.dtype)
    return rule_of(name, averaging, problem, rate, network, **options)


@pytest.mark.parametrize(("name", "options"), TYPICAL)
def test_a_restored_rule_continues_to_the_bit(name: str, options: dict[str, Any]) -> None:
    """In a rule that has made steps, and with another learning rate."""
    runs = []
    for start in (0.0, 1.0):
        problem, local = Quadratics(), SGD(0.002)
        problem.x.add_(start)
        rule = typical(name, problem, rate=local, **options)
        train(rule, problem, 5)
        runs.append((rule, problem, local))
    (rule, problem, local), (restored, resumed, theirs) = runs
    theirs.rate = 0.003
    train(restored, resumed, 2)
    restored.load_state_dict(copy.deepcopy(rule.state_dict()))
    resumed.x.copy_(problem.x)
    local.rate = theirs.rate = 0.05
    for run in (rule, problem), (restored, resumed):
        train(*run, 5)
    assert torch.equal(resumed.x, problem.x)


# Rule → names of the state that workers keep, and of that whose mean is conserved, where a run
# resumes with another number of workers (values: tests/training/test_elastic.py). Others: none.
OF_WORKERS: dict[type[learning.Learning], tuple[str, str]] = {
    learning.DPSGD: ("steps", ""),
    learning.CentralizedSGD: ("batches decay", "aggregation error gradient"),
    DDPHook: ("p q rng_keys rng_position start_iteration steps", "errors"),
    QuasiGlobalMomentum: ("m rate", ""),
    QuasiGlobalAdam: ("m steps v", ""),
    learning.MomentumTracking: ("m", ""),
    learning.DiLoCo: ("steps", "mixed previous slow"),
    learning.GASLoC: ("steps", "previous slow"),
    learning.NoLoCo: ("steps", "previous slow"),
}


@pytest.mark.parametrize("rule", dict.fromkeys([*OF_WORKERS, *learning.LEARNING.values()]))
def test_names_of_the_state_that_does_not_depend_on_the_topology(rule: Any) -> None:
    kept, conserved = rule.kept, rule.conserved
    if issubclass(rule, learning.GossipRule):
        state = rule.state
        kept, conserved = (
            [name for name in state if state[name] is kind]
            for kind in (learning.Variable.KEPT, learning.Variable.CONSERVED)
        )
    found = tuple(" ".join(sorted(names)) for names in (kept, conserved))
    assert found == OF_WORKERS.get(rule, ("", ""))
