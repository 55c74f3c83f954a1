"""A method by its names, with the values of all options of its parts.

Every program and optimizer makes its method here. The names of methods mean nothing elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from torch import Tensor

from powergossip import checks, compressors
from powergossip import registry_options as _options
from powergossip.algorithms import aggregation, ddp_hooks, rates, registry
from powergossip.algorithms import learning as learning_rules
from powergossip.algorithms.aggregation import Aggregation
from powergossip.algorithms.averaging import Averaging
from powergossip.compressors import BySize
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.topologies import Topology

SMALL = Layout([(2, 2)])  # for errors before there is a model

# Accepted values of options of learning rules, wherever a rule has them.
CHECKS = {
    "momentum": checks.below_one,
    "adam_beta1": checks.below_one,
    "adam_beta2": checks.below_one,
    "adam_epsilon": checks.positive,
}


def rows() -> dict[str, _options.Builder]:
    """Name → row: of algorithms.AVERAGING, of aggregation.AGGREGATIONS, and PyTorch's hooks."""
    hooks = dict.fromkeys(ddp_hooks.HOOKS, ddp_hooks.DDPHook)
    return {**registry.AVERAGING, **aggregation.AGGREGATIONS, **hooks}


def import_rows(
    averaging: Any,
    learning: object = None,
    compressor: object = None,
    keys: tuple[str, str, str] = ("optimizer", "learning", "optimizer_compressor"),
) -> None:
    """Add the rows package.module:name of the user to their registries. Other names are skipped.

    Args:
        averaging: Name of an averaging rule, or of a class derived from Aggregation.
        keys: Keys of the three names, for errors.

    Raises:
        ValueError: See `registry_options.import_row`.
    """
    if averaging not in aggregation.AGGREGATIONS:
        rows = registry.AVERAGING
        _options.import_row(rows, keys[0], averaging, ("network", "layout"), "step")
        kind = getattr(rows.get(averaging), "func", rows.get(averaging))  # of functools.partial
        if isinstance(kind, type) and issubclass(kind, Aggregation):
            aggregation.AGGREGATIONS[averaging] = rows.pop(averaging)
    _options.import_row(learning_rules.LEARNING, keys[1], learning, ("workers",))
    fields = ("fields", "compress", "decompress")
    _options.import_row(compressors.COMPRESSORS, keys[2], compressor, (), *fields)


def parameters(name: str, given: Mapping[str, Any] | None = None) -> dict[str, Parameter]:
    """Option → parameter of a method. `given` may name its compressor. Raises ValueError."""
    row = _options.find(rows() | registry.CONSENSUS_ONLY, "algorithm", name)
    return _options.parameters(row, given, compressor=compressors.COMPRESSORS)


def defaults(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Option → default of `parameters`, which may depend on `given` options."""
    found = {option: parameter.default for option, parameter in known.items()}
    return registry.with_copy_rate(found, given)


@dataclass(frozen=True)
class Method:
    """An averaging rule or compressed gradients, a learning rule, and all their options.

    Attributes:
        averaging: Name of the averaging rule, the aggregation of gradients or PyTorch's hook.
        learning: Row of learning.LEARNING.
        local_optimizer: Name of the local optimizer, which decides on the form of the rule.
        options: Option → value of the averaging rule: those given, and defaults for the others. A
            diffusion rate of None depends on topology and tensors.
        learning_options: The same of the learning rule.
    """

    averaging: str
    learning: str
    local_optimizer: str
    options: Mapping[str, Any]
    learning_options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        averaging: str,
        learning: str = learning_rules.DEFAULT,
        *,
        local_optimizer: str = "sgd",
        options: Mapping[str, Any] | None = None,
        learning_options: Mapping[str, Any] | None = None,
    ) -> "Method":
        """The method of these names and options.

        Raises:
            ValueError: For an unknown name or option, and BadValue for a value of another type.
        """
        rule = learning_rules.rule(learning, local_optimizer)
        given = dict(options or {})
        preferred = learning_rules.averaging_defaults(learning, averaging)
        known = parameters(averaging, preferred | given)
        values = defaults(known, preferred | given)
        for option in learning_rules.without(learning):
            known.pop(option, None)
            if option in given:
                raise ValueError(
                    f"{option}={given[option]!r}: learning={learning} has no such option; "
                    "leave it out"
                )
        given = registry.checked_options(averaging, given, known)
        for option, value in given.items():  # rates of single workers are for `averaging_rule`
            checks.check(option, value, not isinstance(value, Tensor), "a number")
        values |= preferred | given
        values = {option: values[option] for option in known}
        known = _options.parameters(rule)
        own = _options.check(f"learning={learning}", learning_options or {}, known)
        for option in CHECKS.keys() & own.keys():
            CHECKS[option](option, own[option])
        own = {option: parameter.default for option, parameter in known.items()} | own
        return cls(averaging, learning, local_optimizer, values, own)

    def with_learning(self, **values: Any) -> "Method":
        """The same method with these values of its learning rule's options. Others are ignored."""
        own = {k: v for k, v in values.items() if k in self.learning_options}
        return replace(self, learning_options={**self.learning_options, **own})

    # --- Kind ---

    @property
    def averages(self) -> bool:
        """True if it averages models, and False for compressed gradients."""
        return self.averaging in {**registry.AVERAGING, **registry.CONSENSUS_ONLY}

    @property
    def gossips(self) -> bool:
        """True if it averages models over the edges of a graph."""
        return self.averages and self.averaging != "all-reduce"

    # --- Parts ---

    def averaging_rule(self, network: Network, layout: Layout, **values: Any) -> Averaging:
        """The averaging rule. Other `values` of its options take precedence.

        Raises:
            ValueError: For a bad value, or a topology that does not fit.
        """
        options = {**self.options, **values}
        if "diffusion_rate" in options:
            rate = options["diffusion_rate"]
            options["diffusion_rate"] = (
                self.diffusion_rate(network.topology, layout) if rate is None else rate
            )
        return registry.build(self.averaging, network, layout, options)

    def example(self, network: Network) -> Averaging:
        """The averaging rule of a small matrix.

        Raises:
            ValueError: For a bad value, or parts or a topology that do not fit together.
        """
        made = self.averaging_rule(network, SMALL)
        learning_rules.check(self.learning, network, self.averaging, made)
        return made

    def aggregation(self, network: Network, layout: Layout) -> Aggregation:
        """The mean of compressed gradients. Raises ValueError for a bad value."""
        return aggregation.build(self.averaging, network, layout, self.options)

    def learning_rule(self, workers: learning_rules.Workers) -> learning_rules.GossipRule:
        """The learning rule. Raises ValueError for a bad value."""
        rule = learning_rules.rule(self.learning, self.local_optimizer)
        return rule(workers, **self.learning_options)

    # --- Diffusion rates ---

    def resolved(self, topology: Topology, layout: Layout) -> dict[str, Any]:
        """The options of the averaging rule, also in its form of single edges, with the rate."""
        if "diffusion_rate" not in self.options:
            return dict(self.options)
        return {**self.options, "diffusion_rate": self.diffusion_rate(topology, layout)}

    def diffusion_rate(self, topology: Topology, layout: Layout) -> float | str | BySize | None:
        """The rate γ as given, or the default for this topology and these tensors.

        Raises:
            ValueError: For a compressor without a default on a directed graph.
        """
        rate: float | str | None = self.options.get("diffusion_rate")
        if rate is not None or "diffusion_rate" not in self.options:
            return rate
        factor = learning_rules.diffusion_factor(self.learning, self.averaging)
        return registry.default_rate(
            self.averaging, topology, layout, self.options, factor, self.largest_rate(topology)
        )

    def largest_rate(self, topology: Topology) -> float:
        """The diffusion rate from which the learning rule is unstable."""
        rule = learning_rules.rule(self.learning, self.local_optimizer)
        return rule.largest_rate(topology, self.learning_options)

    def warn_of_rate(self, network: Network) -> None:
        """Warn of a diffusion rate from which the learning rule is unstable."""
        rate = self.options.get("diffusion_rate")
        if isinstance(rate, float | int):
            rates.warn_of_rule(self.learning, network, rate, self.largest_rate(network.topology))


def rule_options(
    learning: str, local_optimizer: str, *, local_steps: int, **values: Any
) -> dict[str, Any]:
    """The values that are options of a learning rule.

    Raises ValueError for several local steps if the rule has none.
    """
    known = learning_rules.options(learning, local_optimizer)
    if local_steps > 1 and "local_steps" not in known:
        raise ValueError(
            f"local_steps={local_steps}: use learning={learning_rules.with_local_steps()}, or "
            f"local_steps=1 with learning={learning}"
        )
    return {k: v for k, v in {"local_steps": local_steps, **values}.items() if k in known}
