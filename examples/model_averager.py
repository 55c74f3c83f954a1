"""Gossip as PyTorch's model averager: four local steps, then one of PowerGossip.

Saves and restores its state as a run that is resumed does. Run
`mpirun -np 4 python examples/model_averager.py`, or alone.
"""

import io
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

from powergossip.network import processes
from powergossip.optimizers import GossipModelAverager

EPOCHS, BATCH_SIZE = 20, 32
rank, size = processes().rank, processes().size

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, train = order[:360], order[360:]
mine = train[rank : len(train) - len(train) % size : size]  # equally many samples for every worker

torch.manual_seed(0)  # all workers start from the same model
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
model.append(nn.Linear(128, 10))
local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
averager = GossipModelAverager("power-gossip", rank=1, period=4)
optimizer = PostLocalSGDOptimizer(local, averager)
parts: tuple[Any, ...] = (model, optimizer, averager)
checkpoint = io.BytesIO()  # a file of each process, in a real run

for epoch in range(EPOCHS):
    batches = torch.Generator().manual_seed(epoch * size + rank)
    for batch in mine[torch.randperm(len(mine), generator=batches)].split(BATCH_SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    if epoch == EPOCHS // 2:  # torch's optimizer saves no more of its averager than the step
        torch.save([part.state_dict() for part in parts], checkpoint)
        checkpoint.seek(0)
        for part, state in zip(parts, torch.load(checkpoint), strict=True):
            part.load_state_dict(state)

with averager.mean_model():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {averager.bits / 8000:.1f} kB")
