"""The parameters of a training loop and the gossip that averages them: the common part of
GossipOptimizer and GossipState.

Axes: worker (always 1: this process's worker), D elements of a part.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powergossip import network
from powergossip.network import Conversation, Exchange, Processes, processes_of, together
from powergossip.optimizers.checks import (
    DTYPES,
    check_owner,
    check_same_everywhere,
    check_same_parameters,
    check_shapes,
    is_frozen,
    named,
    owner_of,
    warn_of_buffers,
    working_dtype,
)
from powergossip.optimizers.gossip_part import Part
from powergossip.optimizers.gradients import Traffic
from powergossip.optimizers.learning_rules import LearningRule
from powergossip.optimizers.sharded_parameters import (
    Sharding,
    memory,
    reshard_modules,
)
from powergossip.parameters import check_parameters

_VERSION = 3  # of the state
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtype by the bytes of an element

# Those with messages in flight: their memory must not be freed, even if nothing else refers to it.
_in_flight: set["Averaged"] = set()


class Averaged(Traffic):
    """Parameters that are averaged with other processes' parameters, x ← G(x).

    A step is `start`, which sends the first messages, `finish`, after which parameters may change,
    the local update, and `move`. A single process has nothing to do.

    Args:
        owner: Name of the object that the user created, for errors.
        optimizer: The optimizer of the parameters. All workers get the values of process 0, also of
            frozen parameters. Those that are not in half precision are moved into the memory of x.
        learning: The learning rule.
        sharding: The shards of each worker. The processes are then those with this shard.

    Attributes:
        parts: Parameters of each dtype.

    Raises:
        ValueError: In all processes, for parameters that cannot be averaged.
    """

    def __init__(
        self,
        owner: str,
        processes: Processes,
        optimizer: torch.optim.Optimizer,
        learning: LearningRule,
        sharding: Sharding | None = None,
    ):
        self.owner, self.processes, self.method = owner, processes, learning.method
        self.sharding, self._learning = sharding, learning
        with processes.agreed():
            trainable = _trainable_of(optimizer, sharded=sharding is not None)
            like = trainable[0]
            self.network = self.method.network(processes, like.device, working_dtype([like]))
        of_all = {"the method": self.method.facts(), "the graph": self.network.topology.fingerprint}
        check_same_everywhere(processes, of_all)
        if self.n_workers == 1 and processes is processes_of():
            warnings.warn(
                f"{owner} averages nothing in a single process; start several, such as "
                "mpirun -np 4 python SCRIPT or torchrun --nproc-per-node 4 SCRIPT",
                stacklevel=3,
            )
        self.parts: list[Part] = []
        # A single process has no neighbors, but it may have the state of a learning rule.
        self._works = self.n_workers > 1 or learning.works_alone
        self.in_step = False  # whether a step has been started, and its local update is to come
        self._exchange: Exchange | None = None  # in flight
        self._loaded: Mapping[str, Any] | None = None  # facts of the state, until the first step
        self._start = 0  # checksum of the parameters at construction
        self.in_mean = False  # whether the parameters are the mean model at present
        self._add([p for group in optimizer.param_groups for p in group["params"]])

    @property
    def active(self) -> list[Part]:
        """The parts that gossip; none in a single process, which has no neighbors."""
        return self.parts if self._works else []

    @property
    def bits_inside(self) -> int:
        """Bits that this process has sent to the other shards of its replica, beside FSDP2's."""
        return 0 if self.sharding is None else self.sharding.shards.bits

    def _add(self, parameters: Sequence[Tensor]) -> None:
        self.frozen = [p for p in parameters if is_frozen(p)]
        check_same_parameters(self.processes, parameters)
        with self.processes.agreed():
            for index, parameter in enumerate(parameters):
                if not is_frozen(parameter) and working_dtype([parameter]) != self.network.dtype:
                    raise ValueError(
                        f"parameter {index} is {parameter.dtype}, others are not; use "
                        "torch.float64 for all parameters or for none"
                    )
        trained = [p for p in parameters if p.numel() and not is_frozen(p)]
        for index, dtype in enumerate(dict.fromkeys(p.dtype for p in trained)):
            with self.processes.agreed():
                part = Part(
                    [p for p in trained if p.dtype == dtype],
                    partial(self._learning.build, self.network, index),
                    self.sharding,
                )
                self.method.warn_of_rate(self.network)
            self.parts.append(part)
        for parameter in self.frozen:  # one by one, since together they may be large
            self.processes.broadcast_tensors([memory(parameter)])
        own = set(trained if self.sharding is None else [])
        self._places = [  # in modules, by name
            (weakref.ref(module), name, parameter)
            for module in warn_of_buffers(self.processes, parameters)
            for name, parameter in module._parameters.items()
            if parameter in own
        ]
        if self.sharding is not None:
            reshard_modules()
        if self._works:
            for part in self.parts:
                if self.processes.rank > 0 and self.sharding is None:
                    part.before = [p.detach().to("cpu", copy=True) for p in part.parameters]
                self.processes.broadcast_tensors([*map(memory, part.parameters)])
                part.allocate()
        if any(part.before for part in self.parts):
            self._start = _checksum(self.parts)

    def check(self) -> None:
        """Raise RuntimeError for a parameter that was moved or replaced, or is not frozen any more.

        Values that were assigned to .data are taken over.
        """
        for part in self.active:
            part.reclaim(self.owner)
        for module, name, parameter in self._places:
            found = parameter.grad is None and getattr(module(), name, None)
            if isinstance(found, nn.Parameter) and found is not parameter:
                raise RuntimeError(
                    f'parameter "{name}" of {module()} is not the one that {self.owner} has: load '
                    "the model without assign=True, or before the optimizer is created"
                )
        for frozen in self.frozen:
            if frozen.requires_grad:
                raise RuntimeError(
                    f"a parameter of shape {tuple(frozen.shape)} was frozen when "
                    f"{self.owner} was created, so it is not averaged; create a new one, or "
                    "leave the parameter out"
                )

    def check_loaded(self) -> None:
        """Compare a newly loaded state with the other processes' and with the parameters.

        Call it when a step begins. Ends all processes if they have loaded states of different
        steps, and warns if the parameters are others than when the state was saved.
        """
        saved, self._loaded = self._loaded, None
        for part in self.parts:
            part.before = []
        if saved is None:
            return
        place = "the first step with a loaded state"
        network.checked_barrier(self.processes, place, saved["steps"])
        if saved["checksum"] not in (None, _checksum(self.parts)):
            warnings.warn(
                "the parameters are not those with which the state was saved: load the model that "
                "this process saved beside it, before or after the optimizer is created (in "
                f"DistributedDataParallel, after {self.owner} is)",
                stacklevel=2,
            )

    # --- Steps ---

    @property
    def in_flight(self) -> bool:
        """True if a step has begun and its messages are in flight."""
        return self._exchange is not None and self.in_step

    def start(self) -> None:
        """Send the messages of the learning rules before the local update."""
        assert not self.in_flight
        if self.active and not self.in_mean:
            self.check()
            self.in_step = True
            self._send(part.start() for part in self.active)

    def _send(self, conversations: Iterable[Conversation | None]) -> None:
        started = [conversation for conversation in conversations if conversation is not None]
        if started:
            self._exchange = self.network.start(together(*started))
            _in_flight.add(self)

    def progress(self) -> None:
        """Advance the messages in flight without waiting."""
        if self._exchange is not None:
            self.network.progress()

    def finish(self) -> None:
        """Receive the messages in flight, or as many as the learning rule asks for, and mix."""
        turns = [turns for part in self.active if (turns := part.rule.turns) is not None]
        if not turns:
            self.receive()
        elif self._exchange is not None:
            self._exchange.take_turns(max(turns))

    def receive(self) -> None:
        """Receive all messages and mix. Does nothing if no messages are in flight."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
            _in_flight.discard(self)
            for part in self.active:
                part.store()

    def before_update(self) -> None:
        """Announce the local update of the parameters. Without a step, it is one without gossip."""
        if not self.in_step:
            self.in_step = True
            for part in self.active:
                part.start()
        for part in self.active:
            part.before_update()

    def after_update(self) -> None:
        """Change x by the local update, as the learning rules have it."""
        for part in self.active:
            part.after_update(self.owner)

    def move(self) -> None:
        """Send the messages of the learning rules after the local update, and end the step."""
        mixing = [conversation for part in self.active if (conversation := part.move())]
        if mixing:
            self._send(mixing)
            self.receive()
        for part in self.active:
            part.end()
        self.in_step = False

    # --- The mean model ---

    @contextmanager
    def mean(self, step: int) -> Iterator[None]:
        """A context where the parameters are the mean over all workers. Collective, not counted.

        Each worker's own parameters are restored at the end. Raises RuntimeError inside another.
        """
        self._prepare_mean("mean_model()", step)
        own = [part.x.clone() for part in self.active]
        for part in self.active:
            part.x[0].copy_(self.network.mean(part.x))
            part.store()
        if self.sharding is not None:
            reshard_modules()
        self.in_mean = True
        try:
            yield
        finally:
            self.in_mean = False
            if self.sharding is not None:
                reshard_modules()
            for part, x in zip(self.active, own, strict=True):
                part.reclaim(self.owner)
                part.x.copy_(x)
                part.store()

    def merge(self, step: int) -> None:
        """The parameters ← their mean over all workers. Collective. Counted, unless they agree."""
        self._prepare_mean("merge()", step)
        for part in self.active:
            self.network.merge(part.x)
            part.store()
        if self.sharding is not None:
            reshard_modules()

    def _prepare_mean(self, place: str, step: int) -> None:
        """Receive what is in flight, and load x from the parameters. Collective. Raises
        RuntimeError inside `mean`."""
        if self.in_mean:
            raise RuntimeError(f"{place} inside mean_model(): the parameters are the mean already")
        self.receive()
        network.checked_barrier(self.processes, place, step)
        for part in self.active:
            part.reclaim(self.owner)
            part.load()

    # --- State ---

    def _facts(self) -> dict[str, Any]:
        """Values that must be equal in an object that loads this one's state."""
        others = {}
        if self.network.dtype != torch.float32:
            others["dtype"] = str(self.network.dtype)
        if self.sharding is not None:
            others |= self.sharding.facts()
        return {
            "version": _VERSION,
            **self.method.facts(),
            **others,
            **owner_of(self.processes),
            "shapes": [[list(p.shape) for p in part.parameters] for part in self.parts],
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker's learning rules, with the state of their averaging
        algorithms."""
        self.receive()
        inside = self.bits_inside
        state = {
            **self._facts(),
            "averaging": [part.rule.state_dict() for part in self.parts],
            "network": self.network.state_dict(),
        }
        if self.sharding is not None:
            return self.sharding.saved(state, inside)
        return {**state, "checksum": _checksum(self.parts)}

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless a saved state has the same facts as this object."""
        _check_state(saved, self._facts())
        check_owner(saved, owner_of(self.processes))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`, and the values that the parameters had
        before construction if they belong to it. Raises ValueError as `check_state` does."""
        self.check_state(saved)
        self.receive()
        if self.sharding is not None:
            saved = self.sharding.loaded(saved)
        known = saved.get("checksum")
        others = [part for part in self.parts if part.before]
        if others and (self._start, known) == (_checksum(self.parts), _checksum(self.parts, True)):
            with torch.no_grad():
                for part in others:
                    torch._foreach_copy_([*part.parameters], part.before)
        for part, state in zip(self.parts, saved["averaging"], strict=True):
            part.rule.load_state_dict(state)
        self._loaded = {"steps": saved.get("steps"), "checksum": known}
        self.in_step = False
        self.network.load_state_dict(saved["network"])


def _checksum(parts: Iterable[Part], before: bool = False) -> int:
    """The sum of the bits of all parameters as integers, or of their values `before`."""
    tensors = (p.detach() for part in parts for p in (before and part.before) or part.parameters)
    return sum(int(p.view(_BITS[p.element_size()]).sum()) for p in tensors)


def _check_state(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError unless a saved state has the same facts as this optimizer."""
    if saved.get("version") != now["version"]:
        raise ValueError(
            f"the state has version {saved.get('version')}, this is version {now['version']}; "
            "load it with the program that saved it"
        )
    for key in ("worker", "shapes", "averaging", "network"):
        if key not in saved:
            raise ValueError(f"the state has no {key!r}; load all that was saved")
    if ("per_shard" in saved) != ("per_shard" in now):
        theirs, ours = "whole", "sharded"
        if "per_shard" in saved:
            theirs, ours = ours, theirs
        raise ValueError(
            f"the state is of {theirs} replicas, these are {ours}; begin the optimizer anew, with "
            "the same parameters"
        )
    saved, now = ({k: v for k, v in facts.items() if v != {}} for facts in (saved, now))
    differing = [  # checkpointers leave out empty mappings
        f"{key}={saved.get(key)!r} (here {now.get(key)!r})"
        for key in dict.fromkeys((*now, *saved))
        if key not in ("version", "shapes", "worker", *_STATE_KEYS)
        and saved.get(key) != now.get(key)
    ]
    if saved.get("method") != now["method"]:
        differing = differing[:1]  # the others are its options
    if differing:
        raise ValueError(f"the state has {', '.join(differing)}; use the same")
    if len(saved["shapes"]) != len(now["shapes"]):
        raise ValueError(
            f"the state has parameters of {len(saved['shapes'])} dtypes, here are "
            f"{len(now['shapes'])}; use the same model"
        )
    for shapes, expected in zip(saved["shapes"], now["shapes"], strict=True):
        check_shapes(shapes, expected)


_STATE_KEYS = ("steps", "averaging", "network", "checksum")  # not facts


def _trainable_of(optimizer: torch.optim.Optimizer, sharded: bool) -> list[Tensor]:
    """The trainable parameters, DTensors if they are sharded. Raises ValueError for parameters that
    cannot be averaged."""
    names, parameters = named(p for group in optimizer.param_groups for p in group["params"])
    trainable = [i for i, p in enumerate(parameters) if not is_frozen(p)]
    found = [parameters[i] for i in trainable]
    check_parameters([names[i] for i in trainable], found, DTYPES, sharded=sharded)
    if not any(p.numel() for p in found):
        raise ValueError(
            "the optimizer has no trainable parameters with elements; use those of a model"
        )
    return found
