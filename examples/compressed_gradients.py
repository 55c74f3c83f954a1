"""PowerSGD: all workers apply the same mean gradient, compressed to low rank.

Run it under `mpirun -np 4 python` or `torchrun --nproc-per-node 4`, or alone.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from powergossip.network import processes
from powergossip.optimizers import Config, PowerSGD, optimizer_step

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
powersgd = PowerSGD(
    model.named_parameters(),
    Config(rank=2, num_iters_per_step=2, start_compressing_after_num_steps=0),
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

for _ in range(EPOCHS):
    for batch in mine[torch.randperm(len(mine))].split(BATCH_SIZE):
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer_step(optimizer, powersgd)  # in place of optimizer.step() and zero_grad()
    scheduler.step()

accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
if rank == 0:
    print(f"accuracy: {accuracy:.1%}")
    print(f"sent by each worker: {powersgd.bits / 8000:.1f} kB")
