"""A plain training loop with the usual parts: parameter groups, autocast, a schedule, clipping and
checkpoints. Gossip overlaps with the backward pass.

Run `mpirun -np 4 python examples/plain_loop.py`, or alone.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer

rank, size = processes().rank, processes().size
images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, digits)
test, train = torch.utils.data.random_split(data, [360, 1437], torch.Generator().manual_seed(0))
mine: DistributedSampler[Any] = DistributedSampler(train, num_replicas=size, rank=rank)
loader = DataLoader(train, batch_size=32, sampler=mine, drop_last=True)

model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01}
others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
local = torch.optim.AdamW([decayed, others], lr=0.003)
optimizer = GossipOptimizer(local, "power-gossip", rank=1, overlapping=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, 20 * len(loader))

for epoch in range(20):
    mine.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

with tempfile.TemporaryDirectory() as folder:  # a checkpoint: a file of each process
    file = Path(folder) / f"{rank}.pt"
    parts: tuple[Any, ...] = (model, optimizer, scheduler)
    torch.save([part.state_dict() for part in parts], file)
    for part, state in zip(parts, torch.load(file), strict=True):
        part.load_state_dict(state)

with optimizer.mean_model():
    inputs, labels = test[:]
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {optimizer.bits / 8000:.1f} kB")
