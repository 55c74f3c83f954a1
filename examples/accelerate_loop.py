"""A loop with Hugging Face's accelerate. `prepare` does not get the model, which it would wrap in
DistributedDataParallel, so that all gradients would be averaged.

Run `torchrun --nproc-per-node 4 examples/accelerate_loop.py`, or alone.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from powergossip.optimizers import GossipOptimizer

accelerator = Accelerator(cpu=not torch.cuda.is_available())
images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, digits)
test, train = torch.utils.data.random_split(data, [360, 1437], torch.Generator().manual_seed(0))
loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(accelerator.device)
local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gossip = GossipOptimizer(local, "power-gossip", rank=1)
optimizer, loader = accelerator.prepare(gossip, loader)  # each process has its part of the data

for _ in range(20):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()

with gossip.mean_model():
    inputs, labels = (values.to(accelerator.device) for values in test[:])
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
accelerator.print(f"accuracy of the mean model: {accuracy:.1%}")
accelerator.print(f"sent by each worker: {gossip.bits / 8000:.1f} kB")
