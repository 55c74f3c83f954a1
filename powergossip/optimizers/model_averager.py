"""Gossip in the place of PyTorch's model averagers::

    from torch.distributed.optim import PostLocalSGDOptimizer
    from powergossip.optimizers import GossipModelAverager

    averager = GossipModelAverager("power-gossip", rank=1, period=4)
    optimizer = PostLocalSGDOptimizer(local_optimizer, averager)

`PostLocalSGDOptimizer.step` is the step of the local optimizer, then::

    x ← G(x)      in steps warmup_steps, warmup_steps + period, …, counted from 0

with an averaging algorithm G in place of the mean of torch's `PeriodicModelAverager`.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from powergossip import checks, network
from powergossip.algorithms.averaging import Weighted
from powergossip.optimizers.checks import (
    Params,
    check_same_everywhere,
    is_frozen,
    named,
    not_compiled,
)
from powergossip.optimizers.gossip_engine import DTYPES, Averaged
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.optimizers.learning_rules import LearningRule
from powergossip.optimizers.precision import message_dtype_of
from powergossip.optimizers.sharded_parameters import (
    Sharding,
    check_sharding_options,
    processes_along,
    replicas,
)
from powergossip.parameters import check_parameters


class GossipModelAverager(ModelAverager):
    """An averager of models by gossip with the neighbors, for torch's PostLocalSGDOptimizer::

        x ← G(x)       in steps warmup_steps, warmup_steps + period, …, counted from 0

    This is post-local SGD with an averaging algorithm G in place of the mean over all workers.

    All processes call `average_parameters` equally often, with the same parameters, which they
    compare if they differ from the last step's. Its first step of gossip decides on the parameters:
    all that require a gradient, where torch's averager takes those that have one. Parameters that
    are added to the optimizer later are averaged from then on, with their own state. Parameters
    stay in their memory.

    Workers start from their own values, as with torch's averager: give them equal ones, by the same
    seed or by DDP. GradScaler skips steps in single processes, and so does not fit; GossipOptimizer
    does.

    Cost on the wire: the messages of the averaging algorithm, once per period.

    Args:
        method: Name of an averaging algorithm, as for `GossipOptimizer`.
        period: Number of steps per averaging.
        warmup_steps: Number of first steps without averaging.
        process_group: The participants, one worker each: a group of torch.distributed, an mpi4py
            communicator, a `Processes`, or None for all processes of the run. No default group of
            torch.distributed is needed.
        message_dtype, mesh, per_shard, options: As for `GossipOptimizer`.

    Attributes:
        step: Number of calls of `average_parameters`, as in torch.

    Raises:
        ValueError: In all processes, for invalid options.

    References:
        Lin et al. (2020), arXiv:1808.07217, post-local SGD.
    """

    def __init__(
        self,
        method: str,
        *,
        period: int = 1,
        warmup_steps: int = 0,
        process_group: Any = None,
        message_dtype: str = "float32",
        mesh: Any = None,
        per_shard: bool = False,
        **options: Any,
    ):
        # ModelAverager.__init__ is not called: it requires a default group of torch.distributed.
        self.process_group = process_group
        self.step = 0
        if mesh is None:
            self._processes = processes = network.processes_of(process_group)
        else:
            self._processes = processes = processes_along(mesh, process_group)
        self._mesh, self._per_shard = mesh, per_shard
        period, warmup_steps = checks.plain(period), checks.plain(warmup_steps)
        with processes.agreed():
            for name, value, least in (("period", period, 1), ("warmup_steps", warmup_steps, 0)):
                ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
                checks.check(name, value, ok, f"an integer, {least} or more")
            self.method = GossipMethod.on_graph(method, **options)
            check_sharding_options(mesh, per_shard, message_dtype)
            message_dtype_of(message_dtype, torch.float32)
            small_network = self.method.network(processes, torch.device("cpu"))
            if isinstance(self.method.example(small_network), Weighted):  # before training
                raise ValueError(
                    f"method={method}: use it with GossipOptimizer or gossip_hook, which rescale "
                    "local updates; an averager does not see them"
                )
        of_all = {"the method": self.method.facts(), "the periods": (period, warmup_steps)}
        check_same_everywhere(processes, of_all | {"the graph": small_network.topology.fingerprint})
        self.period, self.warmup_steps = period, warmup_steps
        self._message_dtype = message_dtype
        self._averaged: Averaged | None = None  # since the first step of gossip
        self._added: list[list[Tensor]] = []  # trainable parameters that were added together
        self._given: list[tuple[int, bool]] = []  # parameters of the last step, and if trainable
        self._restored: Mapping[str, Any] | None = None  # a state loaded before that
        self._is_loaded = False  # whether a state was loaded after the last step
        own = weakref.ref(self)
        network.checked_barrier_at_exit(processes, lambda: getattr(own(), "step", None))

    # --- Steps ---

    @not_compiled
    def average_parameters(self, params: Params | Iterable[dict[str, Any]]) -> None:
        """Count a step, and gossip if it is due: x ← G(x), in place.

        Args:
            params: The parameters of a model, or the parameter groups of an optimizer.

        Raises:
            ValueError: In all processes, for parameters that cannot be averaged, and if some are
                missing that were averaged before.
            RuntimeError: Within `mean_model`.
        """
        if self._averaged is not None and self._averaged.in_mean:
            raise RuntimeError("a step inside mean_model() would be lost; leave it first")
        if self._is_loaded:
            self._is_loaded = False
            place = "the first step with a loaded state"
            network.checked_barrier(self._processes, place, self.step)
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            averaged = self._prepared(params)
            averaged.run()
        self.step += 1

    def _prepared(self, params: Params | Iterable[dict[str, Any]]) -> Averaged:
        """The averaging of these parameters, after adding those that are new.

        Nothing is sent if they are the last step's.
        """
        entries = [*_tensors(params)]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        given = [(id(tensor), tensor.requires_grad) for tensor in tensors]
        if self._averaged is not None and given == self._given:
            return self._averaged
        network.checked_barrier(
            self._processes, "average_parameters() of new parameters", self.step
        )
        names, tensors = named(entries)
        sharding = None
        if self._mesh is not None and self._averaged is None:
            self._processes, shards = replicas(self._mesh, names, tensors)
            sharding = Sharding(shards, self._per_shard)
        with self._processes.agreed():
            trained = [i for i, tensor in enumerate(tensors) if not is_frozen(tensor)]
            parameters = [tensors[i] for i in trained]
            known = {id(p) for added in self._added for p in added}
            fresh = [p for p in parameters if id(p) not in known]
            if len(parameters) - len(fresh) != len(known):
                raise ValueError(
                    f"{len(parameters) - len(fresh)} of the {len(known)} parameters that were "
                    "averaged before are given; give all of them in each step, and freeze none"
                )
            whole = self._mesh is None
            check_parameters([names[i] for i in trained], parameters, DTYPES, sharded=not whole)
            if not parameters:
                raise ValueError("there are no trainable parameters; use those of a model")
        if self._averaged is None:
            self._averaged = Averaged(
                "GossipModelAverager",
                self._processes,
                self.method,
                parameters[0],
                LearningRule(None, self.method),
                self._message_dtype,
                sharding,
            )
        # The same additions as in the run whose state was loaded, and one for all others.
        restored = self._restored
        for count in () if restored is None else restored["added"]:
            self._add(fresh[:count])
            fresh = fresh[count:]
        if restored is not None:
            with self._processes.agreed():
                self._averaged.check_state(restored)
            self._averaged.load_state_dict(restored)
            self._restored = None
        if fresh:
            self._add(fresh)
        self._given = given
        return self._averaged

    def _add(self, parameters: list[Tensor]) -> None:
        assert self._averaged is not None
        self._averaged.add(parameters, sum(map(len, self._added)), move=False)
        self._added.append(parameters)

    # --- Communication ---

    @property
    def bits(self) -> int:
        """Bits that this worker has sent since the start."""
        if self._averaged is not None:
            return self._averaged.bits
        self._check_count()
        return 0 if self._restored is None else int(self._restored["network"]["bits"][0])

    def _check_count(self) -> None:
        if self._restored is not None and self._mesh is not None:
            raise RuntimeError(
                "bits of a state of sharded replicas before the next step of gossip, which decides "
                "on the parameters; read them after average_parameters has averaged"
            )

    @property
    def bits_inside(self) -> int:
        """Bits that this process has sent to the other shards of its replica, beside FSDP2's."""
        self._check_count()
        return 0 if self._averaged is None else self._averaged.bits_inside

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """A context where the parameters are the mean over all workers.

        Each worker's own parameters are restored at the end. Collective. The messages are not
        counted.

        Raises:
            RuntimeError: Before the first step of gossip, which decides on the parameters.
        """
        if self._averaged is None or self._averaged.in_mean:
            raise RuntimeError(
                "mean_model() before the first step of gossip, or inside mean_model(); call it "
                "after average_parameters has averaged"
            )
        with self._averaged.mean(self.step):
            yield

    # --- State ---

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the state of this worker's averaging algorithm.

        Save it beside the optimizer's: PostLocalSGDOptimizer's state has the number of steps only.
        Parameters are saved with the model.
        """
        gossip = self._restored
        if self._averaged is not None:
            gossip = {**self._averaged.state_dict(), "added": [len(ps) for ps in self._added]}
        return {"step": self.step, "gossip": gossip}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`.

        Raises:
            ValueError: For a state of another method, worker, number of workers or model. Nothing
                is changed then. Before the first step of gossip, the state is checked in that step.
        """
        gossip = state["gossip"]
        if self._averaged is None:
            self._restored = gossip
        elif gossip is None:
            raise ValueError(
                "the state is of a time before the first step of gossip; load it into a new "
                "GossipModelAverager"
            )
        else:
            self._averaged.load_state_dict(gossip)
        self.step, self._is_loaded = state["step"], True


def _tensors(params: Params | Iterable[dict[str, Any]]) -> Iterator[Any]:
    """The tensors, or (name, tensor) pairs, of parameters or parameter groups."""
    for entry in [params] if isinstance(params, torch.Tensor) else params:
        if isinstance(entry, dict):
            yield from entry["params"]
        else:
            yield entry
