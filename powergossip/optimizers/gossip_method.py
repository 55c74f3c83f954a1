"""A method on a graph, for your own training loop."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from powergossip import algorithms, checks, randomness, topologies
from powergossip import registry_options as options
from powergossip.algorithms import learning as learning_rules
from powergossip.algorithms import trials
from powergossip.algorithms.averaging import Averaging
from powergossip.algorithms.method import Method, import_rows, parameters, rule_options
from powergossip.network import Network, Processes
from powergossip.parameters import Layout


@dataclass(frozen=True, repr=False)
class GossipMethod(Method):
    """A method whose averaging rule is a row of algorithms.AVERAGING, and the graph.

    Attributes:
        topology: A row of topologies.TOPOLOGIES, the file of a graph, a `Topology`, or an
            undirected graph of networkx.
        topology_options: Options of the topology.
        seed: Seed of the topology and the averaging rule.
    """

    topology: Any
    topology_options: Mapping[str, Any]
    seed: int

    @classmethod
    def on_graph(
        cls,
        averaging: str,
        learning: str = learning_rules.DEFAULT,
        *,
        overlapping: bool = True,
        local_steps: int = 1,
        learning_options: Mapping[str, Any] | None = None,
        topology: Any = "ring",
        topology_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **given: Any,
    ) -> "GossipMethod":
        """The method of these names and options.

        A `diffusion_rate` is a number above 0. With "power-gossip" and "dpsgd" it may be "auto",
        the best rate for plain gossip on a static undirected topology.

        Args:
            learning_options: Options of the learning rule. Rules with momentum may have
                `local_optimizer`, too.
            given: Options of the averaging rule. `algorithms.defaults(averaging)` lists them.

        Raises:
            ValueError: For an unknown name or option, and for a value of the wrong type.
        """
        keys = "method", "learning", "compressor"
        import_rows(averaging, learning, given.get("compressor"), keys)
        options.find(algorithms.AVERAGING, "algorithm", averaging)
        topology = topology if topologies.is_graph(topology) else topologies.name_of(topology)
        own: dict[str, Any] = {"learning_options": learning_options, "seed": seed}
        own |= {"topology_options": topology_options}
        own = options.check(averaging, own, options.parameters(cls.on_graph))
        of_topology = {key: checks.plain(v) for key, v in (topology_options or {}).items()}
        of_rule, local = dict(learning_options or {}), "sgd"
        if learning_rules.rule(learning).directs():
            local = of_rule.pop("local_optimizer", local)
        shared = rule_options(learning, local, local_steps=local_steps, overlapping=overlapping)
        for name in shared.keys() & of_rule.keys():
            raise ValueError(f"{name}={of_rule[name]}: use the keyword {name}")
        if "seed" in parameters(averaging, given):
            given["seed"] = own["seed"]
        made = Method.of(
            averaging,
            learning,
            local_optimizer=local,
            options=given,
            learning_options=of_rule | shared,
        )
        return cls(**vars(made), topology=topology, topology_options=of_topology, seed=own["seed"])

    def network(
        self, processes: Processes, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Network:
        """One worker in each process, with x of this dtype.

        Raises ValueError, also if the user's averaging rule or compressor fails in trial steps.
        """
        options, name = self.topology_options, self.averaging
        make = partial(topologies.make, self.topology, seed=self.seed, options=options)
        tried = topology = make(processes.size)
        if trials.are_needed(name, self.options):
            with suppress(ValueError):  # a graph of one worker only
                tried = make(max(2, processes.size))
            if tried.n_workers > 1:
                trials.try_averaging(f"method={name}", tried, self.averaging_rule)
        return Network(topology, processes, device, dtype=dtype)

    def build(self, network: Network, layout: Layout, part: int) -> Averaging:
        """The averaging rule for the parameters of a part, with its own random streams."""
        seed = randomness.torch_seed(self.seed, "part", part) if part else self.seed
        return self.averaging_rule(
            network, layout, **{"seed": seed} if "seed" in self.options else {}
        )

    def facts(self) -> dict[str, Any]:
        """A complete description of numbers and strings, apart from options that may change."""
        is_sgd = learning_rules.is_sgd(self.local_optimizer)
        local = {} if is_sgd else {"local_optimizer": self.local_optimizer}
        stateless = learning_rules.rule(self.learning, self.local_optimizer).stateless
        return {
            "method": self.averaging,
            "topology": topologies.name_of(self.topology),
            "topology_options": dict(self.topology_options),
            "seed": self.seed,
            **self.options,
            "learning": self.learning,
            **local,
            **({} if stateless else self.learning_options),
        }

    def __repr__(self) -> str:
        (_, name), *others = self.facts().items()
        listed = ", ".join(f"{option}={value!r}" for option, value in others)
        return f"Method({name!r}, {listed})"

    def check_overlapping(self, where: str) -> None:
        """Raise ValueError for messages that must follow the local update."""
        if not self.gossips:
            raise ValueError(
                f"{where} with {self.averaging}: use dpsgd or another method of gossip; the mean "
                "of the models is SGD on the mean gradient only after the local update"
            )
        rule = learning_rules.rule(self.learning, self.local_optimizer)
        if not rule.overlaps and "overlapping" not in self.learning_options:
            raise ValueError(
                f"{where}: use overlapping=False with learning={self.learning}, whose messages "
                "depend on the gradient"
            )
