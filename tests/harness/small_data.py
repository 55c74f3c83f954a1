"""Files in the real formats, with few data, and what a task is told of a run."""

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks.task import TaskOptions


def options(**changes: Any) -> TaskOptions:
    defaults: dict[str, Any] = {"task": "", "n_workers": 4, "batch_size": 8, "seed": 1}
    return TaskOptions(**(defaults | {"download": False} | changes))


def idx_bytes(array: np.ndarray, magic: tuple[int, ...] | None = None) -> bytes:
    header = bytes(magic or (0, 0, 8, array.ndim))
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def write_fashion_mnist(
    folder: Path, compress: bool = False, n_train: int = 50, side: int = 28
) -> None:
    """Its four files with few random images."""
    folder.mkdir(parents=True, exist_ok=True)
    random = generator(0, "test")
    for prefix, count in (("train", n_train), ("t10k", 20)):
        for kind, array in (
            ("images-idx3", random.integers(0, 256, (count, side, side))),
            ("labels-idx1", np.arange(count) % 10),
        ):
            content = idx_bytes(array)
            if compress:
                (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{prefix}-{kind}-ubyte").write_bytes(content)


def write_cifar(folder: Path, n_labels: int, n_train: int = 10) -> None:
    """The files with few random images, so many in each to train."""
    names = {10: [f"data_batch_{i}" for i in range(1, 6)], 100: ["train"]}[n_labels]
    place = folder / {10: "cifar-10-batches-py", 100: "cifar-100-python"}[n_labels]
    place.mkdir(parents=True, exist_ok=True)
    random = generator(0, "test")
    for name, count in (*((name, n_train) for name in names), ("test", 20)):
        name = "test_batch" if (name, n_labels) == ("test", 10) else name
        images = random.integers(0, 256, (count, 3072)).astype(np.uint8)
        key = b"labels" if n_labels == 10 else b"fine_labels"
        batch = {b"data": images, key: [i % n_labels for i in range(count)]}
        (place / name).write_bytes(pickle.dumps(batch))


def write_imagenet(folder: Path, n_labels: int = 7, n_train: int = 7, noise: bool = False) -> None:
    """Folders with few JPEGs of several sizes, so many to train.

    Each has one random color, or random pixels.
    """
    random = generator(0, "test")
    for split, count in (("train", n_train), ("val", 2)):
        for label in range(n_labels):
            place = folder / split / f"n{label:03}"
            place.mkdir(parents=True)
            for i in range(count):
                columns, rows = 20 + 8 * i, 40 + label
                pixels = random.integers(0, 256, (rows, columns, 3) if noise else (1, 1, 3))
                image = Image.fromarray(pixels.astype(np.uint8)).resize((columns, rows))
                image.save(place / f"{label}_{i}.JPEG")


def write_documents(folder: Path, n_documents: int = 6) -> None:
    """Texts of a few hundred bytes: in the topics a, b and c, and directly in the folder.

    A text has the letters of its topic, blanks and line ends.
    """
    random = generator(0, "test")
    for topic, letters in {"a": "abc", "b": "def", "c": "éß語", "": "xyz"}.items():
        (folder / topic).mkdir(parents=True, exist_ok=True)
        for i in range(n_documents):
            characters = random.choice([*letters, " ", "\n"], 200 + 40 * i)
            (folder / topic / f"{i}.txt").write_text("".join(characters))


def make_fashion_mnist(**changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 2, "batch_size": 8, "seed": 1, "download": False}
    return tasks.make("FashionMNIST", **(arguments | changes))
