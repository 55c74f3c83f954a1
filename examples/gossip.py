"""PowerGossip on a ring. Each worker trains on its part of the digits and sends 3 kB to each of its
two neighbors per step.

Run it under `mpirun -np 4 python` or `torchrun --nproc-per-node 4`, or alone.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer

EPOCHS, BATCH_SIZE = 20, 32
workers = processes()
rank, size = workers.rank, workers.size

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, train = order[:360], order[360:]
mine = train[rank : len(train) - len(train) % size : size]  # equally many samples for every worker

torch.manual_seed(rank)  # for the batches. Models start from the values of process 0
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
model.append(nn.Linear(128, 10))
local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = GossipOptimizer(local, "power-gossip", rank=1)  # the only line that differs
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

for _ in range(EPOCHS):
    for batch in mine[torch.randperm(len(mine))].split(BATCH_SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    scheduler.step()

optimizer.merge()  # all workers have the mean model
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {optimizer.bits / 8000:.1f} kB")
