"""Learning rules by name: `LEARNING`, and the averaging rules and topologies that they accept."""

from typing import Any

from powergossip import checks
from powergossip import registry_options as _options
from powergossip.algorithms.averaging import Averaging, Kind, kind_of
from powergossip.algorithms.compressed_gossip import ChocoGossip
from powergossip.algorithms.learning.accelerated import A2CiD2
from powergossip.algorithms.learning.dpsgd import DPSGD
from powergossip.algorithms.learning.exact_diffusion import ExactDiffusion
from powergossip.algorithms.learning.gossip_rule import (
    ANY,
    COPIES,
    WITHOUT_COPIES,
    GossipRule,
    Workers,
)
from powergossip.algorithms.learning.k_gt import KGT
from powergossip.algorithms.learning.outer import DiLoCo, GASLoC, NoLoCo
from powergossip.algorithms.learning.quasi_global import QuasiGlobalMomentum
from powergossip.algorithms.learning.relay import RelaySGD
from powergossip.algorithms.learning.tracking import (
    BEER,
    GradientTracking,
    MomentumTracking,
    MoTEF,
    NormalizedGradientTracking,
)
from powergossip.algorithms.plain import ExactMean, PlainGossip
from powergossip.algorithms.rates import is_directed, warn_once
from powergossip.compressors import Identity
from powergossip.network import Network

# Registry names: `learning` in train.py.
LEARNING: dict[str, type[GossipRule]] = {
    "dpsgd": DPSGD,
    "quasi-global-momentum": QuasiGlobalMomentum,
    "gradient-tracking": GradientTracking,
    "k-gt": KGT,
    "momentum-tracking": MomentumTracking,
    "gt-nsgd": NormalizedGradientTracking,
    "exact-diffusion": ExactDiffusion,
    "beer": BEER,
    "motef": MoTEF,
    "relay-sgd": RelaySGD,
    "diloco": DiLoCo,
    "gasloc": GASLoC,
    "noloco": NoLoCo,
}
DEFAULT = "dpsgd"
# Names of `gossip` in train.py with their own learning rule, in place of D-PSGD.
POLICIES: dict[str, type[A2CiD2]] = {"a2cid2": A2CiD2}
# Options of averaging rules whose default depends on the learning rule, for rules that have them.
# Exact diffusion over public copies learns slowly with coarse quantization, and may diverge.
AVERAGING_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("exact-diffusion", "choco"): {"levels": 64},
}
# Factors on the default diffusion rates that compressor and graph give. Quasi-global momentum
# repeats displacements by gossip, too, 1/(1 − β) times in all: 10 for β = 0.9. Copies and errors
# that are sent late do not allow for that.
DIFFUSION_FACTORS: dict[tuple[str, str], float] = {
    ("quasi-global-momentum", "choco"): 0.1,
    ("quasi-global-momentum", "deepsqueeze"): 0.1,
}


def rule(name: str, local_optimizer: str = "sgd") -> type[GossipRule]:
    """The class of a learning rule.

    Raises:
        ValueError: For an unknown name, or one that does not work with this local optimizer.
    """
    checks.one_of("learning", name, LEARNING)
    if not isinstance(row := LEARNING[name], type) or not issubclass(row, GossipRule):
        raise ValueError(f"learning={name} is the row {row!r}; use a class derived from GossipRule")
    family = (row, *row.variants)
    accepted = [optimizer for each in family for optimizer in each.optimizers]
    ok = local_optimizer in accepted
    use = f"{' or '.join(accepted)} with learning={name}"
    checks.check("local_optimizer", local_optimizer, ok, use)
    return next(found for found in family if local_optimizer in found.optimizers)


def is_sgd(local_optimizer: str) -> bool:
    """True for SGD, whose momentum a learning rule replaces. Its weight decay is part of the
    gradient."""
    return local_optimizer == "sgd"


def check(name: str, network: Network, averaging_name: str, averaging: Averaging) -> None:
    """Raise ValueError for an averaging rule or a topology that a learning rule cannot have."""
    found, kind = LEARNING[name], kind_of(averaging)
    if found.relays:
        _check_relays(name, network, averaging_name, averaging)
        return
    if kind not in found.kinds:
        own = kind is Kind.OTHER and not _options.are_of_library(found)
        more = f", or add Kind.OTHER to {found.__name__}.kinds" if own else ""
        reason = _WITHOUT_BIAS if isinstance(averaging, ExactMean) else _REASONS[kind]
        raise ValueError(
            f"learning={name} with optimizer={averaging_name}: {reason}; use it with "
            f"{_examples(found)}{more}"
        )
    if network.topology.row_stochastic and not found.kinds >= ANY:
        raise ValueError(
            f"topology={network.topology.name}: use a topology that conserves the mean with "
            f"learning={name}, such as ring or one-peer-exponential; its sums over the workers "
            "drift otherwise"
        )
    if found.undamped and isinstance(averaging, ChocoGossip) and is_directed(network.topology):
        warn_once(
            network,
            f"topology={network.topology.name}: use an undirected one, optimizer=dpsgd or learning="
            f"gt-nsgd; on a directed graph, learning={name} over compressed messages may diverge "
            "unless the learning rate is small beside the diffusion rate",
        )
    if found.static and len(network.rounds) > 1:
        raise ValueError(
            f"topology={network.topology.name}: use a static topology with learning={name}, such "
            "as ring"
        )
    needs_symmetry = found.kinds & WITHOUT_COPIES == {Kind.ANTISYMMETRIC}
    if kind in COPIES and needs_symmetry and not network.symmetric:
        raise ValueError(
            f"topology={network.topology.name}: use an undirected topology with learning={name}; "
            f"{_REASONS[Kind.LINEAR]}"
        )


def _check_relays(name: str, network: Network, averaging_name: str, averaging: Averaging) -> None:
    compressed = isinstance(averaging, ChocoGossip)
    if not isinstance(averaging, ChocoGossip | PlainGossip):
        raise ValueError(
            f"learning={name} with optimizer={averaging_name}: use optimizer=dpsgd, or choco for "
            "compressed messages; it relays models in place of averaging"
        )
    unbiased = kind_of(averaging) is Kind.UNBIASED_COPIES
    exact = isinstance(averaging, ChocoGossip) and isinstance(averaging.codec.compressor, Identity)
    if unbiased and not exact:
        raise ValueError(
            f"learning={name} with optimizer={averaging_name} and unbiased=true: use false; its "
            "copies need a contraction"
        )
    trees = network.topology.trees
    if trees is None or (compressed and len(trees) > 1):
        more = "" if compressed else "double-binary-tree, "
        raise ValueError(
            f"topology={network.topology.name}: use a tree with learning={name}: chain, star, "
            f"binary-tree, {more}or a file"
        )


_REASONS = {
    Kind.ANTISYMMETRIC: "it needs public copies of the variables",
    Kind.LINEAR: "it needs a symmetric mixing matrix",
    Kind.UNBIASED_COPIES: "public copies do not follow its corrections",
    Kind.BIASED_COPIES: "the errors of a biased compressor do not vanish in it",
    Kind.WEIGHTED: "its updates have no weights, as those of learning=dpsgd have",
    Kind.OTHER: "errors of the messages would stay in its variables",
}
_WITHOUT_BIAS = "the mean of all models has no bias that the rule would correct"


def _examples(found: type[GossipRule]) -> str:
    names = []
    if Kind.ANTISYMMETRIC in found.kinds:
        names += ["dpsgd", "power-gossip (on undirected topologies)"]
    if Kind.BIASED_COPIES in found.kinds:
        names.append("choco")
    elif Kind.UNBIASED_COPIES in found.kinds:
        names.append("choco with compressor=qsgd and unbiased=true")
    return ", ".join(names)


def overlapping(name: str, averaging: Averaging) -> bool:
    """The default of `overlapping`: whether messages are in flight during the gradient."""
    found = LEARNING[name]
    follows = isinstance(averaging, ExactMean) and not found.stateless
    return not follows and kind_of(averaging) in found.overlaps


def check_overlapping(
    name: str, overlapping: bool, averaging_name: str = "", averaging: Averaging | None = None
) -> None:
    """Raise ValueError for a learning rule that cannot have this value."""
    found = LEARNING[name]
    chosen = "overlapping" in options(name)
    if not overlapping:
        if found.overlaps and not chosen:
            raise ValueError(
                f"overlapping=false: use true with learning={name}, whose messages are those "
                "before the gradient"
            )
        return
    if not found.overlaps and not chosen:
        raise ValueError(
            f"overlapping=true: use false with learning={name}, whose messages depend on the "
            "gradient"
        )
    if isinstance(averaging, ExactMean) and not found.stateless:
        raise ValueError(
            f"overlapping=true: use false with learning={name} and optimizer={averaging_name}, "
            "whose mean follows the local update"
        )


def accepting(
    network: Network, averaging_name: str, averaging: Averaging, local_optimizer: str = "sgd"
) -> list[str]:
    """The names of rules for different data that work with an averaging rule on this network."""

    def works(name: str) -> bool:
        try:
            rule(name, local_optimizer)
            check(name, network, averaging_name, averaging)
        except ValueError:
            return False
        return True

    return [name for name, row in LEARNING.items() if not row.stateless and works(name)]


def options(name: str, local_optimizer: str = "sgd") -> dict[str, Any]:
    """option → default of a learning rule."""
    return _options.defaults(rule(name, local_optimizer))


def averaging_defaults(name: str, averaging_name: str) -> dict[str, Any]:
    """Defaults of an averaging rule that differ with a learning rule.

    A diffusion rate of None depends on topology and tensors, see algorithms.default_rate.
    """
    rate = {"diffusion_rate": None} if LEARNING[name].limits_rate() else {}
    return rate | AVERAGING_DEFAULTS.get((name, averaging_name), {})


def diffusion_factor(name: str, averaging_name: str) -> float:
    """The default diffusion rate of an averaging rule, in units of that without a learning rule."""
    return DIFFUSION_FACTORS.get((name, averaging_name), 1.0)


def with_local_steps() -> str:
    """The rules with rounds of local steps, in an error message."""
    *others, last = [name for name in LEARNING if "local_steps" in options(name)]
    return f"{', '.join(others)} or {last}"


def without(name: str) -> tuple[str, ...]:
    """Options of averaging rules that have no effect with a learning rule."""
    return ("diffusion_rate", "copy_rate") if LEARNING[name].relays else ()


def make(name: str, workers: Workers, local_optimizer: str = "sgd", **given: Any) -> GossipRule:
    """Build a learning rule of `LEARNING` with the options in `given` that it has."""
    known = options(name, local_optimizer)
    own = {option: value for option, value in given.items() if option in known}
    return rule(name, local_optimizer)(workers, **own)
