"""Gossip in a training loop of your own, one worker per process.

    from powergossip.optimizers import GossipOptimizer

    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = GossipOptimizer(local, "power-gossip", rank=1)

The rest of the loop is unchanged and runs under `mpirun -np N`. Every process computes the gradient
of its own data, and `step` updates its own parameters and then moves them towards those of its
neighbors. This is D-PSGD with an averaging algorithm G, x ← G(x − η u(g)), as in Lian et al.
(2017), arXiv:1705.09056. In a single process, it is the wrapped optimizer.

Axes: worker (always 1: that of this process), D elements of a part (the parameters of the
construction, or of one `add_param_group`).
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from powergossip import algorithms, compressors, network, randomness, topologies
from powergossip import options as _options
from powergossip.network import Network, Processes, together
from powergossip.optimizers.checks import (
    broadcast_from_process_0,
    check_gradients,
    check_parameters,
    check_same_everywhere,
    check_same_shapes_everywhere,
    check_shapes,
    is_frozen,
    named,
)
from powergossip.parameters import Layout

_VERSION = 2  # of `state_dict`

# --- The averaging algorithm ---------------------------------------------------------------------


class Method:
    """An averaging algorithm by its name in algorithms.AVERAGING, on a topology.

    topology          # a row of topologies.TOPOLOGIES, or the file of a graph
    topology_options  # options of the topology
    seed              # of the topology and the algorithm
    options           # all options of the algorithm: those given, and defaults for the others.
                      # `algorithms.defaults(name)` lists them

    A `diffusion_rate` is a number above 0. With "power-gossip" and "dpsgd" it may be "auto", the
    best rate for plain gossip on a static undirected topology.

    Raises ValueError for an unknown name or option, and for a value of the wrong type. Other
    invalid values are rejected when the algorithm is built.
    """

    def __init__(
        self,
        name: str,
        *,
        topology: str = "ring",
        topology_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ):
        row = _options.find(algorithms.AVERAGING, "algorithm", name)
        self.name, self.topology, self.seed = name, topology, seed
        self.topology_options = {} if topology_options is None else topology_options
        _check_type("topology", topology, str)
        _check_type("topology_options", self.topology_options, Mapping)
        _check_type("seed", seed, int)
        if _options.takes_all(row):  # in an object that checks them
            self._seeded, self.options = True, options
            return
        known = _options.parameters(row, options, compressor=compressors.COMPRESSORS)
        self._seeded = known.pop("seed", None) is not None
        _options.check(name, options, known)
        for option, value in options.items():
            if option != "diffusion_rate" or value != "auto":
                _check_type(option, value, known[option].annotation)
        self.options = {option: p.default for option, p in known.items()} | options

    def network(self, processes: Processes, device: torch.device) -> Network:
        """One worker in each process."""
        options = self.topology_options
        topology = topologies.make(self.topology, processes.size, seed=self.seed, options=options)
        return Network(topology, processes, device)

    def build(self, network: Network, layout: Layout, part: int) -> algorithms.Averaging:
        """The averaging algorithm for the parameters of a part, with random streams of its own."""
        options = dict(self.options)
        if self._seeded:
            seed = randomness.torch_seed(self.seed, "part", part) if part else self.seed
            options["seed"] = seed
        return algorithms.make(self.name, network, layout, **options)

    def facts(self) -> dict[str, Any]:
        """A complete description of numbers and strings."""
        return {
            "method": self.name,
            "topology": self.topology,
            "topology_options": dict(self.topology_options),
            "seed": self.seed,
            **self.options,
        }

    def __repr__(self) -> str:
        (_, name), *others = self.facts().items()
        listed = ", ".join(f"{option}={value!r}" for option, value in others)
        return f"Method({name!r}, {listed})"


def _check_type(option: str, value: Any, annotation: Any) -> None:
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


_TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "None",
}

# Names of methods for GossipOptimizer's second argument, in place of a string and options.
AllReduce = partial(Method, "all-reduce")
Gossip = partial(Method, "dpsgd")
PowerGossip = partial(Method, "power-gossip")
Choco = partial(Method, "choco")
DeepSqueeze = partial(Method, "deepsqueeze")
Moniqua = partial(Method, "moniqua")


def Averaging(name: str, *, options: Mapping[str, Any] | None = None, **others: Any) -> Method:
    """The method of that name. `options` and the others are the keyword arguments of `Method`."""
    return Method(name, **others, **(options or {}))


# --- The optimizer -------------------------------------------------------------------------------


class _Part:
    """Trainable parameters that were added together, and their averaging algorithm.

    x  # [1, D]  their memory after `move`
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.layout = Layout(p.shape for p in parameters)
        self.averaging: algorithms.Averaging
        self.x: Tensor
        self._addresses: list[int] = []

    def move(self, processes: Processes) -> None:
        """Move the parameters into x, with the values of process 0."""
        self.x = torch.empty(1, self.layout.size, device=self.parameters[0].device)
        views = self.layout.tensors(self.x[0])
        for parameter, view in zip(self.parameters, views, strict=True):
            view.copy_(parameter.detach())
        broadcast_from_process_0(processes, [self.x])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in views]

    def check_memory(self) -> None:
        """Raise RuntimeError if a parameter is no longer a view of x."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has other memory than when "
                    "GossipOptimizer was created: create it after moving the model (to, cuda, "
                    "double, load_state_dict with assign=True), and change values in place"
                )


class GossipOptimizer(torch.optim.Optimizer):
    """A torch optimizer with a round of gossip between all processes at the end of its `step`.

        x_i ← x_i − η u(g_i)           the step of the wrapped optimizer, on this worker
        x ← G(x)                       in every `local_steps`-th step (Stich 2019, arXiv:1805.09767)

    `method` is the name of an averaging algorithm, such as "power-gossip". `options` are the
    keyword arguments of `Method`: topology="ring", topology_options, seed=0, and the options of the
    algorithm, which `algorithms.defaults("power-gossip")` lists. A `Method` is also accepted.

    The wrapped optimizer, `wrapped`, keeps its state, its parameter groups and its hooks. They are
    also this optimizer's, so that schedulers, GradScaler and code that sets learning rates work.

    Construction moves the parameters into one buffer, of which they become views, and gives all
    processes the values of process 0. Create it after the model is on its device. Construction,
    `step`, `add_param_group` and `mean_model` are collective: all processes call them in the same
    order, with the same parameters. Parameters must be dense float32 tensors on one device. Buffers
    of the model (running statistics) are not parameters and stay each worker's own.

    Frozen parameters (requires_grad=False at construction) may have any dtype. They are given the
    values of process 0 at construction, where they are, and are not averaged.

    All processes make the same number of steps: give them equally many batches, as torch's
    DistributedSampler does, and drop a last one that not all of them have. Otherwise the program
    ends with a sentence, as soon as the process with fewer steps ends or calls another collective
    method.

    With GradScaler, a worker with overflowing gradients skips its local update but still gossips,
    because its neighbors wait for its messages.

    Cost on the wire: the messages of the averaging algorithm. Construction broadcasts D elements,
    which are not counted. A single process sends nothing and leaves the parameters where they are.

    Raises ValueError, in all processes, for invalid parameters or options.
    """

    # GradScaler then always calls `step`, and for that time sets the attributes `grad_scale` (the
    # factor still in the gradients, or None) and `found_inf` (whether they overflowed).
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: str | Method,
        *,
        local_steps: int = 1,
        processes: Processes | None = None,
        **options: Any,
    ):
        """Wrap `optimizer`. processes: the participants, or None for all processes of the run."""
        self.wrapped = optimizer
        self._processes = processes = processes or network.processes()
        self._parts: list[_Part] = []
        self._frozen: list[Tensor] = []
        self._local_steps, self._steps = local_steps, 0
        self._in_mean_model = False

        with processes.agreed():
            _check_arguments(optimizer, local_steps)
            self.method = _method(method, options)
            trainable = self._checked_parameters()
            if not any(p.numel() for p in trainable):
                raise ValueError(
                    "the optimizer has no trainable parameters with elements; use those of a model"
                )
            self._network = self.method.network(processes, trainable[0].device)
        check_same_everywhere(processes, "the method", self.method.facts())
        check_same_everywhere(processes, "local_steps", local_steps)
        self._add_part([p for group in self.param_groups for p in group["params"]])
        own = weakref.ref(self)
        network.meet_at_exit(processes, lambda: getattr(own(), "_steps", None))
        # torch.optim.Optimizer.__init__ is not called. This prepares hooks and profiling.
        self.__setstate__({})

    # Attributes of the wrapped optimizer. Its load_state_dict replaces these objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.wrapped.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.wrapped.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.wrapped.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return (
            f"GossipOptimizer({self.wrapped!r}, {self.method!r}, local_steps={self._local_steps})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a GossipOptimizer cannot be copied or pickled, because it is tied to MPI and to the "
            "memory of its parameters; save state_dict() and create a new one"
        )

    # Communication.

    @property
    def n_workers(self) -> int:
        """The number of workers, one per process."""
        return self._network.n_workers

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        return int(self._network.bits[0])

    @property
    def messages(self) -> int:
        """Messages that this worker has sent since the start."""
        return int(self._network.messages[0])

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the wrapped optimizer, then gossip if it is due. Returns the former's result.

        `closure` computes the loss and calls backward, as in torch. Raises ValueError for sparse
        gradients, RuntimeError if a parameter was moved to other memory.
        """
        if self._in_mean_model:
            raise RuntimeError("step() inside mean_model() would be lost; leave it first")
        for part in self._averaged:
            part.check_memory()
        self._check_frozen()
        loss = self._local_step(closure)
        self._steps += 1
        if self._averaged and self._steps % self._local_steps == 0:
            self._network.run(together(*(part.averaging.step(part.x) for part in self._averaged)))
        return loss

    @property
    def _averaged(self) -> list[_Part]:
        """The parts that gossip; none in a single process, which has no neighbors."""
        return self._parts if self.n_workers > 1 else []

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if closure is not None:
            if found_inf is not None:
                raise RuntimeError(
                    "GradScaler does not work with a closure; call step() without one"
                )
            compute_loss = closure

            def checked() -> Any:
                loss = compute_loss()
                self._dense_gradients()
                return loss

            return self.wrapped.step(checked)
        gradients = self._dense_gradients()
        if grad_scale is not None and gradients:
            # The reciprocal in double precision, as GradScaler.unscale_ does.
            torch._foreach_mul_(gradients, grad_scale.double().reciprocal().float())
        if found_inf is not None and found_inf.item():
            return None
        return self.wrapped.step()

    def _checked_parameters(self) -> list[Tensor]:
        """The trainable parameters. Raises ValueError for those that cannot be averaged."""
        names, parameters = named(p for group in self.param_groups for p in group["params"])
        trainable = [i for i, p in enumerate(parameters) if not is_frozen(p)]
        check_parameters([names[i] for i in trainable], [parameters[i] for i in trainable])
        return [parameters[i] for i in trainable]

    def _check_frozen(self) -> None:
        """Raise RuntimeError if a frozen parameter has become trainable."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when "
                    "GossipOptimizer was created, so it is not averaged; create a new one, or "
                    "leave the parameter out and add it by add_param_group"
                )

    def _dense_gradients(self) -> list[Tensor]:
        """The gradients that exist. Raises ValueError for a sparse one."""
        names, parameters = named(p for group in self.param_groups for p in group["params"])
        return check_gradients(names, parameters, required=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters during training, in all processes at the same step.

        They are given the values of process 0. Their averaging state is separate, but their
        messages are sent concurrently with the others. Raises ValueError as construction does.
        """
        network.meet(self._processes, "add_param_group()", self._steps)
        groups = self.param_groups
        before = len(groups)
        try:
            with self._processes.agreed():
                self.wrapped.add_param_group(param_group)
                self._checked_parameters()
            self._add_part(groups[-1]["params"])
        except ValueError:
            del groups[before:]
            raise

    def _add_part(self, parameters: Sequence[Tensor]) -> None:
        """Add the last of the optimizer's parameters as a part.

        Raises ValueError, the same in all processes, and then leaves everything unchanged.
        """
        first = sum(len(group["params"]) for group in self.param_groups) - len(parameters)
        check_same_shapes_everywhere(self._processes, parameters, first)
        frozen = [i for i, p in enumerate(parameters, first) if is_frozen(p)]
        check_same_everywhere(self._processes, "the list of frozen parameters", frozen)
        self._share_frozen([p for p in parameters if is_frozen(p)])
        part = _Part([p for p in parameters if p.numel() and not is_frozen(p)])
        if not part.parameters:
            return
        with self._processes.agreed():
            part.averaging = self.method.build(self._network, part.layout, len(self._parts))
        if self.n_workers > 1:
            part.move(self._processes)
        self._parts.append(part)

    def _share_frozen(self, frozen: Sequence[Tensor]) -> None:
        """Overwrite frozen parameters, of any dtype, with the values of process 0."""
        for parameter in frozen:  # one by one, since together they may be large
            broadcast_from_process_0(self._processes, [parameter])
        self._frozen.extend(frozen)

    # The mean model.

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """A context in which the parameters are the mean over all workers.

        Each worker's own parameters are restored at the end. Collective. The messages are not
        counted. `step` raises RuntimeError inside.
        """
        if self._in_mean_model:
            raise RuntimeError(
                "mean_model() inside mean_model(): the parameters are the mean already"
            )
        network.meet(self._processes, "mean_model()", self._steps)
        for part in self._averaged:
            part.check_memory()
        own = [part.x.clone() for part in self._averaged]
        for part in self._averaged:
            part.x[0].copy_(self._network.mean(part.x))
        self._in_mean_model = True
        try:
            yield
        finally:
            self._in_mean_model = False
            for part, x in zip(self._averaged, own, strict=True):
                part.x.copy_(x)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer and, as "gossip", that of the averaging algorithm.

        It is this worker's. Every process saves its own, and that of its model.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.wrapped.state_dict(), "gossip": self._gossip_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def _gossip_state(self) -> dict[str, Any]:
        return {
            **self._facts(),
            "steps": self._steps,
            "averaging": [part.averaging.state_dict() for part in self._parts],
            "network": self._network.state_dict(),
        }

    def _facts(self) -> dict[str, Any]:
        """Values that must be equal in an optimizer that loads this one's state."""
        return {
            "version": _VERSION,
            **self.method.facts(),
            "n_workers": self.n_workers,
            "worker": self._processes.rank,
            "shapes": [[list(shape) for shape in part.layout.shapes] for part in self._parts],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. The model's state is loaded separately.

        Raises ValueError, and changes nothing, for a state of another method, worker, number of
        workers or model, or of another kind of optimizer.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        gossip = state.get("gossip")
        if gossip is None:
            raise ValueError(
                "this is not the state of a GossipOptimizer; load it into the wrapped optimizer, "
                "before wrapping it"
            )
        _check_state(_current(gossip), self._facts())
        self.wrapped.load_state_dict({k: v for k, v in state.items() if k != "gossip"})
        self._steps = gossip["steps"]
        for part, averaging in zip(self._parts, gossip["averaging"], strict=True):
            part.averaging.load_state_dict(averaging)
        self._network.load_state_dict(gossip["network"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


# --- Checks --------------------------------------------------------------------------------------


def _check_arguments(optimizer: Any, local_steps: Any) -> None:
    if isinstance(optimizer, GossipOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be wrapped; use an optimizer of torch.optim"
        )
    if not isinstance(local_steps, int) or isinstance(local_steps, bool) or local_steps < 1:
        raise ValueError(f"local_steps={local_steps!r}: use an integer, 1 or more")


def _method(method: Any, options: Mapping[str, Any]) -> Method:
    if isinstance(method, str):
        return Method(method, **options)
    if not isinstance(method, Method):
        raise ValueError(f"method={method!r}: use one of {', '.join(sorted(algorithms.AVERAGING))}")
    for option, value in options.items():
        raise ValueError(f"{option}={value!r}: use it with a name, or within the method")
    return method


def _check_state(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError unless the facts of a saved state are those of this optimizer."""
    if saved.get("version") != now["version"]:
        raise ValueError(
            f"the state has version {saved.get('version')}, this is version {now['version']}; "
            "load it with the program that saved it"
        )
    differing = [
        f"{key}={saved.get(key)!r} (here {now.get(key)!r})"
        for key in dict.fromkeys((*now, *(saved.keys() - _STATE_KEYS)))
        if key not in ("version", "shapes", "worker") and saved.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(f"the state has {', '.join(differing)}; use the same")
    if saved["worker"] != now["worker"]:
        raise ValueError(
            f"the state is that of worker {saved['worker']}, this is worker {now['worker']}; save "
            "and load the state of every process"
        )
    if len(saved["shapes"]) != len(now["shapes"]):
        raise ValueError(
            f"the state has parameters added in {len(saved['shapes'])} parts, here are "
            f"{len(now['shapes'])}; repeat the calls of add_param_group before loading"
        )
    for shapes, expected in zip(saved["shapes"], now["shapes"], strict=True):
        check_shapes(shapes, expected, "in the state", "here")


_STATE_KEYS = {"steps", "averaging", "network"}  # not facts


def _current(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state with the facts of version 1 under their names in version 2.

    Version 1 has the name of a class as method, options of other compressors besides those of the
    chosen one, and None for some defaults.
    """
    name = _NAMES_OF_VERSION_1.get(saved.get("method", ""))
    if saved.get("version") != 1 or name is None:
        return saved
    known = algorithms.defaults(name, saved)
    known.pop("seed", None)
    options = {
        option: default if saved.get(option) is None else saved[option]
        for option, default in known.items()
    }
    kept = _STATE_KEYS | {"topology", "topology_options", "seed", "n_workers", "worker", "shapes"}
    facts = {key: value for key, value in saved.items() if key in kept}
    return {**facts, **options, "version": _VERSION, "method": name}


_NAMES_OF_VERSION_1 = {
    "AllReduce": "all-reduce",
    "Gossip": "dpsgd",
    "PowerGossip": "power-gossip",
    "Choco": "choco",
    "DeepSqueeze": "deepsqueeze",
    "Moniqua": "moniqua",
}
