"""Gossip in PyTorch's DistributedDataParallel: a communication hook in place of the mean gradient.

Run `mpirun -np 4 python examples/ddp_hook.py`, or alone.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powergossip.network import processes, torch_group
from powergossip.optimizers import GossipState, gossip_hook

EPOCHS, BATCH_SIZE = 20, 32
rank, size = processes().rank, processes().size

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, train = order[:360], order[360:]
mine = train[rank : len(train) - len(train) % size : size]  # equally many samples for every worker

torch.manual_seed(rank)  # for the batches. DDP starts all models from the values of process 0
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
model.append(nn.Linear(128, 10))
group = torch_group(processes(), torch.device("cpu"))  # or init_process_group's
ddp = DistributedDataParallel(model, process_group=group)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
state = GossipState(optimizer, "power-gossip", rank=1)
ddp.register_comm_hook(state, gossip_hook)

for _ in range(EPOCHS):
    for batch in mine[torch.randperm(len(mine))].split(BATCH_SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images[batch]), labels[batch]).backward()
        optimizer.step()

with state.mean_model():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {state.bits / 8000:.1f} kB")
