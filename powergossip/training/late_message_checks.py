"""The method of a run in edge form: accepted configurations, and their options."""

from collections.abc import Mapping
from typing import Any

from powergossip import checks
from powergossip.algorithms import AVERAGING, learning, rates
from powergossip.checks import BadValue
from powergossip.events import averaging, scenario
from powergossip.events.members import Members
from powergossip.network import Losses, Network
from powergossip.parameters import Layout
from powergossip.training.config import Settings
from powergossip.training.config_checks import errors_name_keys


def losses_of(c: Settings) -> Losses | None:
    """The lost messages of push-sum or RelaySGD. Raises BadValue for other scenarios."""
    checks.check("on_worker_loss", c.on_worker_loss, not c.survives, f"end with {c.one_way}")
    if c.scenario is None and c.gossip == "synchronous":
        return None
    drawn = scenario.read(c.scenario or {}, c.n_workers, c.seed)
    checks.check("gossip", c.gossip, c.gossip == "synchronous", f"synchronous with {c.one_way}")
    others = sorted(set(c.scenario) - {"loss"})
    checks.check("scenario", others, not others, f"loss alone with {c.one_way}")
    checks.check(
        "optimizer",
        c.optimizer,
        "compressor" not in c.options,
        "dpsgd with learning=relay-sgd where messages are lost; the copies of compressed messages "
        "would not agree again",
    )
    return Losses(drawn.lost, bool(c.options.get("running_sums")))


def delay_of(c: Settings) -> int:
    """The delay of exchanges in steps that exact diffusion and A²CiD² take into account.

    Averaging alone need not. An edge has one exchange at a time, so that its exchanges become rarer
    as they take longer, and averaging is as stable as without delays.
    """
    return 0 if c.gossip == "synchronous" else c.max_delay or 0


def late_options(c: Settings) -> dict[str, Any]:
    """Options of the learning rule whose default differs where exchanges are late: a dual rate."""
    if "dual_rate" not in learning.options(c.learning, c.local_optimizer):
        return {}
    if c.learning_options.get("dual_rate") is not None:
        return {}
    by_default = getattr(AVERAGING[c.optimizer], "dual_rate", 1.0)
    return {"dual_rate": float(by_default / (1 + 2 * delay_of(c)))}


def resolved(c: Settings, options: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """The options of an averaging rule in edge form."""
    found = dict(options)
    if "compressor" not in found:
        found["diffusion_rate"] = float(rates.checked(network, found["diffusion_rate"]))
    return found


def _given(c: Settings) -> str:
    """The key that asks for exchanges by edges."""
    if c.scenario is not None:
        return "a scenario"
    return f"on_worker_loss={c.on_worker_loss}" if c.survives else f"gossip={c.gossip}"


def check(c: Settings, options: Mapping[str, Any], network: Network) -> None:
    """Raise ValueError for a method, topology or scenario without exchanges by edges."""
    scenario.read(c.scenario or {}, c.n_workers, c.seed)
    if c.gossip in learning.POLICIES:
        _check_accelerated(c)
    if c.optimizer not in averaging.EXCHANGES:
        raise BadValue(
            "optimizer",
            c.optimizer,
            f"{', '.join(averaging.EXCHANGES)} with {_given(c)}",
        )
    relays = learning.LEARNING[c.learning].relays
    checks.check("learning", c.learning, not relays, f"another rule with {_given(c)}")
    with errors_name_keys(c.optimizer):
        averaging.make(c.optimizer, Layout([(2, 2)]), **resolved(c, options, network))
    Members(network.topology)
    fragments, more = c.learning_options.get("fragments", 1), f"with {_given(c)}"
    checks.check("learning_options.fragments", fragments, fragments == 1, f"1 {more}")
    if learning.LEARNING[c.learning].in_place and not learning.LEARNING[c.learning].stateless:
        checks.check("overlapping", c.overlapping, not c.overlapping, f"false {more}")


def _check_accelerated(c: Settings) -> None:
    """Raise BadValue for a method that gossip=a2cid2 does not accelerate.

    Gives `overlapping` its value: exchanges follow the local update.
    """
    accepted: dict[str, object] = {"optimizer": "dpsgd", "learning": "dpsgd"}
    accepted |= {"local_optimizer": "sgd", "local_steps": 1}
    for key, value in accepted.items():
        given = getattr(c, key)
        checks.check(key, given, given == value, f"{value} with gossip={c.gossip}")
    checks.check("overlapping", c.overlapping, not c.overlapping, f"false with gossip={c.gossip}")
    c.overlapping = False
