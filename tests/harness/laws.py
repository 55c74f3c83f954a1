"""Error of each learning rule over each averaging rule, on quadratics whose optima differ.

python -m tests.harness.laws    the table of docs/different-data.md
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from powergossip.algorithms import learning
from powergossip.formatting import markdown
from tests.harness.quadratics import AVERAGING, Quadratics, rule_of, train


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
    Law("gradient-tracking", "top-k", 0.02, 6000, {"overlapping": True}, {}),
    Law("gradient-tracking", "sign", 0.02, 6000, {"overlapping": True}, {}, True),
    Law("gradient-tracking", "qsgd", 0.02, 2000, {"overlapping": True}, {}),
    Law("k-gt", "plain", 0.05, 600, {}, {}),
    Law("k-gt", "plain", 0.01, 3000, {"local_steps": 5}, {}, True),
    Law("k-gt", "power-gossip", 0.05, 1500, {}, {}),
    Law("k-gt", "power-gossip", 0.01, 6000, {"local_steps": 5}, {}),
    Law("momentum-tracking", "plain", 0.01, 1500, {}, {}),
    Law("momentum-tracking", "power-gossip", 0.005, 3000, {}, {}),
    Law("exact-diffusion", "plain", 0.1, 600, {}, {}),
    Law("exact-diffusion", "power-gossip", 0.05, 6000, {}, {}),
    Law("exact-diffusion", "power-gossip", 0.1, 3000, {"dual_rate": 1}, {"diffusion_rate": 0.25}),
    Law("exact-diffusion", "qsgd", 0.05, 3000, {}, {"copy_rate": 0.5}),
    Law("exact-diffusion", "identity", 0.1, 1000, {}, {"copy_rate": 0.5}),
    Law("beer", "top-k", 0.02, 6000, {}, {}, True),
    Law("beer", "sign", 0.02, 3000, {}, {}),
    Law("beer", "qsgd", 0.02, 2000, {}, {}, True),
    Law("motef", "top-k", 0.02, 6000, {"momentum": 0.9}, {}),
    Law("motef", "qsgd", 0.02, 2000, {"momentum": 0.9}, {}, True),
    Law("relay-sgd", "plain", 0.05, 1000, {}, {}, True),
    Law("relay-sgd", "top-k", 0.05, 3000, {}, {}, True),
    Law("relay-sgd", "sign", 0.05, 3000, {}, {}, True),
]
# What the table has, by its name there.
IN_TABLE = {
    "plain": "plain",
    "PowerGossip": "power-gossip",
    "CHOCO, top-k": "top-k",
    "CHOCO, sign": "sign",
    "CHOCO, unbiased QSGD": "qsgd",
    "push-sum": "push-sum",
}
REJECTED = "–"
BIAS_RATE, BIAS_STEPS = 0.01, 3000  # of pairs without a law


def error(law: Law) -> float:
    """√(mean_i ‖x_i − x*‖²) after the steps of the law. Raises ValueError for a rejected pair."""
    problem = Quadratics()
    topology = "binary-tree" if learning.LEARNING[law.name].relays else "ring"
    rule = rule_of(
        law.name,
        law.averaging,
        problem,
        law.rate,
        topology,
        averaging_options=law.averaging_options,
        **law.options,
    )
    train(rule, problem, law.steps)
    return problem.error


def is_accepted(name: str, averaging: str) -> bool:
    """Whether a learning rule works with an averaging rule of quadratics.AVERAGING."""
    topology = "binary-tree" if learning.LEARNING[name].relays else "ring"
    try:
        rule_of(name, averaging, Quadratics(), BIAS_RATE, topology)
    except ValueError:
        return False
    return True


def law_of(name: str, averaging: str) -> Law:
    """The first law in EXACT of this pair, or settings for its bias."""
    for law in EXACT:
        if (law.name, law.averaging) == (name, averaging):
            return law
    overlapping = learning.LEARNING[name].overlaps and averaging in ("top-k", "sign", "qsgd")
    options = {"overlapping": True} if overlapping else {}
    method, given = AVERAGING[averaging]
    own = learning.averaging_defaults(name, method)
    if "diffusion_rate" in given:
        own["diffusion_rate"] = learning.diffusion_factor(name, method) * given["diffusion_rate"]
    return Law(name, averaging, BIAS_RATE, BIAS_STEPS, options, own)


def _cells(name: str) -> Iterator[str]:
    for averaging in IN_TABLE.values():
        if not is_accepted(name, averaging):
            yield REJECTED
        else:
            reached = error(law_of(name, averaging))
            yield f"{reached:.0e}" if reached < 1e-9 else f"{reached:.2g}"


def table() -> str:
    """A Markdown table: learning rules × averaging rules, with the error of each."""
    header = ["`learning`", *IN_TABLE]
    return markdown(header, [[f"`{name}`", *_cells(name)] for name in learning.LEARNING])


if __name__ == "__main__":
    print(table())
