"""A module in the style of Hugging Face: keyword arguments in, an object with a loss out.

Gradients of two batches are accumulated, and parameters are in bfloat16.

Run `mpirun -np 4 python examples/huggingface_module.py`, or alone.
"""

from types import SimpleNamespace

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(128, 10)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.head(self.body(pixels)).float()
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


rank, size = processes().rank, processes().size
images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
data = {"pixels": images.bfloat16() / 16, "labels": digits}
order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
test, train = order[:360], order[360:]
mine = train[rank : len(train) - len(train) % size : size]  # equally many samples for every worker

torch.manual_seed(rank)  # for the batches. Models start from the values of process 0
model = Classifier().bfloat16()
local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = GossipOptimizer(local, "power-gossip", rank=1)

for _ in range(20):
    for batch in mine[torch.randperm(len(mine))].split(32):
        optimizer.zero_grad()
        for part in batch.split(16):
            output = model(**{name: values[part] for name, values in data.items()})
            (output.loss * len(part) / len(batch)).backward()
        optimizer.step()

with optimizer.mean_model():
    accuracy = (model(data["pixels"][test]).logits.argmax(1) == digits[test]).float().mean()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {optimizer.bits / 8000:.1f} kB")
