"""A GPT whose replicas are sharded by FSDP2, with gossip between the replicas.

The processes are a mesh [replica, shard]. `fully_shard` divides each replica over its shards, and
every 20 steps shard k of a replica exchanges low-rank messages with shard k of its neighbors, in
place of an all-reduce of all gradients (docs/large-models.md).

    torchrun --nproc-per-node 8 examples/fsdp.py replicas=4
    torchrun --nproc-per-node 8 examples/fsdp.py replicas=4 steps=300 folder=checkpoints

The second command saves checkpoints, and resumes from the last one in the folder, also with another
number of processes, if they are still four replicas. Without torchrun it is one replica of one
shard.
"""

import math
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from powergossip.optimizers import GossipOptimizer
from powergossip.tasks.language_models import GPT


def reject(sentence: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


options = {"replicas": "1", "steps": "200", "folder": "", "every": "100"}
for argument in sys.argv[1:]:
    key, _, given = argument.partition("=")
    if argument in ("-h", "--help"):
        print(__doc__, "Options and their defaults:", *(f"{k}={v}" for k, v in options.items()))
        sys.exit()
    if key not in options or (key != "folder" and not (given.isdecimal() and int(given))):
        reject(f"{argument}: use KEY=VALUE with {', '.join(options)}, numbers above 0")
    options[key] = given
replicas, steps, every = (int(options[key]) for key in ("replicas", "steps", "every"))
BATCH, POSITIONS = 8, 128  # sequences of a shard, bytes of a sequence
PEAK, WARM_UP, H = 0.004, 20, 20  # learning rate and its warm-up, steps of a round

torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if "RANK" not in os.environ:  # without torchrun
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group()
if dist.get_world_size() % replicas:
    reject(f"replicas={replicas}: use a divisor of the {dist.get_world_size()} processes")
shape = (replicas, dist.get_world_size() // replicas)
mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))
replica = mesh.get_local_rank("replica")
first = dist.get_rank() == 0

# Every tenth file is for testing.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
train, test = (
    torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in chosen)), dtype=torch.uint8)
    for chosen in ([f for i, f in enumerate(files) if i % 10], files[::10])
)


def loss(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Cross entropy of a byte, in bits."""
    words = text[starts[:, None] + torch.arange(POSITIONS + 1)].long().to(device)
    scores, _ = model(words[:, :-1], {})
    return functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) / math.log(2)


def rate(step: int) -> float:
    """Learning rate, relative to the peak: linear warm-up, then a cosine to 0."""
    progress = min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))
    return step / WARM_UP if step < WARM_UP else (1 + math.cos(math.pi * progress)) / 2


torch.manual_seed(0)
model = GPT((256, 256), hidden_size=64, num_layers=3, num_heads=4).to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
local = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
optimizer = GossipOptimizer(
    local,
    "power-gossip",
    mesh=mesh["replica"],
    rank=8,
    num_iterations=1,
    learning="diloco",
    local_steps=H,
    max_norm=1.0,
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def state() -> dict[str, Any]:
    """The state of this replica, into which a checkpoint is loaded, too."""
    found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return found | {"schedule": schedule.state_dict()}


# A folder of checkpoints for each replica, by the number of steps.
of_all = f"-of-{replicas}"
folder = Path(options["folder"] or "nowhere") / f"replica-{replica}{of_all}"
others = [path for path in folder.parent.glob("replica-*") if not path.name.endswith(of_all)]
if others:
    reject(f"{others[0]} is of another number of replicas than {replicas}: use another folder")
of_replica: dict[str, Any] = {"process_group": mesh["shard"].get_group()}
saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
common: list[int] = [min(saved[-1:] or [0])]  # a replica may have been killed while it saved
dist.all_reduce(least := torch.tensor(common, device=device), dist.ReduceOp.MIN)
start = int(least)
if start:
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder / str(start), **of_replica)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    if first:
        print(f"resumed after step {start}")

for step in range(start, steps):
    torch.manual_seed(steps * dist.get_rank() + step)  # different sequences in each process
    starts = torch.randint(len(train) - POSITIONS, (BATCH,))
    optimizer.zero_grad()
    value = loss(model, train, starts)
    value.backward()
    optimizer.step()
    schedule.step()
    if first and (step + 1) % 50 == 0:
        print(f"step {step + 1}: {value.item():.2f} bits per byte", flush=True)
    if options["folder"] and ((step + 1) % every == 0 or step + 1 == steps):
        dcp.save(state(), checkpoint_id=folder / str(step + 1), **of_replica)

with optimizer.mean_model(), torch.no_grad():
    starts = torch.arange(0, len(test) - POSITIONS, (len(test) - POSITIONS) // 100)
    bits = loss(model, test, starts).item()
sent = torch.tensor([optimizer.bits, optimizer.bits_inside], device=device)
dist.all_reduce(sent, group=mesh["shard"].get_group())
if first:
    print(f"mean model: {bits:.2f} bits per byte")
    print(f"sent by each replica: {sent[0] / 8000:.1f} kB, inside it {sent[1] / 8000:.1f} kB")
dist.destroy_process_group()
