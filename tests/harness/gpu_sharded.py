"""A process of torchrun's: sharded replicas on a device, compared with unsharded ones there.

The argument is cuda, over NCCL with a GPU for each process, or cpu, over gloo. Process 0 prints
{method: largest difference} as JSON. The processes are two replicas.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from powergossip.optimizers import GossipOptimizer

METHODS: dict[str, dict[str, Any]] = {
    "power-gossip": {"num_iterations": 2},
    "choco": {"compressor": "top-k", "keep_ratio": 0.2},
    "deepsqueeze": {"compressor": "sign-and-norm"},
}
ROUNDS: dict[str, Any] = {"learning": "diloco", "local_steps": 2}


def trained(method: str, mesh: torch.distributed.DeviceMesh, sharded: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5)).to(mesh.device_type)
    if sharded:
        fully_shard(model, mesh=mesh["shard"])
    between = mesh["replica"]
    among: dict[str, Any] = {"mesh": between} if sharded else {"process_group": between.get_group()}
    local = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = GossipOptimizer(local, method, **METHODS[method], **ROUNDS, **among)
    random = torch.Generator().manual_seed(between.get_local_rank())
    for _ in range(4):
        inputs, targets = (torch.randn(8, n, generator=random) for n in (9, 5))
        optimizer.zero_grad()
        found = model(inputs.to(mesh.device_type))
        nn.functional.mse_loss(found, targets.to(mesh.device_type)).backward()
        optimizer.step()
    tensors = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def main(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))
    worst = {
        method: float((trained(method, mesh, True) - trained(method, mesh, False)).abs().max())
        for method in METHODS
    }
    if dist.get_rank() == 0:
        print(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
