"""Data fetched from the hub, here a stand-in: complete, and kept whole or not at all."""

import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from powergossip.randomness import generator
from powergossip.tasks import cifar, data_files, fashion_mnist, texts
from tests.harness.small_data import make_fashion_mnist, options


def image_rows(column: str, label: str, shape: tuple[int, ...], count: int) -> list[dict[str, Any]]:
    random = generator(count, "test")
    return [
        {
            column: random.integers(0, 256, shape).astype(np.uint8),
            label: int(random.integers(0, 10)),
        }
        for _ in range(count)
    ]


Rows = list[dict[str, Any]]


def images(column: str, label: str, shape: tuple[int, ...]) -> dict[str, Rows]:
    return {split: image_rows(column, label, shape, n) for split, n in (("train", 13), ("test", 7))}


WIKI = {
    "train": [{"text": ""}, {"text": " = Title = \n"}, {"text": " A <unk> , é . \n"}],
    "validation": [{"text": " B \n"}],
    "test": [{"text": ""}, {"text": " A title . \n"}],
}
# (task, its dataset) → a name, its arguments, and the answer of the hub
HUB: dict[tuple[str, str], tuple[str, dict[str, str], dict[str, Rows]]] = {
    ("FashionMNIST", ""): (
        "zalando-datasets/fashion_mnist",
        {},
        images("image", "label", (28, 28)),
    ),
    ("Cifar", ""): ("uoft-cs/cifar10", {}, images("img", "label", (32, 32, 3))),
    ("Cifar100", ""): ("uoft-cs/cifar100", {}, images("img", "fine_label", (32, 32, 3))),
    ("LSTM", "wikitext2"): ("Salesforce/wikitext", {"name": "wikitext-2-v1"}, WIKI),
}


@pytest.fixture
def hub(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """A hub in reach that has little data; what is asked of it."""
    asked: list[tuple[str, dict[str, str]]] = []

    def load_dataset(path: str, **arguments: str) -> Any:
        asked.append((path, arguments))
        return next(answer for known, _, answer in HUB.values() if known == path)

    stand_in = types.ModuleType("datasets")
    stand_in.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.setattr(data_files, "out_of_reach", lambda name: None)
    return asked


def fetched(task: str, dataset: str, download: bool = True) -> Any:
    """The data as the task loads them."""
    chosen = options(task=task, download=download)
    if task == "FashionMNIST":
        paths = fashion_mnist.find(chosen)
        return fashion_mnist.load(*paths[:2]), fashion_mnist.load(*paths[2:])
    if task == "LSTM":
        splits = texts.TEXTS[dataset](chosen, validation_text=True)
        return splits["train"], splits["valid"], splits["test"]
    return {"Cifar": cifar.CIFAR10, "Cifar100": cifar.CIFAR100}[task].load(chosen)


@pytest.mark.parametrize(("task", "dataset"), HUB)
def test_what_is_fetched_is_what_the_hub_has_and_is_kept(
    hub: list[tuple[str, dict[str, str]]], nowhere: Path, task: str, dataset: str
) -> None:
    name, arguments, answer = HUB[task, dataset]
    data = fetched(task, dataset)
    assert hub == [(name, arguments)]
    for split, rows in zip(data, answer.values(), strict=True):
        if task == "LSTM":
            lines = [[*next(iter(row.values())).split(), "<eos>"] for row in rows]
            assert split == [word for line in lines for word in line]
            continue
        image, label = list(rows[0])[:2]
        pixels = np.stack([row[image] for row in rows])
        channels_first = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        assert np.array_equal(split.images, channels_first)
        assert split.labels.tolist() == [row[label] for row in rows]
    fetched(task, dataset, download=False)
    assert len(hub) == 1


def test_the_real_datasets_decode_images_as_is_expected(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    rows = HUB["Cifar", ""][2]
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    answer = datasets.DatasetDict()
    for split, of_split in rows.items():
        columns = {
            "img": [pil.fromarray(row["img"]) for row in of_split],
            "label": [row["label"] for row in of_split],
        }
        answer[split] = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: answer)
    monkeypatch.setattr(data_files, "out_of_reach", lambda name: None)
    train, _ = fetched("Cifar", "")
    pixels = np.stack([row["img"] for row in rows["train"]])
    assert np.array_equal(train.images, pixels.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("task", "dataset", "rows", "words"),
    [
        *((task, dataset, None, "KeyError: 'test'; ") for task, dataset in HUB),
        (
            "Cifar",
            "",
            image_rows("img", "label", (32, 31, 3), 7),
            r"ValueError: .* is \(32, 31, 3\) instead of",
        ),
    ],
)
def test_what_is_incomplete_or_of_another_size_is_not_kept(
    hub: list[tuple[str, dict[str, str]]],
    nowhere: Path,
    task: str,
    dataset: str,
    rows: Rows | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = HUB[task, dataset][2]
    if rows is None:
        monkeypatch.delitem(answer, "test")
    else:
        monkeypatch.setitem(answer, "test", rows)
    with pytest.raises(ValueError, match=rf"{task} are in none of .*not downloaded: {words}"):
        fetched(task, dataset)
    assert [path for path in nowhere.rglob("*") if path.is_file()] == []


def test_without_a_network_fetching_fails_soon(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("datasets")
    asked = Mock(side_effect=ConnectionError("no route\nand much more"))
    monkeypatch.setattr(hub.HfApi, "dataset_info", asked)
    with pytest.raises(ValueError, match=r"out of reach \(ConnectionError: no route\); "):
        make_fashion_mnist(download=True)
    asked.assert_called_once_with("zalando-datasets/fashion_mnist", timeout=data_files.PATIENCE)
    assert not nowhere.exists()


def test_without_the_library_the_message_has_the_command_to_install_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"datasets is not installed; .*, or pip install datasets$"
    ):
        make_fashion_mnist(download=True)
