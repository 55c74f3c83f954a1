"""PyTorch's own PowerSGD, as the communication hooks of DistributedDataParallel (DDP), on our
workers: one worker a process, whose gradients PyTorch averages while the backward pass runs.

The hooks and what they compute are PyTorch's; this module gives them MPI's processes, Parameters'
flat memory, and checkpoints, and counts what they send. `HOOKS` are the names users choose from.

Process group: NCCL where every process of a host has a GPU of its own, otherwise gloo (NCCL refuses
to share one). If gloo picks an interface that the other hosts cannot reach, name the right one in
the environment variable GLOO_SOCKET_IFNAME.

Axes: worker (hosted here: one); D numbers a worker; n workers.
"""

import atexit
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, prod, sqrt
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd_of_torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from powergossip import checks
from powergossip.algorithms import Correction
from powergossip.network import Network, Processes
from powergossip.parameters import Parameters, matrix_shape

V = TypeVar("V")
Hook = Callable[[PowerSGDState, dist.GradBucket], torch.futures.Future[Tensor]]
Sizes = Callable[[PowerSGDState, dist.GradBucket], list[int]]  # numbers in each all-reduce


def layerwise_sizes(state: PowerSGDState, bucket: dist.GradBucket) -> list[int]:
    """Of powerSGD_hook: the tensors left as they are, all P [row, rank] and all Q [column, rank].

    A matrix is compressed if that makes it min_compression_rate times smaller, or more.
    """
    left, ps, qs = 0, 0, 0
    for shape in (gradient.shape for gradient in bucket.gradients()):
        rows, columns = matrix_shape(shape)
        rank = min(rows, columns, state.matrix_approximation_rank)
        if (rows + columns) * rank * state.min_compression_rate < rows * columns:
            ps += rows * rank
            qs += columns * rank
        else:
            left += prod(shape)
    return [left, ps, qs]


def batched_sizes(state: PowerSGDState, bucket: dist.GradBucket) -> list[int]:
    """Of batched_powerSGD_hook: P and Q, each [side, rank], of the bucket as one square matrix."""
    side = ceil(sqrt(bucket.buffer().numel()))
    rank = state.matrix_approximation_rank
    if rank > side:
        raise ValueError(
            f"optimizer_rank={rank}: one of DDP's buckets is a matrix of {side} × {side}; "
            f"use a rank of {side} or less, or optimizer=ddp-powersgd"
        )
    return [side * rank] * 2


def _orthogonalize(matrices: Tensor, epsilon: float = 0.0) -> None:
    """PyTorch's, for a single matrix too."""
    batch = matrices if matrices.ndim == 3 else matrices[None]
    powersgd_of_torch._orthogonalize(batch, epsilon)


# PyTorch's, which up to 2.13 stops with an AssertionError: it orthogonalizes a matrix by a function
# that takes batches of matrices only, since github.com/pytorch/pytorch/pull/75157. This is its code
# with ours in that place.
batched_powerSGD_hook: Hook = FunctionType(
    powersgd_of_torch.batched_powerSGD_hook.__code__,
    {**vars(powersgd_of_torch), "_orthogonalize": _orthogonalize},
)


# The names that users choose from: optimizer in train.py.
HOOKS: dict[str, tuple[Hook, Sizes]] = {
    "ddp-powersgd": (powerSGD_hook, layerwise_sizes),
    "ddp-batched-powersgd": (batched_powerSGD_hook, batched_sizes),
}


def check(
    *,
    hosted: int,
    rank: int,
    start_iteration: int,
    error_feedback: bool,
    warm_start: bool,
    min_compression_rate: float,
) -> None:
    """ValueError, with the configuration's key, for what PyTorch cannot do.

    hosted  # workers in this process
    """
    if hosted > 1:
        raise ValueError(
            f"{hosted} workers in a process: PyTorch's DDP hooks take one; "
            "use mpirun -np N with N = n_workers"
        )
    checks.at_least_one("optimizer_rank", rank)
    if not min_compression_rate >= 1:
        raise ValueError(f"optimizer_min_compression_rate={min_compression_rate}: use 1 or more")
    if start_iteration < 0:
        raise ValueError(f"optimizer_start_iteration={start_iteration}: use 0 or more")
    if start_iteration <= 1 and (error_feedback or warm_start):
        raise ValueError(
            f"optimizer_start_iteration={start_iteration}: use 2 or more, or "
            "optimizer_error_feedback=false with optimizer_warm_start=false"
        )


class DDPHook:
    """x_i ← x_i − η u(g), g = (1/n) Σ_j g_j before start_iteration, PowerSGD's estimate of it from
    then on. A learning algorithm, as algorithms.DPSGD is one.

    Vogels et al. (2019), arXiv:1905.13727, as PyTorch has it: "ddp-powersgd" compresses layer by
    layer, "ddp-batched-powersgd" each of DDP's buckets as one square matrix. `update(g)` is the
    step of a local optimizer over `parameters.x`.

    rank, start_iteration, error_feedback, warm_start, min_compression_rate, seed
                        matrix_approximation_rank, start_powerSGD_iter, use_error_feedback,
                        warm_start, min_compression_rate and random_seed of PyTorch's PowerSGDState
    weight_decay, clip  of g, which all workers share, where DPSGD has each worker's own: to clip
                        before DDP has averaged is too late

    Counted as ring all-reduces: 2 (n − 1)/n · 32 bits for each number of a bucket before
    start_iteration, then for each of P, Q, and the tensors that are left as they are.

    The models' own memory is used: their forward pass, and what evaluates them, know nothing of
    DDP. Raises ValueError for more than one worker a process and for options that PyTorch cannot
    serve; and in the first step, if a parameter gets no gradient: then DDP would wait for it.

    A matrix whose gradient is all zeros gives NaN, in PyTorch's hooks too.
    """

    def __init__(
        self,
        network: Network,
        parameters: Parameters,
        update: Callable[[Tensor], Any],
        *,
        hook: str,
        rank: int = 1,
        start_iteration: int = 1000,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression_rate: float = 2.0,
        seed: int = 0,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ):
        if hook not in HOOKS:
            raise ValueError(f'optimizer "{hook}" is unknown; choose from {", ".join(HOOKS)}')
        check(
            hosted=network.rows,
            rank=rank,
            start_iteration=start_iteration,
            error_feedback=error_feedback,
            warm_start=warm_start,
            min_compression_rate=min_compression_rate,
        )
        side = ceil(sqrt(parameters.layout.size))
        if hook == "ddp-batched-powersgd" and rank > side:
            raise ValueError(
                f"optimizer_rank={rank}: all gradients together are a matrix of {side} × {side}; "
                f"use a rank of {side} or less"
            )
        self._network, self._parameters, self._update = network, parameters, update
        self._hook, self._sizes = HOOKS[hook]
        self._correct = Correction(parameters, weight_decay, clip)
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start_iteration,
            min_compression_rate=min_compression_rate,
            use_error_feedback=error_feedback,
            warm_start=warm_start,
            random_seed=seed,
        )
        self._before: torch.futures.Future[Tensor] | None = None  # the bucket before, in this step
        self._ddp: DistributedDataParallel | None = None  # wrapped in the first step: it talks

    def step(self, compute_gradient: Callable[[], V]) -> V:
        """One step; the backward pass in `compute_gradient` leaves the mean in `parameters.grad`.
        What it returns is returned."""
        first = self._ddp is None
        if self._ddp is None:
            self._ddp = self._wrapped()
        self._parameters.grad.zero_()
        self._ddp()
        if first:
            compute_gradient = partial(self._gradient_of_all_parameters, compute_gradient)
        result = compute_gradient()
        self._correct()
        self._update(self._parameters.grad)
        return result

    def _wrapped(self) -> DistributedDataParallel:
        """DDP around the parameters of the hosted worker's model, buckets in their final order."""
        (model,) = self._parameters.models
        group = process_group(self._network.processes, self._network.device)
        self.state.process_group = group
        with warnings.catch_warnings():
            # torch 2.13 announces another name for broadcast_buffers, and that it cannot yet do
            # without the broadcast at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            ddp = DistributedDataParallel(
                _Announcement(model),
                process_group=group,
                broadcast_buffers=False,
                init_sync=False,  # workers start alike, or as the checkpoint says
            )
        self._settling = True
        ddp.register_comm_hook(self.state, self._counted_hook)
        # After its first backward pass DDP puts the gradients in buckets anew, in the order in
        # which they came. A resumed run would find errors and directions of another order: so the
        # first pass is one of zeros, whose order depends on nothing but the model.
        ddp()
        torch.stack([parameter.sum() for parameter in model.parameters()]).sum().mul(0).backward()
        self._settling = False
        return ddp

    def _counted_hook(
        self, state: PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """PyTorch's hook, one bucket after the other while the backward pass goes on; counts what
        it sends."""
        if self._settling:
            here: Any = [bucket.buffer().device] if bucket.buffer().is_cuda else None
            nothing: torch.futures.Future[Tensor] = torch.futures.Future(devices=here)
            nothing.set_result(bucket.buffer())
            return nothing
        if self._before is not None:
            # Over gloo, the all-reduces of two buckets under way begin in an order that differs
            # from process to process. And without warm start one would clear the other's P and Q.
            self._before.wait()
        if state.iter < state.start_powerSGD_iter:
            sizes = [bucket.buffer().numel()]
        else:
            sizes = self._sizes(state, bucket)
        for size in filter(None, sizes):
            self._network.count_all_reduce(8 * bucket.buffer().element_size() * size)
        future = self._hook(state, bucket)
        self._before = None if bucket.is_last() else future
        return future

    def _gradient_of_all_parameters(self, compute_gradient: Callable[[], V]) -> V:
        """compute_gradient(). ValueError if a parameter took no part in it."""
        (model,) = self._parameters.models
        missing = dict(model.named_parameters())
        hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: missing.pop(name, None)
            )
            for name, parameter in model.named_parameters()
        ]
        result = compute_gradient()
        for hook in hooks:
            hook.remove()
        if missing:
            raise ValueError(
                f"parameter {', '.join(missing)} gets no gradient, for which PyTorch's DDP hooks "
                "would wait: take it out of the model, or use optimizer=powersgd"
            )
        return result

    def state_dict(self) -> dict[str, Any]:
        """Of PyTorch's PowerSGDState; its tensors, by bucket, are [worker, ...]."""
        state = self.state
        _, keys, position, *_ = state.rng.get_state(legacy=True)
        return {
            "steps": state.iter,
            "rng_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64))[None],
            "rng_position": int(position),
            "numel_before_compression": state.total_numel_before_compression,
            "numel_after_compression": state.total_numel_after_compression,
            **{
                name: {bucket: tensor[None].clone() for bucket, tensor in tensors.items()}
                for name, tensors in self._memories().items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up where another instance was: with as many workers, and the same model."""
        state = self.state
        state.iter = saved["steps"]
        keys = saved["rng_keys"][0].cpu().numpy().astype(np.uint32)
        state.rng.set_state(("MT19937", keys, saved["rng_position"], 0, 0.0))
        state.total_numel_before_compression = saved["numel_before_compression"]
        state.total_numel_after_compression = saved["numel_after_compression"]
        for name, tensors in self._memories().items():
            tensors.clear()
            for bucket, tensor in saved[name].items():
                tensors[bucket] = tensor[0].to(self._network.device, copy=True)

    def _memories(self) -> dict[str, dict[int, Tensor]]:
        state = self.state
        return {
            "errors": state.error_dict,
            "p": state.p_memory_dict,
            "q": state.q_memory_dict,
        }


class _Announcement(nn.Module):
    """Called through DDP it computes nothing, and tells DDP that a backward pass comes: what the
    forward pass was, DDP need not know if every parameter takes part in it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self) -> None:
        return None


# --- The process group ---------------------------------------------------------------------------

_Made = tuple[int, int, str]  # rank, size, backend
_made: _Made | None = None  # the default group, if it is ours


def process_group(who: Processes, device: torch.device) -> dist.ProcessGroup:
    """torch.distributed's group of these processes, made at the first call. All must call it.

    Raises ValueError if someone else has made torch.distributed's default group of other processes.
    """
    global _made
    alone_on_gpu = device.type == "cuda" and who.local_size <= torch.cuda.device_count()
    backend = "nccl" if alone_on_gpu and dist.is_nccl_available() else "gloo"
    wanted = who.rank, who.size, backend
    if dist.is_initialized() and _made not in (None, wanted):
        _end()
    if dist.is_initialized() and _made is None:
        there = dist.get_rank(), dist.get_world_size()
        if there != wanted[:2]:
            raise ValueError(
                f"torch.distributed is in use as process {there[0]} of {there[1]}, where MPI has "
                f"{who.rank} of {who.size}; call torch.distributed.destroy_process_group() first"
            )
    elif not dist.is_initialized():
        ours = sys.excepthook
        dist.init_process_group(backend, store=_store(who), rank=who.rank, world_size=who.size)
        # PyTorch's own collects what ours writes until that returns, which it does not: it ends all
        # processes, and nobody would know why.
        sys.excepthook = ours
        _made = wanted
    group = dist.group.WORLD
    assert group is not None
    return group


def _store(who: Processes) -> dist.TCPStore:
    """Where processes tell each other their addresses: process 0 serves it, on a free port."""
    store = None
    address = "", 0
    if who.rank == 0:
        host = "127.0.0.1" if who.local_size == who.size else _own_address()
        store = dist.TCPStore(host, 0, who.size, is_master=True, wait_for_workers=False)
        address = host, store.port
    host, port = who.broadcast(address)
    return store or dist.TCPStore(host, port, who.size, is_master=False)


def _own_address() -> str:
    """This host's address, as others see it: that of the interface that leads elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


@atexit.register
def _end() -> None:
    """Take down the group that `process_group` made."""
    global _made
    if _made is not None and dist.is_initialized():
        dist.destroy_process_group()
    _made = None
