"""Where data come from: files in the real formats, where they are looked for."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks import fashion_mnist, idx
from tests.harness.small_data import (
    idx_bytes,
    make_fashion_mnist,
    options,
    write_fashion_mnist,
)

# IDX files, written here byte by byte.


def test_idx_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    array = generator(0, "test").integers(0, 256, (3, 4, 5)).astype(np.uint8)
    path = tmp_path / "array"
    path.write_bytes(idx_bytes(array))
    assert np.array_equal(idx.read(path, rank=3), array)
    path.write_bytes(gzip.compress(idx_bytes(array)))
    assert np.array_equal(idx.read(path, rank=3), array)
    assert idx.encoded(torch.from_numpy(array)) == idx_bytes(array)


ARRAY = np.zeros((3, 4, 5))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not an IDX file"),
        (idx_bytes(ARRAY)[:-1], "is damaged: 75 bytes, .* 3 × 4 × 5 bytes"),
        (idx_bytes(ARRAY, (0, 0, 9, 3)), "starts with 00000903 instead of 00000803"),
        (idx_bytes(np.zeros((50, 5))), "starts with 00000802"),
        (idx_bytes(np.zeros((0, 4, 5))), "is damaged: 16 bytes"),
        (gzip.compress(idx_bytes(ARRAY))[:-12], "damaged or truncated"),
        (gzip.compress(idx_bytes(ARRAY))[:10] + b"\xff" * 20, "damaged or truncated"),
        (gzip.compress(idx_bytes(ARRAY))[:-8] + bytes(8), "damaged or truncated: .*CRC"),
    ],
    ids=lambda value: value.strip(" :") if isinstance(value, str) else "",
)
def test_damaged_idx_files_are_rejected_by_name(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"t10k-images-idx3-ubyte .*{found}"):
        idx.read(path, rank=3)


# FashionMNIST.


def find_fashion_mnist(data_dir: Path | None = None) -> Path:
    """The folder that its files are found in."""
    return fashion_mnist.find(options(task="FashionMNIST", data_dir=data_dir))[0].parent


@pytest.mark.parametrize(("subfolder", "compress"), [("", False), ("FashionMNIST", True)])
def test_data_dir_is_read(tmp_path: Path, compress: bool, subfolder: str) -> None:
    write_fashion_mnist(tmp_path / subfolder, compress)
    task = make_fashion_mnist(data_dir=str(tmp_path))
    images, labels = task.batch(0, 0, 0)
    assert images.shape == (8, 1, 28, 28)
    assert labels.dtype == torch.int64
    assert task.evaluate(task.model("CNN", 1))["count"] == 20


@pytest.mark.parametrize(
    ("kind", "array", "words"),
    [
        ("labels-idx1", np.arange(49) % 10, r"50 images, .* 49 labels"),
        ("labels-idx1", np.arange(50) % 11, "holds label 10: use 0 to 9"),
        (
            "images-idx3",
            np.zeros((50, 27, 28)),
            r"differ in size: \[27, 28\] and \[28, 28\] pixels",
        ),
    ],
    ids=["number", "label", "size"],
)
def test_files_that_do_not_match_are_rejected(
    kind: str, array: np.ndarray, words: str, tmp_path: Path
) -> None:
    write_fashion_mnist(tmp_path)
    (tmp_path / f"train-{kind}-ubyte").write_bytes(idx_bytes(array))
    with pytest.raises(ValueError, match=words):
        make_fashion_mnist(data_dir=tmp_path)


@pytest.mark.long
def test_the_real_fashion_mnist_is_complete() -> None:
    try:
        paths = fashion_mnist.find(options(task="FashionMNIST"))
    except ValueError as error:
        if "are in none of" not in str(error):  # damaged files are a failure
            raise
        pytest.skip(str(error))
    train, test = fashion_mnist.load(*paths[:2]), fashion_mnist.load(*paths[2:])
    assert train.images.shape == (60_000, 1, 28, 28)
    assert torch.equal(torch.bincount(train.labels), torch.full((10,), 6000))
    assert torch.equal(torch.bincount(test.labels), torch.full((10,), 1000))
    # The mean and deviation of a pixel as they are commonly given, in units of 255.
    pixels = train.images[:10_000].double() / 255
    assert pixels.mean().item() == pytest.approx(0.286, abs=0.003)
    assert pixels.std().item() == pytest.approx(0.353, abs=0.003)


# The places of data.


def test_places_are_searched_in_order(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="are in none of"):
        find_fashion_mnist()
    monkeypatch.setenv("DATA", str(tmp_path / "environment"))
    for place in (
        nowhere / "FashionMNIST",
        tmp_path / "debian",
        tmp_path / "environment" / "FashionMNIST",
        tmp_path / "environment",
    ):
        write_fashion_mnist(place)
        assert find_fashion_mnist() == place
    write_fashion_mnist(tmp_path / "given")
    assert find_fashion_mnist(tmp_path / "given") == tmp_path / "given"


def test_a_given_folder_without_the_files_is_an_error(nowhere: Path, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "debian")
    given = tmp_path / "given"
    for place in (given, given / "FashionMNIST"):
        write_fashion_mnist(place)
        (place / "t10k-labels-idx1-ubyte").unlink()
        with pytest.raises(ValueError, match=r"given: use .* t10k-labels-idx1-ubyte \(or the same"):
            make_fashion_mnist(data_dir=given)
        shutil.rmtree(place)
    given.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"given: use .*train-images-.*, t10k-labels-idx1-ubyte"):
        make_fashion_mnist(data_dir=given)


def test_the_message_has_the_searched_places_and_the_remedies(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError,
        match=r"FashionMNIST are in none of \$DATA .*debian, .*cache.*: .*package "
        r"dataset-fashion-mnist, .*data_dir .*train-images-.*\(or the same with .gz\), or .*"
        r"download=true$",
    ):
        make_fashion_mnist()
    write_fashion_mnist(nowhere / "FashionMNIST")
    (nowhere / "FashionMNIST" / "train-labels-idx1-ubyte").unlink()
    monkeypatch.setenv("DATA", str(tmp_path / "environment"))
    with pytest.raises(
        ValueError,
        match=r"none of .*environment, .*environment/FashionMNIST, .*debian, "
        r".*cache.*/FashionMNIST \(lacks train-labels-idx1-ubyte \(or",
    ):
        make_fashion_mnist()


@pytest.mark.parametrize(
    ("name", "dataset", "wanted"),
    [
        ("Cifar", "", "the folder cifar-10-batches-py"),
        ("Cifar100", "", "the folder cifar-100-python"),
        ("LSTM", "wikitext2", "the folder wikitext-2"),
    ],
)
def test_messages_offer_what_the_task_can_read(
    nowhere: Path, name: str, dataset: str, wanted: str
) -> None:
    message = rf"{name} are in none of \$DATA .*cache.*/{name}.*: .*data_dir to a folder with "
    arguments: dict[str, Any] = {"n_workers": 1, "batch_size": 1, "seed": 1, "download": False}
    with pytest.raises(ValueError, match=message + rf"{wanted}.*, or .*download=true$"):
        tasks.make(name, **arguments, task_options={"dataset": dataset} if dataset else {})
