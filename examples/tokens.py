"""Your own tokens and model: a small causal transformer on the bytes of text files.

Commands::

    mpirun -np 4 python train.py task=examples.tokens:task task_options.files='docs/*.md'
"""

from glob import glob
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from powergossip.tasks import Datasets

DEFAULTS = {"batch_size": 4, "num_epochs": 5, "learning_rate": 0.1}  # of train.py, for this task


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: tokens [position] and the next tokens [position]."""

    def __init__(self, tokens: Tensor, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[i * self.length : (i + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class CausalTransformer(nn.Module):
    """Tokens [sample, position] → scores of the next token [sample, position, token]."""

    def __init__(self, length: int, width: int = 64, n_layers: int = 2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, n_layers)
        self.scores = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:n]
        return self.scores(self.layers(x, mask=mask, is_causal=True))


def task(files: str, length: int = 32) -> Datasets:
    """The last tenth of the text is for tests. `length` is given to the model as well."""
    text = b"".join(Path(file).read_bytes() for file in sorted(glob(files)))
    tokens = torch.tensor(list(text))
    n_training = len(tokens) * 9 // 10
    return Datasets(
        Windows(tokens[:n_training], length),
        Windows(tokens[n_training:], length),
        model=CausalTransformer,
        model_arguments={"length": length},
        derived=lambda means: {"perplexity": np.exp(means["cross_entropy"])},
    )
