"""Gossip as a communication hook of PyTorch's DistributedDataParallel (DDP)::

    from powergossip.optimizers import GossipState, gossip_hook

    ddp = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = GossipState(optimizer, "power-gossip", rank=1)
    ddp.register_comm_hook(state, gossip_hook)

The rest of the loop is unchanged. DDP then averages no gradients: each process keeps its own, and
its parameters move towards its neighbors' parameters::

    x_i ← G(x)_i − η u(g_i)

with an averaging algorithm G and the local update u of the optimizer. This is the overlapping form
of D-PSGD (Lian et al. 2017, arXiv:1705.09056, Algorithm 1): messages about x are in flight during
the backward pass, when parameters must not change, and are mixed in before the update.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from powergossip import checks, network
from powergossip.optimizers.checks import check_same_everywhere, not_compiled
from powergossip.optimizers.gossip import check_wrappable
from powergossip.optimizers.gossip_engine import Averaged
from powergossip.optimizers.gossip_method import GossipMethod
from powergossip.optimizers.gradients import Traffic
from powergossip.optimizers.learning_rules import LearningRule


class GossipState(Traffic):
    """The state of `gossip_hook`: the parameters of an optimizer and their averaging algorithm::

        x_i ← G(x)_i − η u(g_i)        g_i at the parameters before G

    G is an averaging algorithm, and u the update of the optimizer.

    A step of gossip is a backward pass whose gradients DDP synchronizes. Its messages are sent in
    the hook of the first bucket, and it is finished before the next change of parameters: the
    optimizer's step. If that is skipped, because a GradScaler found an overflow in this process, it
    is finished by the module's next forward pass. A backward pass within `no_sync()` does not
    gossip: to accumulate gradients, put all but the last one there, as for DDP without a hook.

    Construction moves float32 parameters into one buffer, and gives all processes the values of
    process 0, as DDP does. Create it after the module. Construction,
    backward passes with synchronization and `mean_model` are collective.

    Cost on the wire: the messages of the averaging algorithm. DDP itself sends parameters and
    buffers at its construction, which is not counted.

    The first forward pass raises ValueError for a module with buffers that DDP would overwrite with
    process 0's: in gossip they are each worker's.

    Args:
        optimizer: A torch optimizer of the DDP module's parameters. Its `step` mixes, then updates.
        method: Name of an averaging algorithm, as for `GossipOptimizer`.
        local_steps: Number of steps per step of gossip.
        process_group, options: As for `GossipOptimizer`, which has the same trajectory with
            overlapping=True.

    Raises:
        ValueError: In all processes, for invalid parameters or options and for "all-reduce", which
            DDP does by itself on gradients.

    References:
        Lian et al. (2017), arXiv:1705.09056, Algorithm 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: str,
        *,
        local_steps: int = 1,
        process_group: Any = None,
        **options: Any,
    ):
        processes, local_steps = network.processes_of(process_group), checks.plain(local_steps)
        with processes.agreed():
            check_wrappable(optimizer, local_steps)
            self.method = GossipMethod.on_graph(method, **options)
            self.method.check_overlapping("gossip_hook")
        learning = LearningRule(None, self.method)
        self._averaged = Averaged("GossipState", processes, optimizer, learning)
        self.network = self._averaged.network
        check_same_everywhere(processes, {"local_steps": local_steps})
        self._optimizer, self._local_steps, self._steps = optimizer, local_steps, 0
        self._known = self._parameters()
        own = weakref.ref(self)
        network.checked_barrier_at_exit(processes, lambda: getattr(own(), "_steps", None))
        optimizer.register_step_pre_hook(_weak(self._before_step))
        optimizer.register_step_post_hook(_weak(self._after_step))
        _at_first_forward(own)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def on_bucket(self, index: int) -> None:
        """Start a step of gossip with bucket 0, the first of a backward pass; advance messages.

        A backward pass within `mean_model` does not count as a step.
        """
        if self._averaged.in_mean:
            return
        if index > 0 or self._averaged.in_flight:
            self._averaged.progress()
            return
        parameters = self._parameters()
        if [*map(id, parameters)] != [*map(id, self._known)]:
            raise RuntimeError(
                f"the optimizer has {len(parameters)} parameters, not the {len(self._known)} that "
                "it had when GossipState was created; create a new module and state"
            )
        self._averaged.check_loaded()
        self._steps += 1
        if self._steps % self._local_steps == 0:
            self._averaged.start()

    def finish(self) -> None:
        """Mix, if a step is in flight: x ← G(x)."""
        self._averaged.finish()

    def _before_step(self) -> None:
        """Mix before the optimizer's update, and announce that."""
        if self._averaged.in_mean:
            raise RuntimeError("a step inside mean_model() would be lost; leave it first")
        self.finish()
        self._averaged.before_update()

    def _after_step(self) -> None:
        """Rescale the optimizer's update, if the averaging algorithm has weights."""
        self._averaged.after_update()
        self._averaged.move()

    def attach(self, module: DistributedDataParallel) -> None:
        """Follow the forward passes of the module that has this state.

        Raises:
            ValueError: If the module broadcasts buffers.
        """
        names = [name for name, _ in module.module.named_buffers()]
        if module.broadcast_buffers and names:
            present = hasattr(module, "forward_sync_buffers")  # broadcast_buffers in earlier torch
            option = "forward_sync_buffers" if present else "broadcast_buffers"
            raise ValueError(
                f"DDP would overwrite the buffer {names[0]} of all processes by that of process "
                f"0; use DistributedDataParallel(…, {option}=False) with gossip_hook"
            )
        module.register_forward_pre_hook(_weak(self.finish))

    @contextmanager
    def mean_model(self) -> Iterator[None]:
        """A context where the parameters are the mean over all workers.

        Each worker's own parameters are restored at the end. Collective. The messages are not
        counted. A step of the optimizer raises RuntimeError inside.
        """
        self.finish()
        with self._averaged.mean(self._steps):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker's averaging algorithm. The optimizer's is saved separately."""
        self.finish()
        return {**self._averaged.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`.

        Raises:
            ValueError: For a state of another method, worker, number of workers or model. Nothing
                is changed then.
        """
        self._averaged.load_state_dict(state)
        self._steps = state["steps"]


@not_compiled
def gossip_hook(state: GossipState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that leaves gradients local, and gossips parameters.

    See `GossipState`. torch's DDP reduces its buckets in ascending order, so that bucket 0 is the
    first of each backward pass.
    """
    state.on_bucket(bucket.index())
    gradients = bucket.buffer()
    devices: Any = [gradients.device] if gradients.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(gradients)
    return future


def _weak(method: Callable[[], None]) -> Callable[..., None]:
    """A hook that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    @not_compiled
    def hook(*_: Any) -> None:
        found = reference()
        if found is not None:
            found()

    return hook


def _at_first_forward(own: "weakref.ref[GossipState]") -> None:
    """Give the state its DDP module in the module's next forward pass.

    A hook receives no reference to the module, and register_comm_hook calls nothing of the state.
    """

    @not_compiled
    def before(module: nn.Module, _: Any) -> None:
        state = own()
        if state is None:
            handle.remove()
        elif isinstance(module, DistributedDataParallel) and any(
            theirs is state for _, theirs in module._comm_hooks
        ):
            state.attach(module)
            handle.remove()

    handle = register_module_forward_pre_hook(before)
