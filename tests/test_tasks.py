"""Laws of every task: what a batch, a loss and an evaluation are, where data come from."""

import copy
import gzip
import hashlib
import math
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tasks
from randomness import generator
from tasks import augmentation, cifar, digits, fashion_mnist, files, idx, texts
from tasks.images import ImageClassification, LabeledImages
from tasks.task import Options

N_SAMPLES = 103  # of the small tasks here: a prime, so that nothing divides it


def options(**changes: Any) -> Options:
    defaults: dict[str, Any] = {
        "task": "",
        "n_workers": 4,
        "batch_size": 8,
        "seed": 1,
        "decentralized": False,
        "shuffled_ratio": 0.0,
        "reshuffle": True,
        "data_dir": None,
        "download": False,
        "device": torch.device("cpu"),
    }
    return Options(**(defaults | changes))


def numbered_images(n_samples: int) -> LabeledImages:
    """Images of 1 × 4 × 4 pixels, all of an image's pixels being its number; labels in turn."""
    images = torch.arange(n_samples, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    return LabeledImages(images.contiguous(), torch.arange(n_samples) % 10)


def small_task(**changes: Any) -> ImageClassification:
    data = numbered_images(N_SAMPLES)
    return ImageClassification(data, data, n_labels=10, options=options(**changes))


def numbers(batch: tasks.Batch) -> list[int]:
    """Which of the numbered images a batch holds, recovered from the normalized pixels."""
    images, labels = batch
    byte = torch.arange(N_SAMPLES, dtype=torch.float64)
    found = images[:, 0, 0, 0].double() * byte.std(correction=0) + byte.mean()
    assert found.round().sub(found).abs().max() < 1e-3
    assert torch.equal(found.round().long() % 10, labels)
    return found.round().int().tolist()


def test_batches_of_an_epoch_are_distinct_samples() -> None:
    task = small_task()
    seen = [
        number
        for worker in range(4)
        for step in range(task.steps_per_epoch)
        for number in numbers(task.batch(worker, 0, step))
    ]
    assert len(seen) == len(set(seen)) == 4 * 3 * 8  # of 25 or 26 a worker, 24 fill batches
    assert task.batch(0, 0, 0)[0].shape == (8, 1, 4, 4)
    assert task.batch(0, 0, 0)[0].dtype == torch.float32


# Every task of the registry, on few data.


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
    """The files of the binary version with few random images, so many in each to train."""
    names = {10: [f"data_batch_{i}" for i in range(1, 6)], 100: ["train"]}[n_labels]
    place = folder / {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}[n_labels]
    place.mkdir(parents=True, exist_ok=True)
    random = generator(0, "test")
    for name, count in (*((name, n_train) for name in names), ("test", 20)):
        name = "test_batch" if (name, n_labels) == ("test", 10) else name
        labels = [bytes([0, i % 100]) if n_labels == 100 else bytes([i % 10]) for i in range(count)]
        records = (label + random.bytes(3072) for label in labels)
        (place / f"{name}.bin").write_bytes(b"".join(records))


SMALL_MODEL = {"hidden_size": 8, "num_layers": 1, "dropout": 0.2}
TASKS: dict[str, dict[str, Any]] = {  # name → options that make it small
    "Digits": {},
    "FashionMNIST": {},
    "Cifar": {},
    "Cifar100": {},
    "LSTM": {"task_options": SMALL_MODEL | {"sequence_length": 9, "min_count": 20}},
}


def make(name: str, folder: Path, **changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 3, "batch_size": 5, "seed": 5, "download": False}
    return tasks.make(name, data_dir=folder, **(arguments | TASKS[name] | changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with few data for each task that needs files."""
    folder = tmp_path_factory.mktemp("data")
    write_fashion_mnist(folder / "FashionMNIST", n_train=60)
    write_cifar(folder / "Cifar", 10, n_train=12)
    write_cifar(folder / "Cifar100", 100, n_train=60)
    return folder


@pytest.fixture(params=tasks.TASKS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def any_task(name: str, data: Path) -> tasks.Task:
    return make(name, data)


def models_of(task: tasks.Task, seed: int = 1) -> Iterator[tuple[str, nn.Module]]:
    """All models that a task has for its data."""
    for architecture in task.architectures:
        if architecture == "VGG11" and task.batch(0, 0, 0)[0].shape[-1] < 32:
            with pytest.raises(ValueError, match="pixels are too few"):
                task.model(architecture, seed)
        else:
            yield architecture, task.model(architecture, seed)


def equal(first: tasks.Batch, second: tasks.Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_batches_do_not_depend_on_what_was_asked_before(any_task: tasks.Task) -> None:
    steps = range(min(3, any_task.steps_per_epoch))
    places = [(worker, epoch, step) for epoch in range(3) for worker in range(3) for step in steps]
    in_order = {place: any_task.batch(*place) for place in places}
    for place in generator(0, "test").permutation(np.array(places)).tolist():
        batch = any_task.batch(*place)
        assert equal(batch, in_order[tuple(place)])
        assert all(len(tensor) == 5 for tensor in batch[:2])
    assert not equal(in_order[0, 0, 0], in_order[1, 0, 0])
    assert not equal(in_order[0, 0, 0], in_order[0, 0, 1])


def test_epochs_are_of_full_batches_for_every_worker(any_task: tasks.Task) -> None:
    shapes = {
        tuple(tensor.shape for tensor in any_task.batch(worker, 1, step))
        for worker in range(3)
        for step in (0, any_task.steps_per_epoch - 1)
    }
    assert len(shapes) == 1


def test_batches_of_images_are_normalized(any_task: tasks.Task, name: str) -> None:
    if name == "LSTM":
        return
    assert isinstance(any_task, ImageClassification)
    images = any_task._normalize(any_task._splits["train"].pixels)
    assert images.dtype == any_task.batch(0, 0, 0)[0].dtype == torch.float32
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_models_start_from_their_seed_alone(any_task: tasks.Task) -> None:
    for architecture, model in models_of(any_task):
        state = torch.get_rng_state()
        first = nn.utils.parameters_to_vector(model.parameters())
        torch.rand(3)
        after = torch.get_rng_state()
        again = nn.utils.parameters_to_vector(any_task.model(architecture, seed=1).parameters())
        assert torch.equal(after, torch.get_rng_state())
        assert not torch.equal(after, state)
        other = nn.utils.parameters_to_vector(any_task.model(architecture, seed=2).parameters())
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)


def test_a_loss_is_the_mean_over_a_batch_and_reaches_all_parameters(any_task: tasks.Task) -> None:
    """For words, over the positions too; there the first epoch's first batch finds no state."""
    for _, model in models_of(any_task):
        model.eval()
        inputs, targets, *rest = any_task.batch(0, 0, 0)
        before = copy.deepcopy(model.state_dict())
        loss, metrics = any_task.loss(model, (inputs, targets, *rest))
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        assert set(metrics) == {"cross_entropy", "accuracy"}
        assert not any(value.requires_grad for value in metrics.values())
        scores = model(inputs, {})[0].flatten(0, 1) if rest else model(inputs)
        scores, targets = scores.detach(), targets.flatten()
        by_hand = -scores.log_softmax(1)[torch.arange(len(targets)), targets].mean()
        torch.testing.assert_close(metrics["cross_entropy"], by_hand)
        assert loss.item() == metrics["cross_entropy"].item()
        assert metrics["accuracy"] == np.mean(scores.argmax(1).numpy() == targets.numpy())
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("n_parts", [2, 7])
def test_parts_of_an_evaluation_add_up(
    any_task: tasks.Task, name: str, split: tasks.Split, n_parts: int
) -> None:
    architecture = "Transformer" if name == "LSTM" else "MLP"
    model = any_task.model(architecture, seed=1)
    whole = any_task.evaluate(model, split)
    parts = [any_task.evaluate(model, split, (i, n_parts)) for i in range(n_parts)]
    assert whole["count"] == sum(part["count"] for part in parts)
    if name != "LSTM":
        sizes = {"train": 1437, "test": 360} if name == "Digits" else {"train": 60, "test": 20}
        assert whole["count"] == sizes[split]
    assert whole["accuracy"] == sum(part["accuracy"] for part in parts)
    assert whole["cross_entropy"] == pytest.approx(sum(part["cross_entropy"] for part in parts))
    assert 0 <= whole["accuracy"] < whole["count"]


def test_an_evaluation_leaves_the_model_as_it_was(any_task: tasks.Task, name: str) -> None:
    for architecture in ("LSTM",) if name == "LSTM" else ("ResNet20", "CNN"):
        model = any_task.model(architecture, seed=1).train()
        frozen = list(model.modules())[-1]
        frozen.eval()
        any_task.loss(model, any_task.batch(0, 0, 0))
        modes = [module.training for module in model.modules()]
        before = copy.deepcopy((model.state_dict(), any_task.carried(model)))
        first = any_task.evaluate(model)
        assert [module.training for module in model.modules()] == modes
        for old, new in zip(before, (model.state_dict(), any_task.carried(model)), strict=True):
            assert set(old) == set(new)
            assert all(torch.equal(old[key], new[key]) for key in old)
        assert first == any_task.evaluate(model.eval())  # batch statistics would have differed
        assert torch.is_grad_enabled()


def test_a_run_continues_from_what_is_carried(any_task: tasks.Task, name: str) -> None:
    architecture = "LSTM" if name == "LSTM" else "CNN"
    one, other = (any_task.model(architecture, seed).eval() for seed in (1, 2))
    any_task.loss(one, any_task.batch(0, 0, 0))
    other.load_state_dict(one.state_dict())
    carried = any_task.carried(one)
    assert bool(carried) == (name == "LSTM")
    any_task.carry(other, carried)
    if name != "LSTM":
        with pytest.raises(AssertionError):
            any_task.carry(other, {"hidden": torch.zeros(1)})
    losses = [any_task.loss(model, any_task.batch(0, 0, 1))[0].item() for model in (one, other)]
    assert losses[0] == losses[1]


def test_labels_are_counted_where_there_are_any(any_task: tasks.Task, name: str) -> None:
    counts = any_task.label_counts()
    if name == "LSTM":
        assert counts is None
        return
    assert counts is not None
    assert counts.dtype == torch.int64
    assert counts.shape == (3, 100 if name == "Cifar100" else 10)
    assert counts.sum() == any_task.evaluate(any_task.model("MLP", 1), "train")["count"]


def test_further_metrics_follow_from_the_means(any_task: tasks.Task, name: str) -> None:
    derived = any_task.derived({"cross_entropy": 1.5, "accuracy": 0.5})
    assert derived == ({"perplexity": math.exp(1.5)} if name == "LSTM" else {})


def test_unknown_options_are_refused_with_the_choices(name: str, data: Path) -> None:
    known = "dataset, sequence_length, min_count" if name == "LSTM" else "normalization$"
    with pytest.raises(
        ValueError, match=f'task "{name}" has no option "depth", "width"; choose from {known}'
    ):
        make(name, data, task_options={"width": 3, "depth": 4})


def test_digits_split_is_stratified_and_the_same_for_all_seeds() -> None:
    train, test = digits.load()
    assert (len(train.labels), len(test.labels)) == (1437, 360)
    shares = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    assert (shares - 0.2).abs().max() < 0.01
    again, _ = digits.load()
    assert torch.equal(train.images, again.images)
    assert train.images.max() == 16
    both = torch.cat([train.images, test.images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797  # no image is on both sides


def test_digits_are_learned_in_seconds() -> None:
    task = tasks.make("Digits", n_workers=1, batch_size=32, seed=1)
    model = task.model("CNN", seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(8):
        for step in range(task.steps_per_epoch):
            optimizer.zero_grad()
            task.loss(model, task.batch(0, epoch, step))[0].backward()
            optimizer.step()
    sums = task.evaluate(model)
    assert sums["accuracy"] / sums["count"] >= 0.95


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_as_convolutions_like_them(channels: int) -> None:
    """A pixel's channels next to each other, which torch sees in the strides, and keeps."""
    images = torch.randint(256, (6, channels, 8, 8), dtype=torch.uint8)
    data = LabeledImages(images, torch.arange(6) % 2)
    task = ImageClassification(data, data, 2, options(n_workers=1, batch_size=4))
    batch, _ = task.batch(0, 0, 0)
    assert batch.stride() == (channels * 64, 1, 8 * channels, channels)
    plain = torch.empty(batch.shape).copy_(batch)
    assert plain.stride() == (channels * 64, 64, 8, 1)
    model = task.model("CNN", 1)
    torch.testing.assert_close(model(batch), model(plain))
    features = model.conv1(batch)  # type: ignore[operator]
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert not features.is_contiguous()


# Augmentation.


def test_crop_cuts_each_padded_image_at_its_corner() -> None:
    images = torch.randint(1, 256, (6, 5, 7, 3), dtype=torch.uint8)
    untouched = images.clone()
    corners = torch.tensor([[0, 0], [2, 2], [4, 4], [0, 4], [1, 3], [3, 0]])
    together = augmentation.crop(images, corners, padding=2)
    assert torch.equal(images, untouched)
    assert torch.equal(together[1], images[1])
    for image, (row, column), result in zip(images, corners.tolist(), together, strict=True):
        padded = np.pad(image.numpy(), ((2, 2), (2, 2), (0, 0)))
        assert np.array_equal(result, padded[row : row + 5, column : column + 7])


def test_flip_mirrors_the_chosen_images() -> None:
    images = torch.randint(0, 256, (4, 5, 7, 3), dtype=torch.uint8)
    untouched = images.clone()
    together = augmentation.flip(images, torch.tensor([True, False, False, True]))
    assert torch.equal(images, untouched)
    assert torch.equal(together[1:3], images[1:3])
    assert np.array_equal(together[[0, 3]], images[[0, 3]].numpy()[:, :, ::-1])


def test_augmentation_shifts_and_mirrors_at_random() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 8, 8, 1)
    batch = augmentation.crop_and_flip(image.repeat(2000, 1, 1, 1), generator(0, "test"), 2)
    distinct, counts = batch.unique(dim=0, return_counts=True)
    assert len(distinct) == 5 * 5 * 2  # every shift, mirrored and not
    assert counts.min() > 15  # of 40 on average
    again = augmentation.crop_and_flip(image.repeat(2000, 1, 1, 1), generator(0, "test"), 2)
    assert torch.equal(batch, again)


def test_augmentation_changes_training_batches_only() -> None:
    plain, augmented = small_task(), small_task()
    augmented.augment = augmentation.crop_and_flip
    images, labels = augmented.batch(1, 0, 2)
    assert torch.equal(labels, plain.batch(1, 0, 2)[1])
    assert not torch.equal(images, plain.batch(1, 0, 2)[0])
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
    assert plain.evaluate(model, "train") == augmented.evaluate(model, "train")


def test_augmentation_depends_on_seed_worker_epoch_and_step() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    same = LabeledImages(image.repeat(N_SAMPLES, 1, 1, 1), torch.zeros(N_SAMPLES).long())

    def batch(seed: int, worker: int, epoch: int, step: int) -> Tensor:
        task = ImageClassification(same, same, 10, options(seed=seed), augmentation.crop_and_flip)
        return task.batch(worker, epoch, step)[0]

    first = batch(1, 0, 0, 0)
    assert torch.equal(first, batch(1, 0, 0, 0))
    for place in ((2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)):
        assert not torch.equal(first, batch(*place))


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
        (b"", "is truncated: 0 bytes"),
        (idx_bytes(ARRAY)[:10], "is truncated: 10 bytes"),
        (idx_bytes(ARRAY)[:-1], "is truncated: its header says 3 × 4 × 5 = 60 bytes, 59 follow"),
        (idx_bytes(ARRAY) + b"0", "too many bytes: .* 61 follow"),
        (idx_bytes(ARRAY, (0, 0, 9, 3)), "starts with 00000903 instead of 00000803"),
        (idx_bytes(ARRAY, (1, 0, 8, 3)), "starts with 01000803"),
        (idx_bytes(np.zeros((50, 5))), "starts with 00000802"),
        (b"<html>Not Found</html>", "starts with 3c68746d"),
        (idx_bytes(np.zeros((0, 4, 5))), "is empty"),
        (gzip.compress(idx_bytes(ARRAY))[:-12], "damaged or truncated"),
        (gzip.compress(idx_bytes(ARRAY))[:10] + b"\xff" * 20, "damaged or truncated"),
        (gzip.compress(idx_bytes(ARRAY))[:-8] + bytes(8), "damaged or truncated: .*CRC"),
        (gzip.compress(idx_bytes(ARRAY)[:-1]), "is truncated: .* 59 follow"),
    ],
    ids=lambda value: value.strip(" :") if isinstance(value, str) else "",
)
def test_damaged_idx_files_are_refused_by_name(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"t10k-images-idx3-ubyte .*{found}"):
        idx.read(path, rank=3)


# FashionMNIST.


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data; returns the cache on it."""
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    return tmp_path / "cache" / "decentralized-deep-learning"


def find_fashion_mnist(data_dir: Path | None = None) -> Path:
    """The folder that its files are found in."""
    return fashion_mnist.find(options(task="FashionMNIST", data_dir=data_dir))[0].parent


def make_fashion_mnist(**changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 2, "batch_size": 8, "seed": 1, "download": False}
    return tasks.make("FashionMNIST", **(arguments | changes))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("subfolder", ["", "FashionMNIST"])
def test_data_dir_is_read(nowhere: Path, tmp_path: Path, compress: bool, subfolder: str) -> None:
    write_fashion_mnist(tmp_path / "data" / subfolder, compress)
    task = make_fashion_mnist(data_dir=str(tmp_path / "data"))
    images, labels = task.batch(0, 0, 0)
    assert images.shape == (8, 1, 28, 28)
    assert labels.dtype == torch.int64
    assert task.evaluate(task.model("CNN", 1))["count"] == 20


def test_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.arange(49) % 10))
    with pytest.raises(ValueError, match=r"50 images, .* 49 labels"):
        make_fashion_mnist(data_dir=tmp_path)
    labels.write_bytes(idx_bytes(np.arange(50) % 11))
    with pytest.raises(ValueError, match="holds label 10; 0 to 9 exist"):
        make_fashion_mnist(data_dir=tmp_path)
    labels.write_bytes(idx_bytes(np.arange(50) % 10))
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(idx_bytes(np.zeros((50, 27, 28))))
    with pytest.raises(ValueError, match=r"differ in size: \[27, 28\] and \[28, 28\] pixels"):
        make_fashion_mnist(data_dir=tmp_path)


def test_the_real_fashion_mnist_is_complete() -> None:
    try:
        paths = fashion_mnist.find(options(task="FashionMNIST"))
    except ValueError as error:
        pytest.skip(str(error))
    train, test = fashion_mnist.load(*paths[:2]), fashion_mnist.load(*paths[2:])
    assert train.images.shape == (60_000, 1, 28, 28)
    assert torch.equal(torch.bincount(train.labels), torch.full((10,), 6000))
    assert torch.equal(torch.bincount(test.labels), torch.full((10,), 1000))
    # The mean and deviation of a pixel as they are commonly given, in units of 255.
    pixels = train.images[:10_000].double() / 255
    assert pixels.mean().item() == pytest.approx(0.286, abs=0.003)
    assert pixels.std().item() == pytest.approx(0.353, abs=0.003)


# Where data are looked for.


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
        with pytest.raises(ValueError, match=r"given lacks t10k-labels-idx1-ubyte \(or the same"):
            make_fashion_mnist(data_dir=given)
        shutil.rmtree(place)
    given.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"given lacks train-images-.*, t10k-labels-idx1-ubyte \("):
        make_fashion_mnist(data_dir=given)


def test_without_files_and_download_the_message_says_where_it_looked(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError,
        match=r"^FashionMNIST's data are in none of \$DATA \(not set\), .*debian, .*cache.*, and "
        r"were not fetched: download is off. Install Debian's package dataset-fashion-mnist, set "
        r"data_dir to a folder with train-images-.*\(or the same with .gz\), or set download=true$",
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
        ("Cifar", "", r"the folder cifar-10-batches-py; .*; or cifar-10-binary.tar.gz"),
        ("Cifar100", "", r"the folder cifar-100-python; .*; or cifar-100-binary.tar.gz"),
        ("LSTM", "wikitext2", r"wiki.train.tokens, wiki.test.tokens; or the folder wikitext-2"),
        ("LSTM", "ptb", r"ptb.train.txt, ptb.test.txt; or the folder ptb"),
    ],
)
def test_messages_offer_what_the_task_can_read(
    nowhere: Path, name: str, dataset: str, wanted: str
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^{name}'s data are in none of \$DATA \(not set\), .*cache.*/{name}, and were not "
        rf"fetched: download is off. Set data_dir to a folder with {wanted}, or set download=true$",
    ):
        tasks.make(
            name,
            n_workers=1,
            batch_size=1,
            seed=1,
            download=False,
            task_options={"dataset": dataset} if dataset else {},
        )


# Sums.


def sums(folder: Path, *names: str, mark: str = " ") -> str:
    """What sha256sum writes."""
    return "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()} {mark}{name}\n"
        for name in names
    )


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("mark", [" ", "*"])
def test_files_are_verified_by_their_sums(tmp_path: Path, compress: bool, mark: str) -> None:
    write_fashion_mnist(tmp_path, compress)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 4
    (tmp_path / "SHA256SUMS").write_text(
        sums(tmp_path, *names, mark=mark) + "\n" + "0" * 64 + "  x\n"
    )
    make_fashion_mnist(data_dir=tmp_path)
    listed = (tmp_path / "SHA256SUMS").read_text()
    for name in names:
        content = (tmp_path / name).read_bytes()
        # not what decides: images are any bytes, and gzip has no sum of its header's time
        (tmp_path / name).write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
        with pytest.raises(
            ValueError,
            match=rf"/{name} does not match SHA256SUMS; fetch it again, or remove that line$",
        ):
            make_fashion_mnist(data_dir=tmp_path)
        (tmp_path / name).write_bytes(content)
    (tmp_path / names[0]).write_bytes(b"")
    remaining = [line for line in listed.splitlines() if not line.endswith(names[0])]
    (tmp_path / "SHA256SUMS").write_text("\n".join(remaining))
    with pytest.raises(ValueError, match=f"{names[0]} is truncated: 0 bytes"):
        make_fashion_mnist(data_dir=tmp_path)


@pytest.mark.parametrize("above", [False, True])
def test_sums_are_looked_for_beside_a_file_and_above(tmp_path: Path, above: bool) -> None:
    write_cifar(tmp_path, 10)
    folder = tmp_path if above else tmp_path / "cifar-10-batches-bin"
    name = "./cifar-10-batches-bin/data_batch_2.bin" if above else "data_batch_2.bin"
    (folder / "SHA256SUMS").write_text(sums(folder, name).upper().replace(name.upper(), name))
    cifar.CIFAR10.load(options(task="Cifar", data_dir=tmp_path))
    with (folder / name).open("r+b") as file:
        file.seek(100)
        file.write(b"????")
    with pytest.raises(ValueError, match=r"data_batch_2.bin does not match SHA256SUMS; fetch it"):
        cifar.CIFAR10.load(options(task="Cifar", data_dir=tmp_path))


def test_lines_that_are_no_sums_are_refused(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    for line in ("0" * 63 + "  name", "0" * 64 + " name", "SHA256 (name) = " + "0" * 64, "hello"):
        (tmp_path / "SHA256SUMS").write_text("0" * 64 + "  other\n" + line + "\n")
        with pytest.raises(ValueError, match=r"SHA256SUMS: line 2 is not a sum and a name: "):
            make_fashion_mnist(data_dir=tmp_path)


def test_texts_and_archives_are_verified_too(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text("a b c\n" * 9)
    (tmp_path / "ptb.test.txt").write_text("a b c\n" * 9)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    for name, arguments in (
        (
            "ptb.test.txt",
            {"name": "LSTM", "task_options": {"dataset": "ptb", "sequence_length": 2}},
        ),
        ("cifar-10-python.tar.gz", {"name": "Cifar"}),
    ):
        (tmp_path / "SHA256SUMS").write_text("0" * 64 + f"  {name}\n")
        with pytest.raises(ValueError, match=rf"{name} does not match SHA256SUMS"):
            tasks.make(n_workers=1, batch_size=1, seed=0, data_dir=tmp_path, **arguments)


# Fetching, from a stand-in for Hugging Face datasets.


def image_rows(column: str, label: str, shape: tuple[int, ...], count: int) -> list[dict[str, Any]]:
    random = generator(count, "test")
    return [
        {
            column: random.integers(0, 256, shape).astype(np.uint8),
            label: int(random.integers(0, 10)),
            "coarse_label": 3,
        }
        for _ in range(count)
    ]


HUB: dict[tuple[str, str], tuple[str, dict[str, str], dict[str, list[dict[str, Any]]]]] = {
    # (task, its dataset) → what is asked for, with which arguments, and what is answered
    ("FashionMNIST", ""): (
        "zalando-datasets/fashion_mnist",
        {},
        {
            "train": image_rows("image", "label", (28, 28), 13),
            "test": image_rows("image", "label", (28, 28), 7),
        },
    ),
    ("Cifar", ""): (
        "uoft-cs/cifar10",
        {},
        {
            "train": image_rows("img", "label", (32, 32, 3), 13),
            "test": image_rows("img", "label", (32, 32, 3), 7),
        },
    ),
    ("Cifar100", ""): (
        "uoft-cs/cifar100",
        {},
        {
            "train": image_rows("img", "fine_label", (32, 32, 3), 13),
            "test": image_rows("img", "fine_label", (32, 32, 3), 7),
        },
    ),
    ("LSTM", "wikitext2"): (
        "Salesforce/wikitext",
        {"name": "wikitext-2-v1"},
        {
            "train": [{"text": ""}, {"text": " = Title = \n"}, {"text": " A <unk> , é . \n"}],
            "validation": [{"text": " B \n"}],
            "test": [{"text": ""}, {"text": " A title . \n"}],
        },
    ),
    ("LSTM", "ptb"): (
        "ptb-text-only/ptb_text_only",
        {"revision": "refs/convert/parquet"},
        {
            "train": [{"sentence": "the cat is N years old"}, {"sentence": "no"}],
            "validation": [{"sentence": "b"}],
            "test": [{"sentence": "the dog"}],
        },
    ),
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
    monkeypatch.setattr(files, "_out_of_reach", lambda name: None)
    return asked


def fetched(task: str, dataset: str, download: bool = True) -> Any:
    """The data as the task loads them."""
    chosen = options(task=task, download=download)
    if task == "FashionMNIST":
        paths = fashion_mnist.find(chosen)
        return fashion_mnist.load(*paths[:2]), fashion_mnist.load(*paths[2:])
    if task == "LSTM":
        return texts.TEXTS[dataset](chosen)
    return {"Cifar": cifar.CIFAR10, "Cifar100": cifar.CIFAR100}[task].load(chosen)


@pytest.mark.parametrize(("task", "dataset"), HUB)
def test_what_is_fetched_is_what_the_hub_has_and_is_kept(
    hub: list[tuple[str, dict[str, str]]], nowhere: Path, task: str, dataset: str
) -> None:
    name, arguments, answer = HUB[task, dataset]
    data = fetched(task, dataset)
    assert hub == [(name, arguments)]
    for split, rows in zip(data, (answer["train"], answer["test"]), strict=True):
        if task == "LSTM":
            lines = [[*next(iter(row.values())).split(), "<eos>"] for row in rows]
            assert split == [word for line in lines for word in line]
            continue
        image, label = list(rows[0])[:2]
        images = np.stack([row[image] for row in rows])
        channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        assert np.array_equal(split.images, channels_first)
        assert split.labels.tolist() == [row[label] for row in rows]
    fetched(task, dataset, download=False)
    assert len(hub) == 1
    (folder,) = (path.parent for path in nowhere.rglob("SHA256SUMS"))
    assert folder.is_relative_to(nowhere / task)
    listed = {line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed | {"SHA256SUMS"} == {path.name for path in folder.iterdir()}
    # The format is sha256sum's, by its own judgment.
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def test_fetched_texts_do_not_disturb_each_other(
    hub: list[tuple[str, dict[str, str]]], nowhere: Path
) -> None:
    before = fetched("LSTM", "ptb")
    fetched("LSTM", "wikitext2")
    assert fetched("LSTM", "ptb", download=False) == before
    for folder in {path.parent for path in nowhere.rglob("SHA256SUMS")}:
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def test_the_real_datasets_decode_images_as_is_expected(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    rows = {"train": HUB["Cifar", ""][2]["train"], "test": HUB["Cifar", ""][2]["test"]}
    answer = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {
                    "img": [pil.fromarray(row["img"]) for row in rows[split]],
                    "label": [row["label"] for row in rows[split]],
                },
                features=datasets.Features(
                    {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
                ),
            )
            for split in rows
        }
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: answer)
    monkeypatch.setattr(files, "_out_of_reach", lambda name: None)
    train, _ = fetched("Cifar", "")
    assert np.array_equal(
        train.images, np.stack([row["img"] for row in rows["train"]]).transpose(0, 3, 1, 2)
    )


@pytest.mark.parametrize(("task", "dataset"), HUB)
def test_what_is_incomplete_is_not_kept(
    hub: list[tuple[str, dict[str, str]]],
    nowhere: Path,
    task: str,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = HUB[task, dataset][2]
    monkeypatch.delitem(answer, "test")
    with pytest.raises(ValueError, match=rf"{task}'s data .* not fetched: KeyError: 'test'\. "):
        fetched(task, dataset)
    assert [path for path in nowhere.rglob("*") if path.is_file()] == []
    monkeypatch.undo()


def test_images_of_another_size_are_not_kept(
    hub: list[tuple[str, dict[str, str]]], nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = image_rows("img", "label", (32, 31, 3), 7)
    monkeypatch.setitem(HUB["Cifar", ""][2], "test", rows)
    with pytest.raises(
        ValueError, match=r"not fetched: ValueError: .* is \(32, 31, 3\) instead of"
    ):
        fetched("Cifar", "")
    assert [path for path in nowhere.rglob("*") if path.is_file()] == []


KILLED = """
import sys, time
from pathlib import Path
from tasks import files

def contents():
    yield "first", b"1" * 100_000
    print("one is written", flush=True)
    time.sleep(60)
    yield "second", b"2"

files.write(Path(sys.argv[1]), contents())
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "folder")],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "one is written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in (tmp_path / "folder").iterdir() if path.is_file()] == []
    files.write(tmp_path / "folder", iter([("first", b"1"), ("second", b"2")]))
    for name, content in (("first", b"1"), ("second", b"2")):
        assert files.read(tmp_path / "folder" / name) == content


@pytest.mark.parametrize("done", range(4))
def test_a_writer_stopped_between_files_leaves_none_without_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """After any number of renames, whatever is there is verified; all only with the sums."""
    replace = Path.replace
    renamed: list[Path] = []

    def stop_after(path: Path, target: Path) -> Path:
        if len(renamed) == done:
            raise KeyboardInterrupt
        renamed.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stop_after)
    contents = [("a", b"1"), ("b", b"2"), ("c", b"3")]
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path, iter(contents))
    there = {path.name for path in tmp_path.iterdir()}
    assert len(there) == done
    if there:
        assert "SHA256SUMS" in there
    for name, content in contents:
        if name in there:
            assert files.read(tmp_path / name) == content


def test_several_that_write_at_a_time_leave_every_file_whole(tmp_path: Path) -> None:
    """Readers find each file as a whole, or not at all, and all of them only with their sums."""
    contents = [(name, name.encode() * 300_000) for name in "abc"]
    faults: list[str] = []
    finished = threading.Event()

    def read() -> None:
        while not finished.is_set():
            there = [(tmp_path / name).exists() for name, _ in contents]
            if all(there) and not (tmp_path / "SHA256SUMS").exists():
                faults.append("all files, but not their sums")
            for (name, content), is_there in zip(contents, there, strict=True):
                if is_there and files.read(tmp_path / name) != content:
                    faults.append(f"{name} is not whole")

    def write() -> None:
        for _ in range(15):
            files.write(tmp_path, iter(contents))

    writers = [threading.Thread(target=write) for _ in range(3)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    finished.set()
    reader.join()
    assert faults == []
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "SHA256SUMS"}


def test_without_a_network_fetching_fails_soon(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("datasets")
    monkeypatch.setattr(files, "PATIENCE", 0.2)

    def hang(*_: Any, **__: Any) -> None:
        time.sleep(3)

    monkeypatch.setattr(hub.HfApi, "dataset_info", hang)
    with pytest.raises(
        ValueError,
        match=r"not fetched: .*hub did not answer within 0.2 s. Install .* or connect to the inter",
    ):
        make_fashion_mnist(download=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nand much more")

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    with pytest.raises(ValueError, match=r"out of reach \(ConnectionError: no route\)\. Install"):
        make_fashion_mnist(download=True)
    assert not nowhere.exists()


def test_without_the_library_the_message_says_how_to_get_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"Hugging Face datasets is not installed\. .*, or pip install datasets$"
    ):
        make_fashion_mnist(download=True)


# Names.


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError,
        match=r'task "Digit" is unknown; choose from Digits, FashionMNIST, Cifar, Cifar100, LSTM$',
    ):
        tasks.make("Digit", n_workers=1, batch_size=1, seed=0)
    task = tasks.make("Digits", n_workers=1, batch_size=1, seed=0)
    with pytest.raises(
        ValueError, match='task_architecture "VGG" is unknown; choose from CNN, MLP, '
    ):
        task.model("VGG", seed=0)
    with pytest.raises(
        ValueError, match=r'task_architecture "CNN" is unknown; choose from LSTM, Transformer$'
    ):
        tasks.make("LSTM", n_workers=1, batch_size=1, seed=0).model("CNN", seed=0)


def test_a_folder_that_does_not_exist_is_refused_by_every_task(tmp_path: Path) -> None:
    for name in tasks.TASKS:
        with pytest.raises(ValueError, match=r"data_dir=.*absent is not a folder"):
            tasks.make(name, n_workers=1, batch_size=1, seed=0, data_dir=tmp_path / "absent")
