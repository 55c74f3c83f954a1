"""Random data of the shapes of real ones, for `train.py task=tests.harness.gpu_tasks:images`."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from powergossip.tasks import Datasets, Task, TaskOptions
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.language_models import Transformer


def images(options: TaskOptions, samples: int = 4096, size: int = 32) -> Task:
    """Images of random pixels, in 10 classes: by default as large as CIFAR-10's."""
    random = torch.Generator().manual_seed(0)

    def split(count: int) -> LabeledImages:
        shape = (count, 3, size, size)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        return LabeledImages(pixels, torch.arange(count) % 10)

    own = {k: v for k, v in options.task_options.items() if k not in ("samples", "size")}
    options = replace(options, task_options=own)
    return ImageClassification(split(samples), split(40), n_labels=10, options=options)


def text(samples: int = 4096, length: int = 64, words: int = 1000) -> Datasets:
    """Pieces of a random text, for a transformer without dropout."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(words, (samples, length + 1), generator=random)
    pieces = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Datasets(
        TensorDataset(*pieces),
        TensorDataset(*(piece[:16] for piece in pieces)),
        model=transformer,
        model_arguments={"words": words, "length": length},
        forward=_forward,
    )


def transformer(words: int, length: int, width: int = 256, layers: int = 4) -> Transformer:
    """A decoder of 64 units a head: 3.5 million parameters by default."""
    heads = max(1, width // 64)
    return Transformer(
        (words, length), hidden_size=width, num_layers=layers, num_heads=heads, dropout=0.0
    )


def _forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    scores, _ = model(batch[0], {})
    return scores, batch[1]
