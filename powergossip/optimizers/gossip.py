"""Gossip in your own training loop, one worker per process::

    from powergossip.optimizers import GossipOptimizer

    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = GossipOptimizer(local, "power-gossip", rank=1)

The rest of the loop is unchanged and runs under `mpirun -np N`. Every process computes the gradient
on its own data, and `step` updates its own parameters and then moves them towards its neighbors'
parameters. This is D-PSGD with an averaging algorithm G, x ← G(x − η u(g)), as in Lian et al.
(2017), arXiv:1705.09056. In a single process, it is the wrapped optimizer.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor

from powergossip import checks, network
from powergossip.algorithms import learning as learning_rules
from powergossip.network import Processes
from powergossip.optimizers.checks import (
    DTYPES,
    check_gradients,
    check_own_gradients,
    check_same_everywhere,
    named,
    not_compiled,
)
from powergossip.optimizers.gossip_engine import Averaged
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.optimizers.gradients import Traffic
from powergossip.optimizers.learning_rules import LearningRule
from powergossip.optimizers.sharded_parameters import (
    Sharding,
    check_sharding_options,
    initial_state,
    replicas,
)


def _wrapped_attribute(name: str) -> Any:
    """An attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.wrapped, name),
        lambda self, value: setattr(self.wrapped, name, value),
    )


class GossipOptimizer(Traffic, torch.optim.Optimizer):
    """A torch optimizer with a round of gossip between all processes in its `step`::

        x_i ← x_i − η u(g_i)           the step of the wrapped optimizer, on this worker
        x ← G(x)                       in every `local_steps`-th step (Stich 2019, arXiv:1805.09767)

    With `overlapping`, messages are in flight during the backward pass, as Lian et al. (2017),
    arXiv:1705.09056, Algorithm 1, propose. They are started by the first gradient of a step::

        x_i ← G(x)_i − η u(g_i)        g_i at the parameters before G

    With `learning`, a row of learning.LEARNING such as "gradient-tracking", a learning rule for
    workers with different data takes the place of these equations::

        u_i = −η u(g_i)                the displacement by the step of the wrapped optimizer
        x ← …                          the equations of the rule, with u_i

    Averaging algorithms and topologies that the rule does not support are rejected.

    - gradient-tracking, k-gt, exact-diffusion, diloco, gasloc and noloco work with any torch
      optimizer. K-GT and the last three send messages in every `local_steps`-th step, all other
      rules in each step.
    - quasi-global-momentum, momentum-tracking, gt-nsgd, motef and beer give SGD a direction in
      place of the gradient. Wrap torch.optim.SGD with momentum=0, and give the momentum as
      learning_options={"momentum": 0.9}; beer has none. quasi-global-momentum has nesterov, too, or
      with local_optimizer="adamw" (QG-Adam) adam_beta1, adam_beta2 and adam_epsilon. The weight
      decay of SGD is part of the gradient, but decoupled in QG-Adam. A missing gradient counts
      as 0.
    - All rules but k-gt, exact-diffusion, gasloc and noloco may be `overlapping`.
    - Parameters are in float32 or float64. k-gt and quasi-global-momentum need one learning rate
      for all parameter groups.
    - Displacements have the rounding errors of x, and take the memory of two copies of x.

    The wrapped optimizer, `wrapped`, keeps its state, its parameter groups and its hooks. They are
    also this optimizer's, so that schedulers, GradScaler and code that sets learning rates work.

    Construction moves the parameters into one buffer, where each has its own storage, and gives
    them process 0's values in all processes. Create it after the model is on its device. Values may
    be assigned to p.data later; they are copied to the buffer. Construction, `step`, `mean_model`
    and `merge` are collective: all processes call them in the same order, with the same parameters.
    To add parameters later, construct a new one. Buffers of the model (running statistics) are not
    parameters and stay each worker's own. Construction warns of buffers that differ.

    Parameters must be dense tensors on one device, in float32, bfloat16 or float16, or all in
    float64. Those in float64 are averaged and sent in float64, with 64 bits per element. Those in
    half precision stay where they are. They are averaged and sent in float32, and rounded once,
    after G. Encoded messages (choco, deepsqueeze, moniqua) do not depend on the dtype.

    Frozen parameters (requires_grad=False at construction) may have any dtype. They are given the
    values of process 0 at construction, where they are, and are not averaged.

    With `mesh`, a worker is a replica whose parameters are DTensors, in blocks of rows over its
    processes, as FSDP2's fully_shard makes them. This process sends its part of the replica's
    messages, which concern the whole parameters, or with `per_shard` each block. Parameters stay
    where they are. Lengths and norms are the replica's.

    All processes make the same number of steps: give them equally many batches, as torch's
    DistributedSampler does, and drop a last one that not all of them have. Otherwise the program
    ends with an error, as soon as the process with fewer steps ends or calls another collective
    method.

    With GradScaler, a worker with overflowing gradients skips its local update but still gossips,
    because its neighbors wait for its messages. Its displacement is then 0 for a learning rule.

    Cost on the wire: the messages of the averaging algorithm. Construction broadcasts D elements,
    which are not counted. A single process sends nothing and leaves the parameters where they are,
    but for learning rules with momentum, which it applies.

    Raises:
        ValueError: In all processes, for invalid parameters or options, and for `overlapping` with
            "all-reduce", which is SGD on the mean gradient only after the local update.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True for GradScaler. It then always calls `step`, and for that time sets the attributes
        `grad_scale` (the factor still in the gradients, or None) and `found_inf` (whether they
        overflowed). Lightning would not unscale or clip the gradients of such an optimizer."""
        return isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: str,
        *,
        local_steps: int = 1,
        overlapping: bool = False,
        learning: str = learning_rules.DEFAULT,
        learning_options: Mapping[str, Any] | None = None,
        max_norm: float | None = None,
        process_group: Any = None,
        mesh: Any = None,
        per_shard: bool = False,
        **options: Any,
    ):
        """Wrap `optimizer`.

        Args:
            method: Name of an averaging algorithm, such as "power-gossip".
            local_steps: Number of steps per step of gossip.
            learning, learning_options: The learning rule and its options, see the class.
            max_norm: Largest norm of the gradient, after its correction by the learning rule.
            process_group: The participants, one worker each: a group of torch.distributed, an
                mpi4py communicator, a `Processes`, or None for all processes of the run.
            mesh: The dimension of a DeviceMesh along which replicas differ, such as
                mesh["replica"], for parameters that are sharded along another one.
            per_shard: True if a shard compresses its block of a matrix as a separate matrix.
            **options: Of `GossipMethod.on_graph`: topology="ring", topology_options, seed=0, and
                the options of the algorithm, which `algorithms.defaults("power-gossip")` lists.
        """
        sharding = None
        if mesh is None:
            who = network.processes_of(process_group)
        else:
            who, sharding = _sharding(optimizer, mesh, process_group, per_shard)
        self.wrapped, self._of_all = optimizer, process_group is None
        local_steps = checks.plain(local_steps)
        self._local_steps, self._overlapping, self._steps = local_steps, overlapping, 0

        with who.agreed():
            check_wrappable(optimizer, local_steps)
            check_sharding_options(mesh, per_shard)
            self.method = GossipMethod.on_graph(
                method,
                learning,
                overlapping=overlapping,
                local_steps=local_steps,
                learning_options=learning_options,
                **options,
            )
            if overlapping:
                self.method.check_overlapping("overlapping=True")
            self._learning = LearningRule(optimizer, self.method, max_norm)
        check_same_everywhere(who, {"local_steps": local_steps, "overlapping": overlapping})
        self._averaged = Averaged("GossipOptimizer", who, optimizer, self._learning, sharding)
        self.network = self._averaged.network
        own = weakref.ref(self)
        if overlapping:
            self._start_at_gradients(own)
        network.checked_barrier_at_exit(who, lambda: _steps_at_exit(own()))
        # torch.optim.Optimizer.__init__ is not called. This prepares hooks and profiling.
        self.__setstate__({})

    def _start_at_gradients(self, own: "weakref.ref[GossipOptimizer]") -> None:
        """Start each step of gossip with the first gradient that is computed."""

        @not_compiled
        def on_gradient(_: Tensor) -> None:
            optimizer = own()
            if optimizer is not None:
                optimizer._start()

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(on_gradient)

    @property
    def bits_inside(self) -> int:
        """Bits that this process has sent to the other shards of its replica, beside FSDP2's."""
        return self._averaged.bits_inside

    # Attributes of the wrapped optimizer. Its load_state_dict replaces these objects.
    param_groups = _wrapped_attribute("param_groups")
    state = _wrapped_attribute("state")
    defaults = _wrapped_attribute("defaults")

    def __getattr__(self, name: str) -> Any:
        """Other public attributes of the wrapped optimizer, such as `train` and `eval` of a
        schedule-free one. Raises AttributeError for a second method that makes steps."""
        if name.startswith("_") or name == "wrapped":
            raise AttributeError(name)
        found = getattr(self.wrapped, name)
        if name.endswith("_step") and callable(found):  # of sharpness-aware optimizers
            raise AttributeError(
                f"{name}() of {type(self.wrapped).__name__} makes no step of gossip: call "
                "step(closure), or wrap its base optimizer"
            )
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.wrapped.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return (
            f"GossipOptimizer({self.wrapped!r}, {self.method!r}, local_steps={self._local_steps})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a GossipOptimizer cannot be copied or pickled, because it is tied to its processes "
            "and to the memory of its parameters; save state_dict() and create a new one"
        )

    # Steps.

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the wrapped optimizer, and gossip if it is due.

        Args:
            closure: Function that computes the loss and calls backward, as in torch.

        Returns:
            The result of the wrapped optimizer's step.

        Raises:
            ValueError: For sparse gradients.
            RuntimeError: If a parameter was moved to another device or dtype, shared or replaced,
                and in the first step if DistributedDataParallel averages all processes' gradients.
        """
        if self._averaged.in_mean:
            raise RuntimeError("step() inside mean_model() would be lost; leave it first")
        if self._steps == 0 and self._of_all:
            check_own_gradients(self.param_groups, self.n_workers)
        if self._only_allocates():
            return self.wrapped.step()
        self._averaged.check()
        self._learning.check_rate()
        loss = self._local_step(closure)
        self._averaged.move()
        self._steps += 1
        return loss

    def _only_allocates(self) -> bool:
        """True if torch.distributed.checkpoint makes this step, to get or set a state, with
        learning rates of 0 and all gradients 0. It does not count as a step of gossip."""
        if any(group.get("lr") for group in self.param_groups):
            return False
        return any(frame.f_code.co_name == "_init_optim_state" for frame, _ in walk_stack(None))

    def _start(self) -> None:
        """Send the first messages of this step, if it has begun no earlier."""
        if self._averaged.in_step:
            self._averaged.progress()
        else:
            self._averaged.check_loaded()
            self._averaged.start()

    def _mix_before_update(self) -> None:
        self._start()
        self._averaged.finish()

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
                self._take_gradients()
                self._direct()
                return loss

            self._mix_before_update()
            return self._update(checked)
        gradients = self._dense_gradients()
        if grad_scale is not None and gradients:
            # The reciprocal in double precision, as GradScaler.unscale_ does.
            torch._foreach_mul_(gradients, grad_scale.double().reciprocal().float())
        self._take_gradients()
        self._mix_before_update()
        if found_inf is not None and not self._in_all_shards(not found_inf.item()):
            return None
        self._direct()
        return self._update()

    def _in_all_shards(self, holds: bool) -> bool:
        """True if something holds in all shards of this worker."""
        sharding = self._averaged.sharding
        return holds if sharding is None else sharding.shards.all(holds)

    def _update(self, *closure: Any) -> Any:
        self._averaged.before_update()
        loss = self.wrapped.step(*closure)
        self._averaged.after_update()
        return loss

    def _take_gradients(self) -> None:
        for part in self._averaged.active:
            part.local.take_gradients()

    def _direct(self) -> None:
        """Put the directions of the learning rule in the place of the gradients, for the update."""
        for part in self._averaged.active:
            part.direct()

    def _dense_gradients(self) -> list[Tensor]:
        """The gradients that exist. Raises ValueError for a sparse one."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return check_gradients(parameters, required=False, dtypes=DTYPES)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: parameters are averaged since construction, or not at all."""
        raise RuntimeError(
            "add_param_group() would add parameters that are not averaged: call merge(), then "
            "add_param_group() of the wrapped optimizer, and wrap it in a new GossipOptimizer"
        )

    def _check_between_steps(self, call: str) -> None:
        if self._averaged.in_flight:
            raise RuntimeError(
                f"{call} between a backward pass and its step(), while messages are in "
                "flight; call it after step(), and freeze the parameters by "
                "requires_grad_(False) during backward passes of other losses"
            )

    # The mean model.

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """A context where the parameters are the mean over all workers.

        Each worker's own parameters are restored at the end. Collective. The messages are not
        counted. `step` raises RuntimeError inside.
        """
        self._check_between_steps("mean_model()")
        with self._averaged.mean(self._steps):
            yield

    def merge(self) -> None:
        """Give all workers the mean of their parameters, for the end of training.

        Collective. Counted: an all-reduce of D elements of 32 bits, or 64 in float64, unless all
        have the same. The states of the local optimizer and of the learning rule stay each worker's
        own.
        """
        self._check_between_steps("merge()")
        self._averaged.merge(self._steps)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer and, as "gossip" of its first parameter group, which
        checkpointers keep, the state of the averaging algorithm.

        It is this worker's. Every process saves its own state, and its model's. With mesh=, all
        shards of a replica make this call together. All tensors are DTensors, or equal in all
        shards: torch.distributed.checkpoint saves a replica's tensors in the process group of its
        shards, and loads them into another number of shards.
        """
        self._check_between_steps("state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        kind = {"optimizer": type(self.wrapped).__name__, "steps": self._steps}
        gossip = {**self._averaged.state_dict(), **kind}
        sharded = self._averaged.sharding is not None
        fresh = sharded and self._steps == 0 and not self.wrapped.state
        local = initial_state(self.wrapped) if fresh else self.wrapped.state_dict()
        first, *others = local["param_groups"]
        state = {**local, "param_groups": [{**first, "gossip": gossip}, *others]}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`. The model's state is loaded separately. If
        it belongs to this state and was loaded before construction, its values come back now.

        Raises:
            ValueError: For a state of another method, worker, number of workers or model, or of
                another kind of optimizer. Nothing is changed then.
        """
        self._check_between_steps("load_state_dict()")
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        first, *others = state.get("param_groups") or [{}]
        first = dict(first)
        gossip = first.pop("gossip", None)
        if gossip is None:
            raise ValueError(
                "this is not the state of a GossipOptimizer, or it was flattened: load it into the "
                "wrapped optimizer, before wrapping it, and save without "
                "flatten_optimizer_state_dict"
            )
        gossip, kind = dict(gossip), type(self.wrapped).__name__
        saved = gossip.pop("optimizer", "an unknown optimizer")
        if saved != kind:
            raise ValueError(f"the state is of {saved}; wrap the same optimizer, not {kind}")
        self._averaged.check_state(gossip)
        local = {**state, "param_groups": [first, *others]}
        if self._averaged.sharding is not None and gossip["steps"] == 0:
            local["state"] = {}  # as in initial_state
        self.wrapped.load_state_dict(local)
        self._steps = gossip["steps"]
        self._averaged.load_state_dict(gossip)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _steps_at_exit(optimizer: GossipOptimizer | None) -> int | None:
    """The number of steps. Receives what a round has in flight, since its end never comes."""
    if optimizer is None:
        return None
    optimizer._averaged.receive()
    return optimizer._steps


def _sharding(optimizer: Any, mesh: Any, group: Any, per_shard: bool) -> tuple[Processes, Sharding]:
    """The processes of replicas along a mesh, and the shards of each."""
    check_wrappable(optimizer, 1)
    names, parameters = named(p for g in optimizer.param_groups for p in g["params"])
    who, shards = replicas(mesh, names, parameters, group)
    return who, Sharding(shards, per_shard)


# --- Checks --------------------------------------------------------------------------------------


def check_wrappable(optimizer: Any, local_steps: Any) -> None:
    """Raise ValueError for an optimizer that cannot be followed by gossip."""
    if isinstance(optimizer, GossipOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be wrapped; use an optimizer of torch.optim"
        )
    if not isinstance(local_steps, int) or isinstance(local_steps, bool) or local_steps < 1:
        raise ValueError(f"local_steps={local_steps!r}: use an integer, 1 or more")
