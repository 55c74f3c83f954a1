"""Lightning's Trainer, with one device in each process: gossip is in the module's optimizer.

Run it under `mpirun -np 4 python` or `torchrun --nproc-per-node 4`, or alone.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer

rank, size = processes().rank, processes().size


class LitClassifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        local = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return GossipOptimizer(local, "power-gossip", rank=1)


images, digits = map(torch.from_numpy, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, digits)
test, train = torch.utils.data.random_split(data, [360, 1437], torch.Generator().manual_seed(0))
mine: DistributedSampler[int] = DistributedSampler(train, num_replicas=size, rank=rank)
loader = DataLoader(train, batch_size=32, sampler=mine, drop_last=True)

model = LitClassifier()
trainer = lightning.Trainer(
    max_epochs=20,
    devices=1,  # of this process
    strategy="auto",  # none of Lightning's, which would average gradients
    use_distributed_sampler=False,
    logger=False,  # every process would write
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)

(gossip,) = trainer.optimizers
with gossip.mean_model():
    inputs, labels = test[:]
    accuracy = (model.layers(inputs).argmax(1) == labels).float().mean().item()
if rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {gossip.bits / 8000:.1f} kB")
