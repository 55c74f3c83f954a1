"""A small GPT on the sources of Python's standard library, trained in rounds of local steps.

Three lines make the loop decentralized: the import, the optimizer around AdamW, and the merge.
Every 30 steps, neighbors on a ring exchange low-rank parts of the difference of their models, and
an outer optimizer moves them (DiLoCo, docs/language-models.md).

Run `mpirun -np 4 python examples/gpt.py`, the same with torchrun --nproc-per-node 4, or alone.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from powergossip.network import processes
from powergossip.optimizers import GossipOptimizer
from powergossip.tasks.language_models import GPT

STEPS, WARM_UP, H = 240, 24, 30
BATCH, POSITIONS = 8, 128  # sequences of a worker, bytes of a sequence
PEAK = 0.004  # learning rate

torch.set_num_threads(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
who = processes()

# Every tenth file is for testing.
folder = Path(sysconfig.get_path("stdlib"))
texts = [file.read_bytes() for file in sorted(folder.glob("*.py"))]
test = torch.frombuffer(bytearray(b"".join(texts[::10])), dtype=torch.uint8)
train = torch.frombuffer(
    bytearray(b"".join(text for i, text in enumerate(texts) if i % 10)), dtype=torch.uint8
)


def sequences(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [sequence, position], and the bytes that follow them."""
    places = starts[:, None] + torch.arange(POSITIONS + 1)
    chosen = text[places].long().to(device)
    return chosen[:, :-1], chosen[:, 1:]


def loss(model: GPT, words: Tensor, following: Tensor) -> Tensor:
    """Cross entropy of a byte, in nats."""
    scores, _ = model(words, {})
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def rate(step: int) -> float:
    """Learning rate, relative to the peak: linear warm-up, then a cosine to 0."""
    progress = (step - WARM_UP) / (STEPS - WARM_UP)
    return step / WARM_UP if step < WARM_UP else (1 + math.cos(math.pi * progress)) / 2


torch.manual_seed(0)
model = GPT((256, 256), hidden_size=64, num_layers=3, num_heads=4).to(device)
local = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
optimizer = GossipOptimizer(
    local,
    "power-gossip",
    rank=8,
    num_iterations=1,
    learning="diloco",
    local_steps=H,
    max_norm=1.0,
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

random = torch.Generator().manual_seed(who.rank)  # each worker has its own sequences
for step in range(STEPS):
    starts = torch.randint(len(train) - POSITIONS, (BATCH,), generator=random)
    optimizer.zero_grad()
    value = loss(model, *sequences(train, starts))
    value.backward()
    optimizer.step()
    schedule.step()
    if who.rank == 0 and (step + 1) % 60 == 0:
        print(f"step {step + 1}: {value.item() / math.log(2):.2f} bits per byte", flush=True)

optimizer.merge()  # all workers have the mean model
with torch.no_grad():
    starts = torch.arange(0, len(test) - POSITIONS, (len(test) - POSITIONS) // 200)
    words, following = sequences(test, starts)
    scores, _ = model(words, {})
    accuracy = (scores.argmax(2) == following).float().mean().item()
    bits = loss(model, words, following).item() / math.log(2)
    text = list(b"def ")
    for _ in range(200 if who.rank == 0 else 0):
        scores, _ = model(torch.tensor([text[-POSITIONS:]], device=device), {})
        chances = functional.softmax(scores[0, -1].cpu() / 0.8, 0)
        text.append(int(torch.multinomial(chances, 1, generator=random)))

if who.rank == 0:
    print(f"accuracy of the mean model: {accuracy:.1%}, {bits:.2f} bits per byte")
    print(f"sent by each worker: {optimizer.bits / 8000:.1f} kB")
    print(bytes(text).decode(errors="replace"))
