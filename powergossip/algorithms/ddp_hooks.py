"""PyTorch's own PowerSGD: the communication hooks of DistributedDataParallel (DDP).

One worker a process. PyTorch averages the gradients while the backward pass runs. The hooks and
their mathematics are PyTorch's, apart from directions of zeros (see `orthogonalize`). This module
supplies the processes of MPI, the flat memory of Parameters and checkpoints, and counts bits.
`HOOKS` are the names users choose from.

PyTorch's guidance: tune the rank from 1 by factors of 2. Start compression at 10 % of the steps,
not before the end of the warm-up, and later until the accuracy suffices. Prefer the layer-wise
hook, and use the batched one at rank 1 only.

Process group: NCCL if every process of a host has its own GPU, otherwise gloo, since NCCL does not
let two processes share a GPU. If gloo picks an interface that other hosts cannot reach,
set the environment variable GLOO_SOCKET_IFNAME.

Axes: worker (hosted here: one); D parameters of a worker; n workers.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import ceil, prod, sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd_of_torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from powergossip import checks
from powergossip.algorithms.learning import Correction, LocalStep
from powergossip.network import Network, torch_group
from powergossip.parameters import Parameters, matrix_shape, trained

Hook = Callable[[PowerSGDState, dist.GradBucket], torch.futures.Future[Tensor]]
Sizes = Callable[[PowerSGDState, dist.GradBucket], list[int]]  # elements of each all-reduce


def layerwise_sizes(state: PowerSGDState, bucket: dist.GradBucket) -> list[int]:
    """Elements of powerSGD_hook's all-reduces: uncompressed tensors, all P, all Q.

    P is [row, rank], Q is [column, rank]. A matrix is compressed if its P and Q together have fewer
    elements by a factor above min_compression_rate.
    """
    uncompressed, ps, qs = 0, 0, 0
    for shape in (gradient.shape for gradient in bucket.gradients()):
        rows, columns = matrix_shape(shape)
        rank = min(rows, columns, state.matrix_approximation_rank)
        if (rows + columns) * rank * state.min_compression_rate < rows * columns:
            ps += rows * rank
            qs += columns * rank
        else:
            uncompressed += prod(shape)
    return [uncompressed, ps, qs]


def batched_sizes(state: PowerSGDState, bucket: dist.GradBucket) -> list[int]:
    """Elements of batched_powerSGD_hook's all-reduces: P and Q [side, rank] of a square matrix."""
    side = ceil(sqrt(bucket.buffer().numel()))
    return [side * state.matrix_approximation_rank] * 2


_of_torch = powersgd_of_torch._orthogonalize


def orthogonalize(epsilon: float, matrices: Tensor, _: float = 0) -> None:
    """PyTorch's orthogonalization of columns, in place, also for a single matrix.

    It takes the place of PyTorch's function, which its hooks find in their module. Up to version
    2.13 the batched hook would raise AssertionError: since
    github.com/pytorch/pytorch/pull/75157 it gives a single matrix to a function that takes batches
    only. It also ignores PowerSGDState.orthogonalization_epsilon.

    With epsilon > 0, a fixed random column replaces a column of zeros, which a gradient of zeros
    causes. PyTorch leaves it at zero at rank 1 and 2. With warm start it would then stay zero, and
    the matrix would never be updated again.
    """
    batch = matrices if matrices.ndim == 3 else matrices[None]
    zero = (batch == 0).all(1, keepdim=True)
    if epsilon > 0 and zero.any():
        random = torch.randn(batch.shape[1:], generator=torch.Generator().manual_seed(0))
        batch.copy_(torch.where(zero, random.to(batch), batch))
    _of_torch(batch, epsilon)


# The names that users choose from: `optimizer` in train.py.
HOOKS: dict[str, tuple[Hook, Sizes]] = {
    "ddp-powersgd": (powerSGD_hook, layerwise_sizes),
    "ddp-batched-powersgd": (powersgd_of_torch.batched_powerSGD_hook, batched_sizes),
}


AUTO = "auto"  # the first compressed step by PyTorch's guidance


def check(
    *,
    hosted: int,
    rank: int,
    start_iteration: int | str,
    error_feedback: bool,
    warm_start: bool,
    min_compression_rate: float,
    orthogonalization_epsilon: float,
    **_: Any,
) -> None:
    """Raise ValueError for values that PyTorch does not support.

    Args:
        hosted: Number of workers in this process.
    """
    if hosted > 1:
        raise ValueError(
            f"{hosted} workers in a process: PyTorch's DDP hooks take one; "
            "use mpirun -np N with N = n_workers"
        )
    checks.at_least_one("rank", rank)
    for name, value in (
        ("min_compression_rate", min_compression_rate),
        ("orthogonalization_epsilon", orthogonalization_epsilon),
    ):
        checks.check(name, value, checks.is_finite(value) and value >= 0, "0 or more")
    if start_iteration == AUTO:
        return
    with_memory = error_feedback or warm_start
    checks.check(
        "start_iteration",
        start_iteration,
        isinstance(start_iteration, int) and start_iteration >= (2 if with_memory else 0),
        "2 or more or auto, or optimizer_error_feedback=false with optimizer_warm_start=false"
        if with_memory
        else "0 or more, or auto",
    )


def smallest_bucket(elements: Iterable[int], dtype: torch.dtype = torch.float32) -> int:
    """Elements of DDP's smallest bucket of gradients, for the elements of the parameters.

    DDP fills a bucket with gradients, from the last parameter to the first: the first one until it
    has 1 MiB or more, the others until they have 25 MiB.
    """
    sizes, limit = [0], 2**20  # bytes
    for count in reversed(list(elements)):
        if dtype.itemsize * sizes[-1] >= limit:
            sizes.append(0)
            limit = 25 * 2**20
        sizes[-1] += count
    return min(sizes)


class DDPHook:
    """x_i ← x_i − η u(g), g = (1/n) Σ_j g_j before start_iteration, then PowerSGD's estimate of it.

    A learning rule, as algorithms.DPSGD is one. Vogels et al. (2019), arXiv:1905.13727, in
    PyTorch's implementation: "ddp-powersgd" compresses layer by layer, "ddp-batched-powersgd" each
    of DDP's buckets as one square matrix. `update(g)` is the step of a local optimizer over
    `parameters.x`.

    Bits are counted as ring all-reduces: 2 (n − 1)/n · 32 bits for each element of a bucket before
    start_iteration, then for each element of P, of Q and of the uncompressed tensors.

    The models keep their own memory. Their forward pass does not go through DDP. Frozen parameters
    have no gradient and are not sent. PyTorch's PowerSGDState has the same options. Its names,
    where they differ, are matrix_approximation_rank, start_powerSGD_iter, use_error_feedback and
    random_seed.

    Args:
        update: Step of a local optimizer over parameters.x.
        hook: Name of the hook in HOOKS.
        rank: Rank of the approximation, at most the smaller side of a matrix. Try 1, 2, 4, … The
            batched hook is for rank 1 only, where ddp-powersgd is preferable, too.
        start_iteration: First compressed step, and all-reduce before it. auto: after 10 % of the
            steps planned at the start, and no less than the warm-up or 2. Increase it until the
            accuracy is right.
        error_feedback: Add a worker's error to its next gradient. Otherwise it is lost.
        warm_start: Reuse the last step's directions. Otherwise they are resampled.
        min_compression_rate: Tensors that would be compressed by this factor or less are
            all-reduced whole.
        orthogonalization_epsilon: Number added to the norm of a direction at rank 1 and 2, and in
            half precision. At higher ranks PyTorch uses a QR factorization without it. 0,
            PyTorch's default: a gradient of zeros gives NaN.
        seed: Seed of random directions.
        weight_decay: Weight decay of the mean gradient g. DPSGD applies it to each worker's own
            gradient, which DDP does not expose before it averages.
        clip: Largest norm of the mean gradient g.

    Raises:
        ValueError: For more than one worker a process, for options that PyTorch does not support,
            for a rank above the side of a bucket's square matrix, and in the first step for a
            parameter without a gradient, which DDP would wait for.
    """

    kept = (
        "p",
        "q",
        "rng_keys",
        "rng_position",
        "start_iteration",
        "steps",
    )
    conserved = ("errors",)

    def __init__(
        self,
        network: Network,
        parameters: Parameters,
        update: LocalStep,
        *,
        hook: str,
        rank: int = 1,
        start_iteration: int | str = 1000,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression_rate: float = 2.0,
        orthogonalization_epsilon: float = 1e-8,
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
            orthogonalization_epsilon=orthogonalization_epsilon,
        )
        if hook == "ddp-batched-powersgd":
            elements = map(prod, parameters.layout.shapes)
            side = ceil(sqrt(smallest_bucket(elements, network.dtype)))
            accepted = f"{side} or less, the side of DDP's smallest bucket as a square matrix"
            checks.check("rank", rank, rank <= side, accepted)
        self._network, self._parameters, self._update = network, parameters, update
        self._hook, self._sizes = HOOKS[hook]
        # The newest rule's epsilon: a process trains with one.
        powersgd_of_torch._orthogonalize = partial(orthogonalize, orthogonalization_epsilon)
        self._correct = Correction(parameters, weight_decay, clip)
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start_iteration,
            min_compression_rate=min_compression_rate,
            use_error_feedback=error_feedback,
            warm_start=warm_start,
            orthogonalization_epsilon=orthogonalization_epsilon,
            random_seed=seed,
        )
        self._before: torch.futures.Future[Tensor] | None = None  # the previous bucket of this step
        self._ddp: DistributedDataParallel | None = None  # made in the first step: communicates
        self._missing: _Missing | None = None  # in the first step

    @property
    def start_iteration(self) -> int:
        """The first compressed step."""
        start: int = self.state.start_powerSGD_iter
        return start

    def start(self) -> None:
        """g ← 0. DDP expects a backward pass."""
        if self._ddp is None:
            self._ddp = self._wrapped()
            self._missing = _Missing(self._parameters.models[0])
        self._parameters.grad.zero_()
        self._ddp()

    def finish(self) -> None:
        """Update with the mean gradient, which the backward pass has left in `parameters.grad`."""
        if self._missing is not None:
            self._missing.check()
            self._missing = None
        self._correct()
        with self._network.measure("update"):
            self._update(self._parameters.grad)

    def _wrapped(self) -> DistributedDataParallel:
        """DDP over the parameters of the hosted model, with buckets in their final order."""
        (model,) = self._parameters.models
        group = torch_group(self._network.processes, self._network.device)
        self.state.process_group = group
        with warnings.catch_warnings():
            # torch 2.13 deprecates broadcast_buffers without a complete replacement.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            ddp = DistributedDataParallel(
                _NoOpForward(model),
                process_group=group,
                broadcast_buffers=False,
                init_sync=False,  # workers start alike, or from a checkpoint
            )
        self._settling = True
        ddp.register_comm_hook(self.state, self._counted_hook)
        # After its first backward pass DDP rebuilds its buckets in the order of the gradients'
        # arrival. In a resumed run, errors and directions would then be in another order. So the
        # first pass has zero gradients, in an order that depends on the model only.
        ddp()
        torch.stack([parameter.sum() for parameter in model.parameters()]).sum().mul(0).backward()
        self._settling = False
        return ddp

    def _counted_hook(
        self, state: PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """PyTorch's hook, one bucket after the other during the backward pass. Counts its bits."""
        if self._settling:
            here: Any = [bucket.buffer().device] if bucket.buffer().is_cuda else None
            nothing: torch.futures.Future[Tensor] = torch.futures.Future(devices=here)
            nothing.set_result(bucket.buffer())
            return nothing
        if self._before is not None:
            # Over gloo, the all-reduces of two buckets in flight start in an order that differs
            # between processes. Without warm start one would also clear the other's P and Q.
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

    def state_dict(self) -> dict[str, Any]:
        """The contents of PyTorch's PowerSGDState. Tensors, by bucket, are [worker, ...]."""
        state = self.state
        _, keys, position, *_ = state.rng.get_state(legacy=True)
        return {
            "steps": state.iter,
            "start_iteration": state.start_powerSGD_iter,
            "rng_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64))[None],
            "rng_position": int(position),
            **{
                name: {bucket: tensor[None].clone() for bucket, tensor in tensors.items()}
                for name, tensors in self._memories().items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`: same model, same number of workers.

        The first compressed step is the saved one.
        """
        state = self.state
        state.iter = saved["steps"]
        state.start_powerSGD_iter = saved["start_iteration"]
        keys = saved["rng_keys"][0].cpu().numpy().astype(np.uint32)
        state.rng.set_state(("MT19937", keys, saved["rng_position"], 0, 0.0))
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


class _Missing:
    """The parameters of a model that get no gradient in a backward pass."""

    def __init__(self, model: nn.Module):
        self._names = trained(model)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: self._names.pop(name, None)
            )
            for name, parameter in self._names.items()
        ]

    def check(self) -> None:
        """Raise ValueError if there are any."""
        for hook in self._hooks:
            hook.remove()
        if self._names:
            raise ValueError(
                f"parameter {', '.join(self._names)} gets no gradient, for which PyTorch's DDP "
                "hooks would wait: take it out of the model, or use optimizer=powersgd"
            )


class _NoOpForward(nn.Module):
    """A forward pass through DDP that computes nothing but prepares DDP for a backward pass.

    DDP need not see the real forward pass, since every parameter takes part in it.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.trained = nn.ParameterList(trained(model).values())

    def forward(self) -> None:
        return None
