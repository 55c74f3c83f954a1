"""Sharded replicas with gossip between them, beside PyTorch's HSDP and FSDP2.

    python -m benchmarks.replicas                        memory, CPU time and bytes of each method
    python -m benchmarks.replicas --rate 100mbit         seconds a step on emulated links (as root)

Eight processes are four replicas of two shards. Each row is a separate run. `FSDP2` has no
communication between replicas, and `HSDP` PyTorch's all-reduce of gradients. With --rate, the two
processes of a replica are on one emulated host.

Options: --parameters 1e8, --steps 6, --rows "PowerGossip" (those whose name contains this).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPLICAS, SHARDS = 4, 2
TOKENS = 32  # of a shard in a step
ROWS: dict[str, dict[str, Any] | None] = {
    "FSDP2": None,
    "HSDP": None,
    "D-PSGD": {"method": "dpsgd"},
    "CHOCO, sign": {"method": "choco", "compressor": "sign-and-norm"},
    "DeepSqueeze, sign": {"method": "deepsqueeze", "compressor": "sign-and-norm"},
    "CHOCO, QSGD": {"method": "choco", "compressor": "qsgd"},
    "CHOCO, top 1 %": {"method": "choco", "compressor": "top-k", "keep_ratio": 0.01},
    "PowerGossip, rank 1": {"method": "power-gossip"},
    "PowerGossip, rank 4": {"method": "power-gossip", "rank": 4},
    "PowerGossip, rank 1, per shard": {"method": "power-gossip", "per_shard": True},
    "diloco, PowerGossip, 8 iterations, rounds of 3": {
        "method": "power-gossip",
        "num_iterations": 8,
        "learning": "diloco",
        "local_steps": 3,
    },
}


def measure(row: str, parameters: float, steps: int) -> dict[str, float]:
    """Run in each process. The values of process 0, and sums over its replica."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    from benchmarks.timing import peak_memory
    from powergossip.optimizers import GossipOptimizer
    from powergossip.tasks.language_models import GPT

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))
    over = mesh if row == "HSDP" else mesh["shard"]
    width = (
        64 * round((parameters / (12 * 12)) ** 0.5 / 64) or 64
    )  # 12 width² in a block, 12 blocks
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT((256, 256), hidden_size=width, num_layers=12, num_heads=width // 64)
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = dict(ROWS[row] or {})
    if given:
        optimizer = GossipOptimizer(optimizer, given.pop("method"), mesh=mesh["replica"], **given)
    seconds, cpu, bits = [], [], 0
    torch.manual_seed(dist.get_rank())
    for step in range(steps + 1):
        if step == 1:
            bits = getattr(optimizer, "bits", 0)
        dist.barrier()
        began = time.perf_counter()
        words = torch.randint(256, (1, TOKENS + 1))
        optimizer.zero_grad()
        scores, _ = model(words[:, :-1], {})
        functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()).backward()
        before = time.process_time()
        optimizer.step()
        cpu.append(time.process_time() - before)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    count = sum(p.numel() for p in model.parameters())
    sent = torch.tensor([getattr(optimizer, "bits", 0) - bits], dtype=torch.float64)
    dist.all_reduce(sent, group=mesh["shard"].get_group())
    if row == "HSDP":
        sent[:] = steps * 2 * (REPLICAS - 1) / REPLICAS * 32 * count
    peak = torch.tensor(float(peak_memory()))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.barrier()
    return {
        "parameters": count,
        "seconds": statistics.mean(seconds[1:]),  # of whole rounds
        "cpu": statistics.mean(cpu[1:]),
        "bits": float(sent) / steps,
        "peak": float(peak),
    }


def run(row: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.replicas", "--worker", row]
    command += ["--parameters", str(options.parameters), "--steps", str(options.steps)]
    if options.rate:
        emulator = [sys.executable, "environment/emulated_cluster.py", "--hosts", str(REPLICAS)]
        launch = [*emulator, "--rate", options.rate, "--launcher", f"torchrun:{SHARDS}", "--"]
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        launch += ["--nproc-per-node", str(REPLICAS * SHARDS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # freed memory is given back at once
    if options.rate:  # gloo would look for the name of this machine, which all hosts have
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    ended = subprocess.run(
        [*launch, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(ended.stderr)
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rate")
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", default="")
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        found = measure(options.worker, options.parameters, options.steps)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    alone: dict[str, float] = {}
    print(f"{'':48} {'s a step':>9} {'CPU s of step()':>16} {'MB a step':>10} {'peak':>18}")
    for row in (row for row in ROWS if options.rows in row or row == "FSDP2"):
        found = run(row, options)
        alone = alone or found
        more = (found["peak"] - alone["peak"]) / (4 * found["parameters"] / SHARDS)
        print(
            f"{row:48} {found['seconds']:9.2f} {found['cpu']:16.2f} {found['bits'] / 8e6:10.2f} "
            f"{found['peak'] / alone['peak']:8.2f} × {more:+6.2f} D",
            flush=True,
        )
    print(
        "peak: largest memory of a process over that of FSDP2; D: float32 of a shard's parameters"
    )


if __name__ == "__main__":
    main()
