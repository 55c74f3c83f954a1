"""Error of each learning rule over each averaging rule, on quadratics whose optima differ.

python -m tests.harness.laws    the table of docs/different-data.md
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from powergossip.algorithms import learning
from powergossip.algorithms.learning.gossip_rule import COPIES
from powergossip.formatting import markdown
from tests.harness.quadratics import AVERAGING, Quadratics, adam, rule_of, train

LocalOptimizer = Callable[[Quadratics], learning.Local]
COPYING = ("top-k", "sign", "qsgd")  # averaging rules with public copies


class Law(NamedTuple):
    """A rule reaches the optimum of the mean loss over an averaging rule.

    averaging          # in quadratics.AVERAGING
    rate               # η
    options            # of the rule
    averaging_options  # on top of those in quadratics.AVERAGING
    slow               # whether another law has the same rules, or nearly so
    """

    name: str
    averaging: str
    rate: float
    steps: int
    options: dict[str, Any]
    averaging_options: dict[str, Any]
    slow: bool = False


EXACT = [
    Law("gradient-tracking", "plain", 0.1, 400, {}, {}),
    Law("gradient-tracking", "plain", 0.1, 400, {"overlapping": True}, {}),
    Law("gradient-tracking", "power-gossip", 0.05, 1200, {}, {}),
    Law("gradient-tracking", "top-k", 0.02, 6000, {"overlapping": True}, {}, True),
    Law("gradient-tracking", "sign", 0.02, 6000, {"overlapping": True}, {}, True),
    Law("gradient-tracking", "qsgd", 0.02, 2000, {"overlapping": True}, {}),
    Law("k-gt", "plain", 0.05, 600, {}, {}),
    Law("k-gt", "plain", 0.01, 3000, {"local_steps": 5}, {}),
    Law("k-gt", "power-gossip", 0.05, 1500, {}, {}),
    Law("k-gt", "power-gossip", 0.05, 1500, {}, {"bits": 8}, True),
    Law("k-gt", "power-gossip", 0.01, 6000, {"local_steps": 5}, {}, True),
    Law("momentum-tracking", "plain", 0.01, 1500, {}, {}),
    Law("momentum-tracking", "power-gossip", 0.005, 3000, {}, {}),
    Law("momentum-tracking", "power-gossip", 0.005, 3000, {}, {"bits": 4}, True),
    Law("exact-diffusion", "plain", 0.1, 600, {}, {}),
    Law("exact-diffusion", "power-gossip", 0.05, 6000, {}, {}, True),
    Law("exact-diffusion", "power-gossip", 0.1, 3000, {"dual_rate": 1}, {"diffusion_rate": 0.25}),
    Law("exact-diffusion", "qsgd", 0.05, 3000, {}, {"copy_rate": 0.5}),
    Law("exact-diffusion", "identity", 0.1, 1000, {}, {"copy_rate": 0.5}),
    Law("beer", "top-k", 0.02, 6000, {}, {}, True),
    Law("beer", "sign", 0.02, 3000, {}, {}),
    Law("beer", "qsgd", 0.02, 2000, {}, {}, True),
    Law("motef", "top-k", 0.02, 6000, {"momentum": 0.9}, {}, True),
    Law("motef", "qsgd", 0.02, 2000, {"momentum": 0.9}, {}),
    Law("relay-sgd", "plain", 0.05, 1000, {}, {}, True),
    Law("relay-sgd", "top-k", 0.05, 3000, {}, {}, True),
    Law("relay-sgd", "sign", 0.05, 3000, {}, {}, True),
]
_CORRECTED: dict[str, Any] = {"local_steps": 5, "gradient_correction": True}
_OUTER: list[tuple[str, dict[str, Any]]] = [
    ("diloco", {"outer_momentum": 0.5}),
    ("gasloc", {"outer_momentum": 0.5}),
    ("noloco", {"outer_momentum": 0.3}),
]
EXACT += [
    Law(name, averaging, 0.02, steps, own | _CORRECTED, given, slow)
    for name, own in _OUTER
    for averaging, steps, given, slow in (
        ("plain", 3000, {}, name != "diloco"),
        ("power-gossip", 5000, {"num_iterations": 4}, name != "diloco"),
        ("qsgd", 6000, {}, True),
    )
]
# Columns of the table, and its rows: a rule, and options of a variant.
IN_TABLE = {
    "plain": "plain",
    "PowerGossip": "power-gossip",
    "CHOCO, top-k": "top-k",
    "CHOCO, sign": "sign",
    "CHOCO, unbiased QSGD": "qsgd",
    "push-sum": "push-sum",
}
WITH_ADAM = "plain, Adam"
TABLE_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in learning.LEARNING},
    **{f"{name}, corrected": (name, own | _CORRECTED) for name, own in _OUTER},
}
REJECTED = "–"
BIAS_RATE, BIAS_STEPS = 0.01, 3000  # of pairs without a law


def error(law: Law, local: LocalOptimizer | None = None, most: int | None = None) -> float:
    """√(mean_i ‖x_i − x*‖²) after the steps of the law. Raises ValueError for a rejected pair.

    Args:
        local: The local optimizer for a problem, by default SGD with the rate of the law.
        most: Largest number of steps, by default those of the law.
    """
    problem = Quadratics()
    topology = "binary-tree" if learning.LEARNING[law.name].relays else "ring"
    rule = rule_of(
        law.name,
        law.averaging,
        problem,
        law.rate if local is None else local(problem),
        topology,
        averaging_options=law.averaging_options,
        **law.options,
    )
    train(rule, problem, min(law.steps, most or law.steps))
    return problem.error


def is_accepted(name: str, averaging: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a learning rule works with an averaging rule of quadratics.AVERAGING."""
    topology = "binary-tree" if learning.LEARNING[name].relays else "ring"
    try:
        rule_of(name, averaging, Quadratics(), BIAS_RATE, topology, **(options or {}))
    except ValueError:
        return False
    return True


def law_of(name: str, averaging: str, variant: Mapping[str, Any]) -> Law:
    """The first law in EXACT of this pair and variant, or settings for its bias."""
    for law in EXACT:
        is_variant = "gradient_correction" in law.options
        if (law.name, law.averaging) == (name, averaging) and is_variant == bool(variant):
            return law
    row = learning.LEARNING[name]
    chosen = "overlapping" in learning.options(name)
    overlapping = chosen and averaging in COPYING and row.overlaps >= COPIES
    options = {"overlapping": True} if overlapping else {}
    method, given = AVERAGING[averaging]
    own = learning.averaging_defaults(name, method)
    own.pop("diffusion_rate", None)
    if "diffusion_rate" in given:
        own["diffusion_rate"] = learning.diffusion_factor(name, method) * given["diffusion_rate"]
    return Law(name, averaging, BIAS_RATE, BIAS_STEPS, {**options, **variant}, own)


def _cells(name: str, variant: Mapping[str, Any]) -> Iterator[str]:
    for averaging in IN_TABLE.values():
        if not is_accepted(name, averaging, variant):
            yield REJECTED
        else:
            yield _shown(error(law_of(name, averaging, variant)))
    row = learning.LEARNING[name]
    if "adamw" in row.optimizers and not row.directs():
        yield _shown(error(Law(name, "plain", 0.0, 7000, dict(variant), {}), adam))
    else:
        yield REJECTED


def _shown(reached: float) -> str:
    return f"{reached:.0e}" if reached < 1e-9 else f"{reached:.2g}"


def table() -> str:
    """A Markdown table: learning rules × averaging rules, with the error of each."""
    header = ["`learning`", *IN_TABLE, WITH_ADAM]
    rows = [[_label(label), *_cells(*TABLE_ROWS[label])] for label in TABLE_ROWS]
    return markdown(header, rows)


def _label(label: str) -> str:
    name, *variant = label.split(", ")
    return ", ".join([f"`{name}`", *variant])


if __name__ == "__main__":
    print(table())
