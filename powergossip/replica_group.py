"""The processes over which the tensors of a worker are divided, as by FSDP.

Such a worker is a *replica*, and its processes are its shards. Shard k of a replica exchanges
messages with shard k of its neighbors. What an algorithm needs of whole tensors, such as norms,
comes from collectives inside the replica.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Shards:
    """The processes of this replica, over which the rows of all tensors are divided.

    Blocks of rows are divided as by torch.chunk: ⌈rows/size⌉ each, as far as there are rows.

    Args:
        mesh: The processes, a mesh of one dimension.

    Attributes:
        mesh, device: The processes, and the device of their tensors.
        rank, size: Index of this process among them, and their number.
        bits: Bits that this process has sent to them, counted at the lower bound of an all-reduce
            or all-gather.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device):
        self.mesh, self.device = mesh, device
        self._group = group = mesh.get_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bits = 0

    def rows(self, rows: int) -> range:
        """This process' rows of a matrix."""
        block = -(-rows // self.size)
        return range(min(rows, self.rank * block), min(rows, (self.rank + 1) * block))

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor, replaced by its sum over the shards: the same to the bit in all of them."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """The tensor, replaced by its elementwise maximum over the shards, or by NaN where one of
        them has infinity or NaN (which maxima of collectives may leave out)."""
        self._reduce(tensor.nan_to_num_(nan=torch.inf, posinf=torch.inf), dist.ReduceOp.MAX)
        return tensor.masked_fill_(tensor == torch.inf, torch.nan)

    def _reduce(self, tensor: Tensor, operation: "dist.ReduceOp.RedOpType") -> Tensor:
        if tensor.numel():
            dist.all_reduce(tensor, operation, group=self._group)
            self.bits += (
                2 * (self.size - 1) * 8 * tensor.numel() * tensor.element_size() // self.size
            )
        return tensor

    def all(self, holds: bool) -> bool:
        """True if something holds in all shards."""
        fails = torch.tensor(float(not holds), device=self.device)
        return not self.max_(fails).item()

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all shards, of equal shape: [shard, ...]."""
        found = tensor.new_empty(self.size, *tensor.shape)
        if tensor.numel():
            dist.all_gather(list(found), tensor.contiguous(), self._group)
            self.bits += (self.size - 1) * 8 * tensor.numel() * tensor.element_size()
        return found

    def piece(self, message: Tensor, out: Tensor) -> Tensor:
        """out [..., ⌈length/size⌉] ← this process' piece of a message [..., length]."""
        own = message[..., self.rank * out.shape[-1] :][..., : out.shape[-1]]
        out[..., : own.shape[-1]] = own
        return out

    def message(self, piece: Tensor, length: int) -> Tensor:
        """The message [..., length] of which all shards have pieces."""
        return torch.cat(list(self.gather(piece)), -1)[..., :length]
