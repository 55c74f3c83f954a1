"""Laws of CIFAR-10 and CIFAR-100: what their files say, in every form in which they come.

The files here are written byte by byte as the official ones are, with few images.
"""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks import augmentation, cifar
from powergossip.tasks.images import ImageClassification, LabeledImages
from tests.harness.small_data import options

FOLDERS = {"Cifar": "cifar-10-batches-py", "Cifar100": "cifar-100-python"}
FILES = {
    "Cifar": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
    "Cifar100": ["train", "test"],
}
N_IMAGES = {"Cifar": [8, 9, 10, 11, 12, 7], "Cifar100": [50, 7]}  # in each file
N_LABELS = {"Cifar": 10, "Cifar100": 100}

Contents = list[tuple[np.ndarray, list[int]]]  # of each file: uint8 [image, 3072], labels


def contents(name: str) -> Contents:
    random = generator(0, "test")
    return [
        (
            random.integers(0, 256, (count, 3072)).astype(np.uint8),
            random.integers(0, N_LABELS[name], count).tolist(),
        )
        for count in N_IMAGES[name]
    ]


def python_2_pickle(batch: dict[bytes, Any]) -> bytes:
    """A file like the official ones, which Python 2 and numpy 1 wrote: names are strings of bytes,
    and the array is made by numpy.core.multiarray._reconstruct."""

    def encode(value: Any) -> bytes:
        if isinstance(value, bytes):
            return b"U" + bytes([len(value)]) + value
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(map(encode, value)) + b"e"
        rows, columns = value.shape
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R("
            + b"K\x01"
            + encode(rows)
            + encode(columns)
            + b"\x86cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNN"
            + encode(-1) * 2
            + b"K\0tb\x89T"
            + struct.pack("<I", value.size)
            + value.tobytes()
            + b"tb"
        )

    items = b"".join(encode(key) + encode(value) for key, value in batch.items())
    return b"\x80\x02}(" + items + b"u."


def python_file(name: str, images: np.ndarray, labels: list[int]) -> bytes:
    if name == "Cifar":
        return python_2_pickle({b"batch_label": b"a", b"labels": labels, b"data": images})
    coarse = [label // 5 for label in labels]
    return python_2_pickle({b"data": images, b"coarse_labels": coarse, b"fine_labels": labels})


def write_files(place: Path, name: str) -> Path:
    """The files in a place; returns their folder."""
    folder = place / FOLDERS[name]
    folder.mkdir(parents=True)
    for file, content in zip(FILES[name], contents(name), strict=True):
        (folder / file).write_bytes(python_file(name, *content))
    return folder


def load(name: str, folder: Path) -> tuple[LabeledImages, LabeledImages]:
    format_ = {"Cifar": cifar.CIFAR10, "Cifar100": cifar.CIFAR100}[name]
    return format_.load(options(task=name, data_dir=folder))


# What files say.


@pytest.mark.parametrize("name", FOLDERS)
def test_images_and_labels_are_those_of_the_files(tmp_path: Path, name: str) -> None:
    """In data_dir, in a folder in it that is named as the task, or in the unpacked folder. Training
    batches are cropped and flipped."""
    place = write_files(tmp_path / "one", name)
    write_files(tmp_path / "other" / name, name)
    *batches, expected_test = contents(name)
    for folder in (place.parent, tmp_path / "other", place):
        train, test = load(name, folder)
        pixels = np.concatenate([data for data, _ in batches])
        assert np.array_equal(train.images.flatten(1), pixels)
        assert train.labels.tolist() == [label for _, labels in batches for label in labels]
        assert np.array_equal(test.images.flatten(1), expected_test[0])
        assert test.labels.tolist() == expected_test[1]
        assert train.images.shape[1:] == (3, 32, 32)
        assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
    task = tasks.make(name, n_workers=2, batch_size=8, seed=1, data_dir=place)
    assert isinstance(task, ImageClassification)
    assert task.augment is augmentation.crop_and_flip


def test_pickles_of_python_3_are_read_too(tmp_path: Path) -> None:
    folder = write_files(tmp_path, "Cifar")
    images, labels = contents("Cifar")[0]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps({b"data": images, b"labels": labels}, protocol)
        (folder / "test_batch").write_bytes(content)
        assert np.array_equal(load("Cifar", tmp_path)[1].images.flatten(1), images)


def test_pixels_are_red_green_and_blue_row_after_row(tmp_path: Path) -> None:
    folder = write_files(tmp_path, "Cifar")
    image = np.zeros((3, 32, 32), dtype=np.uint8)
    image[1, 2, 30] = 255
    (folder / "test_batch").write_bytes(
        pickle.dumps({b"data": image.reshape(1, -1), b"labels": [7]})
    )
    _, test = load("Cifar", tmp_path)
    assert test.images.nonzero().tolist() == [[0, 1, 2, 30]]
    assert test.labels.tolist() == [7]


# Files that are something else.


class Command:
    """An object that makes pickle run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "named", ["cposix\nmkdir\n(V{}\ntR.", "cbuiltins\neval\n(V__import__('os').mkdir('{}')\ntR."]
)
def test_data_files_cannot_run_code(tmp_path: Path, named: str) -> None:
    folder = write_files(tmp_path, "Cifar")
    made = tmp_path / "made"
    for content in (named.format(made).encode(), pickle.dumps({b"data": Command(made)})):
        (folder / "data_batch_2").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"data_batch_2 is damaged.*UnpicklingError.* (posix|builtins)"
        ):
            load("Cifar", tmp_path)
        assert not made.exists()
    pickle.loads(content)
    assert made.exists(), "it was code"


IMAGES = np.zeros((3, 3072), dtype=np.uint8)
GOOD = {b"data": IMAGES, b"labels": [1, 2, 3]}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is damaged, or no file of cifar-10: EOFError"),
        (pickle.dumps(GOOD)[:1000], "is damaged"),
        (b"<html>Not Found</html>", "is damaged"),
        (pickle.dumps([1, 2]), "is damaged"),
        (pickle.dumps({b"data": IMAGES}), "is damaged.*labels"),
        (pickle.dumps(GOOD | {b"data": [1, 2]}), "is damaged"),
        (pickle.dumps(GOOD | {b"data": IMAGES.astype(float)}), "is damaged.*float64"),
        (pickle.dumps(GOOD | {b"data": IMAGES[:, 1:]}), r"is damaged.*3, 3071"),
        (pickle.dumps(GOOD | {b"labels": [1, 2.5, 3]}), "is damaged.*labels of torch.float"),
        (pickle.dumps(GOOD | {b"labels": [1, 2]}), "is damaged.*2 labels"),
        (pickle.dumps(GOOD | {b"labels": [1, 10, 3]}), "is damaged.*labels 0 to 9"),
        (pickle.dumps(GOOD | {b"labels": [1, -1, 3]}), "is damaged.*labels 0 to 9"),
        (pickle.dumps({b"data": IMAGES[:0], b"labels": []}), "is damaged.*0 labels"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_damaged_python_files_are_rejected_by_name(
    tmp_path: Path, content: bytes, found: str
) -> None:
    folder = write_files(tmp_path, "Cifar")
    (folder / "data_batch_4").write_bytes(content)
    with pytest.raises(ValueError, match=f"batches-py/data_batch_4:? {found}"):
        load("Cifar", tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_files(tmp_path, "Cifar")
    (folder / "data_batch_3").unlink()
    with pytest.raises(ValueError, match=r"^data_dir=.*: use .* cifar-10-batches-py/data_batch_3$"):
        load("Cifar", tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^data_dir=.*: use .*the folder cifar-100-python$",
    ):
        load("Cifar100", tmp_path)
