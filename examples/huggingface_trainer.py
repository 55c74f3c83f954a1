"""Hugging Face's Trainer, which wraps the model in DistributedDataParallel: gossip is its hook.

Run `torchrun --nproc-per-node 4 examples/huggingface_trainer.py`, or alone.
"""

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from powergossip.optimizers import GossipState, gossip_hook


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(pixels).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Gossip(TrainerCallback):
    """Gossip in place of DDP's mean gradient."""

    trainer: Trainer
    state: GossipState

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        local = self.trainer.optimizer.optimizer  # torch's, inside accelerate's
        self.state = GossipState(local, "power-gossip", rank=1)
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):  # several processes
            self.trainer.model_wrapped.register_comm_hook(self.state, gossip_hook)


pixels, digits = map(torch.from_numpy, load_digits(return_X_y=True))
rows = [{"pixels": p.float() / 16, "labels": d} for p, d in zip(pixels, digits, strict=True)]
order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
test, train = [rows[i] for i in order[:360]], [rows[i] for i in order[360:]]

model, gossip = Classifier(), Gossip()
with tempfile.TemporaryDirectory() as folder:
    gossip.trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            num_train_epochs=20,
            per_device_train_batch_size=32,
            dataloader_drop_last=True,
            learning_rate=0.1,
            optim="sgd",
            optim_args="momentum=0.9",
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,  # running statistics stay each worker's own
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=train,
        callbacks=[gossip],
    )
    gossip.trainer.train()

with gossip.state.mean_model():
    batch = {name: torch.stack([row[name] for row in test]) for name in ("pixels", "labels")}
    logits = model.cpu()(**batch)["logits"]
    accuracy = (logits.argmax(1) == batch["labels"]).float().mean().item()
if gossip.trainer.is_world_process_zero():
    print(f"accuracy of the mean model: {accuracy:.1%}")
    print(f"sent by each worker: {gossip.state.bits / 8000:.1f} kB")
