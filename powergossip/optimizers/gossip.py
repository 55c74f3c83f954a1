"""The averaging algorithms in a training loop that someone else wrote, one worker a process.

    from powergossip.optimizers.gossip import GossipOptimizer, PowerGossip

    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = GossipOptimizer(local, PowerGossip(rank=1))

The loop stays as it was and runs under `mpirun -np N`: every process computes the gradient of its
own data, `step` updates its own parameters and then moves them towards those of its neighbors.
D-PSGD with that averaging algorithm, x ← G(x − η u(g)); Lian et al. (2017), arXiv:1705.09056. Run
alone, it is the optimizer that it was given.

Axes: worker (always 1: the one of this process), D numbers of a part (the parameters that came
together: those of the construction, or of one `add_param_group`).
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from powergossip import algorithms, compressors, network, randomness, topologies
from powergossip.errors import BadInput
from powergossip.network import Network, Processes, together
from powergossip.parameters import Layout

_VERSION = 1  # of `state_dict`

# --- What to average with ------------------------------------------------------------------------


@dataclass(frozen=True)
class Method(ABC):
    """Describes an averaging algorithm on a topology; `GossipOptimizer` builds it.

    topology          # a row of topologies.TOPOLOGIES, or the file of a graph
    topology_options  # of that topology
    diffusion_rate    # γ > 0, or "auto": the best for plain gossip on a static undirected topology

    Raises ValueError for a value of the wrong type; what else is wrong with a value says the
    algorithm, when it is built.
    """

    _: KW_ONLY
    topology: str = "ring"
    topology_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    diffusion_rate: float | str = 1.0

    def __post_init__(self) -> None:
        for option in fields(self):
            _refuse_wrong_type(type(self), option.name, getattr(self, option.name), option.type)
        if isinstance(self.diffusion_rate, str) and self.diffusion_rate != "auto":
            raise ValueError(
                f'diffusion_rate="{self.diffusion_rate}": use a number above 0, or "auto"'
            )

    @abstractmethod
    def row(self) -> tuple[str, dict[str, Any]]:
        """The name in algorithms.AVERAGING, and what algorithms.Options it sets besides γ, seed."""

    def network(self, who: Processes, device: torch.device) -> Network:
        """One worker in each process."""
        options = self.topology_options
        topology = topologies.make(self.topology, who.size, seed=self.seed, options=options)
        return Network(topology, who, device)

    def build(self, network: Network, layout: Layout, part: int) -> algorithms.Averaging:
        """The averaging algorithm of the parameters of a part; each part draws its own numbers."""
        name, options = self.row()
        if name not in algorithms.AVERAGING:
            choices = ", ".join(sorted(algorithms.AVERAGING))
            raise ValueError(f'algorithm "{name}" is unknown; choose from {choices}')
        rate = self.diffusion_rate
        if isinstance(rate, str):
            rate = network.topology.best_diffusion_rate
        seed = randomness.torch_seed(self.seed, "part", part) if part else self.seed
        chosen = algorithms.Options(**{"diffusion_rate": rate, "seed": seed, **options})
        return algorithms.make(name, network, layout, chosen)

    def facts(self) -> dict[str, Any]:
        """All that describes it: numbers and words."""
        options = dict(self.topology_options)
        return {"method": type(self).__name__, **asdict(self), "topology_options": options}


def _refuse_wrong_type(owner: type, name: str, value: Any, kind: Any) -> None:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    accepted = {get_origin(k) or k for k in kinds}
    if float in accepted:
        accepted.add(int)
    is_bool = isinstance(value, bool)
    if not isinstance(value, tuple(accepted)) or (is_bool and bool not in accepted):
        wanted = " or ".join(sorted(k.__name__ for k in accepted))
        raise ValueError(f"{owner.__name__}({name}={value!r}): use a value of type {wanted}")


@dataclass(frozen=True)
class Averaging(Method):
    """Any row of algorithms.AVERAGING by its name; `options` are fields of algorithms.Options."""

    name: str
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = set(vars(algorithms.Options())) - {"diffusion_rate", "seed", "given"}
        for name in self.options:
            if name not in known:
                choices = ", ".join(sorted(known))
                raise ValueError(f'options: "{name}" is unknown; choose from {choices}')

    def row(self) -> tuple[str, dict[str, Any]]:
        return self.name, dict(self.options)


@dataclass(frozen=True)
class AllReduce(Method):
    """The mean of all workers: with SGD, SGD on the mean gradient. algorithms.AllReduce

    The topology makes no difference.
    """

    def row(self) -> tuple[str, dict[str, Any]]:
        return "all-reduce", {}


@dataclass(frozen=True)
class Gossip(Method):
    """Plain gossip: D-PSGD. algorithms.PlainGossip"""

    def row(self) -> tuple[str, dict[str, Any]]:
        return "dpsgd", {}


@dataclass(frozen=True)
class PowerGossip(Method):
    """Low-rank pieces of the differences of matrices. algorithms.PowerGossip"""

    _: KW_ONLY
    rank: int = 1
    num_iterations: int = 1  # of power iteration, a step
    warm_start: bool = True
    round_weights: bool = False

    def row(self) -> tuple[str, dict[str, Any]]:
        names = ("rank", "num_iterations", "warm_start", "round_weights")
        return "power-gossip", {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Compressed(Method):
    """compressor: a row of compressors.COMPRESSORS; keep_ratio (top-k, random-k), rank (svd; top-k:
    as large as that rank's message), levels and unbiased (qsgd) are what it can be told."""

    _: KW_ONLY
    compressor: str = "sign-and-norm"
    keep_ratio: float = 0.01
    rank: int | None = None
    levels: int = 4
    unbiased: bool = False

    def _options(self) -> dict[str, Any]:
        names = ("keep_ratio", "rank", "levels", "unbiased")
        chosen = compressors.Options(**{name: getattr(self, name) for name in names})
        return {"compressor": self.compressor, "compressor_options": chosen}


@dataclass(frozen=True)
class Choco(_Compressed):
    """CHOCO-SGD; its γ has to be tuned to the compressor. algorithms.ChocoGossip"""

    def row(self) -> tuple[str, dict[str, Any]]:
        return "choco", self._options()


@dataclass(frozen=True)
class DeepSqueeze(_Compressed):
    """Error-compensated compression; γ has to be tuned. algorithms.DeepSqueeze"""

    def row(self) -> tuple[str, dict[str, Any]]:
        return "deepsqueeze", self._options()


@dataclass(frozen=True)
class Moniqua(Method):
    """Two bits a number; neighbors must differ by less than θ. algorithms.Moniqua"""

    _: KW_ONLY
    theta: float = 0.25

    def row(self) -> tuple[str, dict[str, Any]]:
        return "moniqua", {"theta": self.theta}


# --- The optimizer -------------------------------------------------------------------------------


class _Part:
    """Parameters that came together, and how they are averaged.

    x  # [1, D]  their memory, once `take_over` has been called
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.layout = Layout(p.shape for p in parameters)
        self.averaging: algorithms.Averaging
        self.x: Tensor
        self._addresses: list[int] = []

    def take_over(self, who: Processes) -> None:
        """Lay the parameters into x, with the values of process 0."""
        self.x = torch.empty(1, self.layout.size, device=self.parameters[0].device)
        views = self.layout.tensors(self.x[0])
        for parameter, view in zip(self.parameters, views, strict=True):
            view.copy_(parameter.detach())
        own = self.x.cpu().numpy()
        # A sum with zeros is exact, and large messages need not be pickled.
        values = who.sum(own if who.rank == 0 else np.zeros_like(own))
        self.x.copy_(torch.from_numpy(values))
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in views]

    def refuse_moved(self) -> None:
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has other memory than when "
                    f"GossipOptimizer was made: create the optimizer after moving the model (to, "
                    f"cuda, double, load_state_dict with assign=True), and change values in place"
                )


class GossipOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose `step` ends with a round of gossip between all processes.

        x_i ← x_i − η u(g_i)           the step of the optimizer that is wrapped, on this worker
        x ← G(x)                       in every `local_steps`-th step (Stich 2019, arXiv:1805.09767)

    The optimizer that is wrapped, `wrapped`, keeps its state, its parameter groups and its hooks;
    these are its own, so that schedulers, GradScaler and code that sets learning rates work.

    Construction moves the parameters into one buffer, of which they become views, and gives all
    processes the values of process 0. So make it after the model is on its device. Construction,
    `step`, `add_param_group` and `mean_model` are for all processes together, in the same order;
    all have the same parameters. Parameters must be dense float32 tensors on one device. Buffers of
    the model (running statistics) are not parameters: they stay each worker's own.

    With GradScaler, a worker whose gradients overflow leaves out its local update, and gossips: the
    others wait for its messages.

    On the wire: what the averaging algorithm sends; a broadcast of D numbers at construction, which
    is not counted. One process alone sends nothing, and leaves the parameters where they are.

    Raises ValueError, in all processes, for parameters or options that cannot be.
    """

    # GradScaler then always calls `step`, and for that time sets the attributes `grad_scale` (the
    # factor still in the gradients, or None) and `found_inf` (whether they overflowed).
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        local_steps: int = 1,
        processes: Processes | None = None,
    ):
        """`processes`: those that take part; None: all of mpirun's."""
        self.wrapped, self.method = optimizer, method
        self._who = who = processes or network.processes()
        self._parts: list[_Part] = []
        self._local_steps, self._steps = local_steps, 0
        self._in_mean_model = False

        def check() -> tuple[list[Tensor], Network]:
            _refuse_arguments(optimizer, method, local_steps)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            _refuse_parameters(parameters, [])
            if not any(p.numel() for p in parameters):
                raise ValueError("the optimizer's parameters have no numbers; give it a model's")
            return parameters, method.network(who, parameters[0].device)

        parameters, self._network = who.agree(check)
        for what, fact in (("the method", method.facts()), ("local_steps", local_steps)):
            _refuse_difference(who, what, fact)
        self._add_part(parameters)
        # What torch does for an optimizer that does not come from its __init__: hooks, profiling.
        self.__setstate__({})

    # What belongs to the wrapped optimizer. Its load_state_dict replaces these objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.wrapped.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.wrapped.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does."""
        self.wrapped.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"GossipOptimizer({self.wrapped!r}, {self.method}, local_steps={self._local_steps})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a GossipOptimizer cannot be copied or pickled, being tied to MPI and to the memory of "
            "its parameters; save state_dict() and make a new one"
        )

    # What workers have sent.

    @property
    def n_workers(self) -> int:
        """As many as processes."""
        return self._network.n_workers

    @property
    def bits(self) -> int:
        """Sent by this worker since the start."""
        return int(self._network.bits[0])

    @property
    def messages(self) -> int:
        """Sent by this worker since the start."""
        return int(self._network.messages[0])

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step, then gossip if it is the turn. Returns what that returned.

        `closure` computes the loss and calls backward, as torch says. Raises ValueError for sparse
        gradients, RuntimeError if the memory of a parameter is no longer the optimizer's.
        """
        if self._in_mean_model:
            raise RuntimeError("step() inside of mean_model() would be lost; leave it first")
        for part in self._averaged:
            part.refuse_moved()
        loss = self._local_step(closure)
        self._steps += 1
        if self._averaged and self._steps % self._local_steps == 0:
            self._network.run(together(*(part.averaging.step(part.x) for part in self._averaged)))
        return loss

    @property
    def _averaged(self) -> list[_Part]:
        """The parts that take part in gossip: alone, there is nobody to average with."""
        return self._parts if self.n_workers > 1 else []

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if closure is not None:
            if found_inf is not None:
                raise RuntimeError("GradScaler cannot be used with a closure; call step() without")
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

    def _dense_gradients(self) -> list[Tensor]:
        """Raises ValueError for a sparse one."""
        parameters = (p for group in self.param_groups for p in group["params"])
        gradients = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {index} of shape {tuple(parameter.shape)} has a sparse gradient; "
                    f"GossipOptimizer needs dense ones: use sparse=False in its embedding layer"
                )
            gradients.append(parameter.grad)
        return gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters during training, in all processes at the same step.

        They take the values of process 0, and have their own averaging state, while their messages
        travel together with the others'. Raises ValueError as construction does.
        """
        groups = self.param_groups
        before = len(groups)

        def add() -> list[Tensor]:
            self.wrapped.add_param_group(param_group)
            parameters: list[Tensor] = groups[-1]["params"]
            _refuse_parameters(parameters, [p for g in groups[:-1] for p in g["params"]])
            return parameters

        try:
            self._add_part(self._who.agree(add))
        except ValueError:
            del groups[before:]
            raise

    def _add_part(self, parameters: Sequence[Tensor]) -> None:
        """Raises ValueError, the same in all processes, and leaves everything as it was then."""
        who = self._who
        first = sum(len(group["params"]) for group in self.param_groups) - len(parameters)
        _refuse_other_shapes(who, [tuple(p.shape) for p in parameters], first)
        part = _Part([p for p in parameters if p.numel()])
        if not part.parameters:
            return
        part.averaging = who.agree(
            lambda: self.method.build(self._network, part.layout, len(self._parts))
        )
        if self.n_workers > 1:
            part.take_over(who)
        self._parts.append(part)

    # The mean model.

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """Within, the parameters are the mean over all workers; after, again each worker's own.

        For all processes together. Measuring: not counted. `step` is refused within.
        """
        if self._in_mean_model:
            raise RuntimeError("mean_model() inside of mean_model(): it is the mean already")
        for part in self._averaged:
            part.refuse_moved()
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
        """The wrapped optimizer's state, and under "gossip" what averaging depends on.

        Of this worker: every process saves its own, besides its model's.
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
        """What must be the same in an optimizer that takes up this one's state."""
        return {
            "version": _VERSION,
            **self.method.facts(),
            "n_workers": self.n_workers,
            "worker": self._who.rank,
            "shapes": [[list(shape) for shape in part.layout.shapes] for part in self._parts],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up where the optimizer of that state was; the model's parameters are loaded apart.

        Raises ValueError, and changes nothing, for a state of another method, worker, number of
        workers or model, or of an optimizer that was not a GossipOptimizer.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        gossip = state.get("gossip")
        if gossip is None:
            raise ValueError(
                "this is not the state of a GossipOptimizer; load it into the optimizer that it is "
                "of, before that is wrapped"
            )
        _refuse_other_state(gossip, self._facts())
        self.wrapped.load_state_dict({k: v for k, v in state.items() if k != "gossip"})
        self._steps = gossip["steps"]
        for part, averaging in zip(self._parts, gossip["averaging"], strict=True):
            part.averaging.load_state_dict(averaging)
        self._network.load_state_dict(gossip["network"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


# --- What is refused -----------------------------------------------------------------------------


def _refuse_arguments(optimizer: Any, method: Any, local_steps: Any) -> None:
    if isinstance(optimizer, GossipOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be wrapped; use an optimizer of torch.optim"
        )
    if not isinstance(method, Method):
        raise ValueError(f"method={method!r} is none; use PowerGossip(), Gossip(), Choco(), …")
    if not isinstance(local_steps, int) or isinstance(local_steps, bool) or local_steps < 1:
        raise ValueError(f"local_steps={local_steps!r}: use a whole number, 1 or more")


def _refuse_parameters(parameters: Sequence[Tensor], earlier: Sequence[Tensor]) -> None:
    """Raises ValueError unless all are dense float32 tensors of their own on one device."""
    addresses = {p.data_ptr(): i for i, p in enumerate(earlier) if p.numel()}
    device = next(iter([*earlier, *parameters])).device if [*earlier, *parameters] else None
    for index, parameter in enumerate(parameters, len(earlier)):
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {index} has no shape yet; run a batch through the model first"
            )
        subject = f"parameter {index} of shape {tuple(parameter.shape)}"
        if type(parameter.data) is not Tensor:
            raise ValueError(
                f"{subject} is a {type(parameter.data).__name__}; use plain tensors, whole in "
                f"every process"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"{subject} is sparse ({parameter.layout}); use dense parameters")
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"{subject} is {parameter.dtype}; GossipOptimizer averages torch.float32 only, as "
                f"model.float() makes it"
            )
        if parameter.is_meta:
            raise ValueError(f"{subject} has no memory (device meta); use model.to_empty(...)")
        if parameter.device != device:
            raise ValueError(
                f"{subject} is on {parameter.device}, others on {device}; use one device"
            )
        if parameter.numel() == 0:
            continue
        first = addresses.setdefault(parameter.data_ptr(), index)
        if first != index:
            raise ValueError(
                f"{subject} lies in the same memory as parameter {first}; give each tensor to the "
                f"optimizer once"
            )


def _refuse_difference(who: Processes, what: str, fact: Any) -> None:
    everywhere = who.gather(fact)
    for process, other in enumerate(everywhere):
        if other != everywhere[0]:
            raise BadInput(
                f"{what} differs between processes: {other} in process {process}, "
                f"{everywhere[0]} in process 0; use the same in all"
            )


def _refuse_other_shapes(who: Processes, shapes: list[tuple[int, ...]], first: int) -> None:
    """`first`: the number of the first of these parameters."""
    everywhere = who.gather(shapes)
    for process, other in enumerate(everywhere):
        _compare_shapes(other, everywhere[0], f"in process {process}", "in process 0", first)


def _compare_shapes(
    these: Sequence[Any], those: Sequence[Any], here: str, there: str, first: int = 0
) -> None:
    """Raises BadInput unless they are the same."""
    advice = "use the same model"
    if len(these) != len(those):
        raise BadInput(f"{len(these)} parameters {here}, {len(those)} {there}; {advice}")
    for index, (this, that) in enumerate(zip(these, those, strict=True), first):
        if tuple(this) != tuple(that):
            raise BadInput(
                f"parameter {index} is of shape {tuple(this)} {here}, {tuple(that)} {there}; "
                f"{advice}"
            )


def _refuse_other_state(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if saved.get("version") != now["version"]:
        raise ValueError(
            f"the state is of version {saved.get('version')}, this is version {now['version']}; "
            f"load it with the program that saved it"
        )
    differing = [
        f"{key}={saved.get(key)!r} (here {now.get(key)!r})"
        for key in dict.fromkeys((*now, *(saved.keys() - _STATE_KEYS)))
        if key not in ("version", "shapes", "worker") and saved.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(f"the state is of an optimizer with {', '.join(differing)}; use the same")
    if saved["worker"] != now["worker"]:
        raise ValueError(
            f"the state is of worker {saved['worker']}, this is worker {now['worker']}; save and "
            f"load the state of every process"
        )
    if len(saved["shapes"]) != len(now["shapes"]):
        raise ValueError(
            f"the state is of parameters added in {len(saved['shapes'])} parts, here they are "
            f"{len(now['shapes'])}; call add_param_group as often as before saving"
        )
    for these, those in zip(saved["shapes"], now["shapes"], strict=True):
        _compare_shapes(these, those, "in the state", "here")


_STATE_KEYS = {"steps", "averaging", "network"}  # not facts
