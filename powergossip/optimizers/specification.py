"""An averaging algorithm by its name, on a topology, for a training loop of your own."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from powergossip import algorithms, checks, compressors, randomness, topologies
from powergossip import options as _options
from powergossip.network import Network, Processes
from powergossip.parameters import Layout
from powergossip.topologies import Topology


class Specification:
    """An averaging algorithm by its name in algorithms.AVERAGING, on a topology.

    A `diffusion_rate` is a number above 0. With "power-gossip" and "dpsgd" it may be "auto", the
    best rate for plain gossip on a static undirected topology.

    Other invalid values are rejected when the algorithm is built.

    Args:
        topology: A row of topologies.TOPOLOGIES, the file of a graph, a `Topology`, or an
            undirected graph of networkx.
        topology_options: Options of the topology.
        seed: Seed of the topology and the algorithm.
        options: All options of the algorithm: those given, and defaults for the others.
            `algorithms.defaults(name)` lists them.

    Attributes:
        given: The options that were given.

    Raises:
        ValueError: For an unknown name or option, and for a value of the wrong type.
    """

    def __init__(
        self,
        name: str,
        *,
        topology: Any = "ring",
        topology_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ):
        row = _options.find(algorithms.AVERAGING, "algorithm", name)
        self.name, self.seed = name, checks.plain(seed)
        self.topology = topology if topologies.is_graph(topology) else topologies.name_of(topology)
        of_topology = {} if topology_options is None else topology_options
        check_type("topology_options", of_topology, Mapping)
        self.topology_options = {key: checks.plain(value) for key, value in of_topology.items()}
        check_type("seed", self.seed, int)
        options = {option: checks.plain(value) for option, value in options.items()}
        self.given = options
        self._factor = 1.0
        self._largest_rate: Callable[[Topology], float] = lambda topology: math.inf
        if _options.takes_all(row):  # in an object that checks them
            self._seeded, self.options = True, options
            return
        known = _options.parameters(row, options, compressor=compressors.COMPRESSORS)
        self._seeded = known.pop("seed", None) is not None
        _options.check(name, options, known)
        for option, value in options.items():
            if option != "diffusion_rate" or value != "auto":
                check_type(option, value, known[option].annotation)
        defaults = algorithms.defaults(name, options)
        self.options = {option: defaults[option] for option in known} | options

    def preferring(
        self,
        defaults: Mapping[str, Any],
        factor: float = 1.0,
        largest_rate: Callable[[Topology], float] = lambda topology: math.inf,
    ) -> "Specification":
        """The same method with other defaults of options that it has and that were not given.

        Args:
            factor: Factor on the default diffusion rate.
            largest_rate: The diffusion rate from which a learning rule is unstable.
        """
        others = defaults.keys() & self.options.keys() - self.given.keys()
        defaults = {option: defaults[option] for option in others}
        values = {option: value for option, value in defaults.items() if value is not None}
        found = Specification(
            self.name,
            topology=self.topology,
            topology_options=self.topology_options,
            seed=self.seed,
            **values,
            **self.given,
        )
        found.options |= defaults
        found._factor, found._largest_rate = factor, largest_rate
        return found

    def network(
        self, processes: Processes, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Network:
        """One worker in each process, with x of this dtype."""
        options = self.topology_options
        topology = topologies.make(self.topology, processes.size, seed=self.seed, options=options)
        return Network(topology, processes, device, dtype=dtype)

    def build(self, network: Network, layout: Layout, part: int) -> algorithms.Averaging:
        """The averaging algorithm for the parameters of a part, with random streams of its own."""
        options = dict(self.options)
        if "diffusion_rate" in options and options["diffusion_rate"] is None:
            topology = network.topology
            options["diffusion_rate"] = algorithms.default_rate(
                self.name, topology, layout, options, self._factor, self._largest_rate(topology)
            )
        if self._seeded:
            seed = randomness.torch_seed(self.seed, "part", part) if part else self.seed
            options["seed"] = seed
        return algorithms.make(self.name, network, layout, **options)

    def warn_of_rate(self, network: Network, layout: Layout) -> None:
        """Warn of a diffusion rate with which the method may diverge."""
        algorithms.warn_of_rate(self.name, network, layout, self.given, self._factor)

    def facts(self) -> dict[str, Any]:
        """A complete description of numbers and strings."""
        return {
            "method": self.name,
            "topology": topologies.name_of(self.topology),
            "topology_options": dict(self.topology_options),
            "seed": self.seed,
            **self.options,
        }

    def __repr__(self) -> str:
        (_, name), *others = self.facts().items()
        listed = ", ".join(f"{option}={value!r}" for option, value in others)
        return f"Method({name!r}, {listed})"


def check_type(option: str, value: Any, annotation: Any) -> None:
    """Raise ValueError for a value that is not of the annotated type.

    Tensors are not accepted. Annotations that are not types or unions of types accept every value.
    """
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    accepted = {get_origin(kind) or kind for kind in kinds} - {Tensor}
    if not all(isinstance(kind, type) for kind in accepted) or accepted & {Any, Parameter.empty}:
        return
    if float in accepted:
        accepted.add(int)
    is_bool = isinstance(value, bool)
    if not isinstance(value, tuple(accepted)) or (is_bool and bool not in accepted):
        if float in accepted:
            accepted.remove(int)
        wanted = sorted(_TYPES.get(kind, f"a {kind.__name__}") for kind in accepted)
        alternative = ', or "auto"' if option == "diffusion_rate" else ""
        raise ValueError(f"{option}={value!r}: use {' or '.join(wanted)}{alternative}")
    if value != value:  # NaN
        raise ValueError(f"{option}={value!r}: use a number")


_TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "None",
}

# Names of methods for GossipOptimizer's second argument, in place of a string and options.
AllReduce = partial(Specification, "all-reduce")
Gossip = partial(Specification, "dpsgd")
PowerGossip = partial(Specification, "power-gossip")
Choco = partial(Specification, "choco")
DeepSqueeze = partial(Specification, "deepsqueeze")
Moniqua = partial(Specification, "moniqua")


def Averaging(
    name: str, *, options: Mapping[str, Any] | None = None, **others: Any
) -> Specification:
    """The method of that name. `options` and the others are the keyword arguments of `Method`."""
    return Specification(name, **others, **(options or {}))


def as_method(method: Any, options: Mapping[str, Any]) -> Specification:
    """The method of a name and options, or the given one. Raises ValueError."""
    if isinstance(method, str):
        return Specification(method, **options)
    if not isinstance(method, Specification):
        raise ValueError(f"method={method!r}: use one of {', '.join(sorted(algorithms.AVERAGING))}")
    for option, value in options.items():
        raise ValueError(f"{option}={value!r}: use it with a name, or within the method")
    return method


def check_overlapping(method: Specification, where: str) -> None:
    """Raise ValueError for a method that must follow the local update."""
    if method.name == "all-reduce":
        raise ValueError(
            f"{where} with all-reduce: use dpsgd or another method of gossip; the mean of the "
            "models is SGD on the mean gradient only after the local update"
        )
