"""Laws of every task: what a batch, a loss and an evaluation are."""

import copy
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks import augmentation, digits, texts
from powergossip.tasks.images import ImageClassification, LabeledImages
from powergossip.tasks.language import LanguageModeling
from tests.harness.small_data import (
    options,
    write_cifar,
    write_documents,
    write_fashion_mnist,
    write_imagenet,
)

N_SAMPLES = 103  # of the small tasks here: a prime, so that nothing divides it


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


@pytest.mark.parametrize("changes", [{}, {"batch_size": 11, "dirichlet_alpha": 0.5}], ids=str)
def test_batches_of_several_workers_are_those_of_each(changes: dict[str, Any]) -> None:
    task, together = small_task(**changes), 0
    for epoch in range(2):
        for step in range(task.steps_per_epoch):
            apart = [task.batch(worker, epoch, step) for worker in (1, 2, 3)]
            found = task.batches(range(1, 4), epoch, step)
            same = len({images.shape for images, _ in apart}) == 1
            if found is None:
                assert not same or len(apart[0][0]) < changes["batch_size"]
                continue
            together += 1
            for all_of, *of_each in zip(found, *apart, strict=True):
                assert torch.equal(all_of, torch.stack(of_each))
    assert together > 2


class Ranked(nn.Module):
    """Scores of numbered images, in which the label of number n has rank n // 10, modulo 10."""

    def forward(self, images: Tensor) -> Tensor:
        byte = torch.arange(N_SAMPLES, dtype=torch.float64)
        n = (images[:, :1, 0, 0] * byte.std(correction=0) + byte.mean()).round().long()
        return -((torch.arange(10) - n + n // 10) % 10).float()  # [sample, label]


def test_top5_accuracy_counts_labels_among_the_five_highest_scores() -> None:
    sums = small_task().evaluate(Ranked())
    assert (sums["accuracy"], sums["top5_accuracy"]) == (10 + 3, 50 + 3)
    few = LabeledImages(numbered_images(20).images, torch.arange(20) % 5)
    task = ImageClassification(few, few, 5, options(batch_size=2))
    assert "top5_accuracy" not in task.evaluate(task.model("MLP", 1))


def test_constants_of_the_normalization_are_task_options() -> None:
    """What is not given is that of the training data."""
    number = torch.arange(N_SAMPLES, dtype=torch.float64)
    for given, mean, deviation in (
        ({"pixel_mean": [0.5], "pixel_deviation": [0.25]}, 0.5, 0.25),
        ({"pixel_mean": [0.0]}, 0.0, number.std(correction=0).item() / 255),
    ):
        images, labels = small_task(task_options=given).batch(0, 0, 0)
        found = 255 * (images[:, 0, 0, 0] * deviation + mean)
        torch.testing.assert_close(found, found.round(), atol=1e-3, rtol=0)
        assert torch.equal(found.round().long() % 10, labels)


# Every task of the registry, on few data.


SMALL_MODEL = {"hidden_size": 8, "num_layers": 1}
TASKS: dict[str, dict[str, Any]] = {  # name → options that make it small
    "Digits": {},
    "FashionMNIST": {},
    "Cifar": {},
    "Cifar100": {},
    "ImageNet": {"task_options": {"image_size": 32, "threads": 2}},
    "LSTM": {"task_options": SMALL_MODEL | {"sequence_length": 9, "min_count": 20}},
    "Text": {"task_options": SMALL_MODEL | {"sequence_length": 9, "dataset": "Text"}},
}
LANGUAGE = ("LSTM", "Text")
MODELS = {"LSTM": "LSTM", "Text": "GPT", "ImageNet": "ResNet18"}  # small ones
LARGE = ("ResNet18", "ResNet50", "ResNet110", "VGG11", "VGG16BN")


def make(name: str, folder: Path, **changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 3, "batch_size": 5, "seed": 5, "download": False}
    return tasks.make(name, data_dir=folder, **(arguments | TASKS[name] | changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with few data for each task that needs files, and a cache."""
    folder = tmp_path_factory.mktemp("data")
    write_fashion_mnist(folder / "FashionMNIST", n_train=60)
    write_cifar(folder / "Cifar", 10, n_train=12)
    write_cifar(folder / "Cifar100", 100, n_train=60)
    write_imagenet(folder / "ImageNet", noise=True)
    write_documents(folder / "Text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(params=tasks.TASKS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def any_task(name: str, data: Path) -> tasks.Task:
    return make(name, data)


def models_of(task: tasks.Task, name: str, seed: int = 1) -> Iterator[tuple[str, nn.Module]]:
    """The small models of a task. tests/tasks/test_models.py has the large ones."""
    for architecture in task.architectures:
        if architecture not in LARGE or architecture == MODELS.get(name):
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


def test_batches_of_images_are_normalized(any_task: tasks.Task, name: str) -> None:
    if name in (*LANGUAGE, "ImageNet"):  # ImageNet has fixed constants
        return
    assert isinstance(any_task, ImageClassification)
    seen: list[Tensor] = []

    class Recorder(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.zeros(len(images), 1000)

    any_task.evaluate(Recorder(), "train")
    images = torch.cat(seen)
    assert images.dtype == any_task.batch(0, 0, 0)[0].dtype == torch.float32
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.long
def test_models_start_from_their_seed_alone(any_task: tasks.Task, name: str) -> None:
    for architecture, model in models_of(any_task, name):
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


@pytest.mark.long
def test_a_loss_is_the_mean_over_a_batch_and_reaches_all_parameters(
    any_task: tasks.Task, name: str
) -> None:
    """For words, over the positions too; there the first epoch's first batch finds no state."""
    for _, model in models_of(any_task, name):
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


@pytest.mark.long
@pytest.mark.parametrize(("split", "n_parts"), [("train", 2), ("test", 7)])
def test_parts_of_an_evaluation_add_up(
    any_task: tasks.Task, name: str, split: tasks.Split, n_parts: int
) -> None:
    architecture = {**MODELS, "LSTM": "GPT"}.get(name, "MLP")
    model = any_task.model(architecture, seed=1)
    whole = any_task.evaluate(model, split)
    parts = [any_task.evaluate(model, split, (i, n_parts)) for i in range(n_parts)]
    assert whole["count"] == sum(part["count"] for part in parts)
    if name not in LANGUAGE:
        sizes = {"Digits": (1437, 360), "ImageNet": (49, 14)}.get(name, (60, 20))
        assert whole["count"] == sizes[split == "test"]
        assert whole["accuracy"] <= whole["top5_accuracy"] <= whole["count"]
    assert whole["accuracy"] == sum(part["accuracy"] for part in parts)
    assert whole["cross_entropy"] == pytest.approx(sum(part["cross_entropy"] for part in parts))
    assert 0 <= whole["accuracy"] < whole["count"]


def test_an_evaluation_leaves_the_model_as_it_was(any_task: tasks.Task, name: str) -> None:
    few = [MODELS[name]] if name in MODELS else ["ResNet20", "CNN"]
    for architecture in few:
        model = any_task.model(architecture, seed=1).train()
        frozen = list(model.modules())[-1]
        frozen.eval()
        any_task.loss(model, any_task.batch(0, 0, 0))
        modes = [module.training for module in model.modules()]
        before = copy.deepcopy((model.state_dict(), any_task.carried(model)))
        random = torch.get_rng_state()
        first = any_task.evaluate(model)
        assert torch.equal(torch.get_rng_state(), random)
        assert [module.training for module in model.modules()] == modes
        for old, new in zip(before, (model.state_dict(), any_task.carried(model)), strict=True):
            assert set(old) == set(new)
            assert all(torch.equal(old[key], new[key]) for key in old)
        assert first == any_task.evaluate(model.eval())  # batch statistics would have differed
        assert torch.is_grad_enabled()


def test_a_run_continues_from_what_is_carried(any_task: tasks.Task, name: str) -> None:
    architecture = MODELS.get(name, "CNN")
    one, other = (any_task.model(architecture, seed).eval() for seed in (1, 2))
    any_task.loss(one, any_task.batch(0, 0, 0))
    other.load_state_dict(one.state_dict())
    carried = any_task.carried(one)
    assert bool(carried) == (name == "LSTM")
    any_task.carry(other, carried)
    if name not in LANGUAGE:
        with pytest.raises(AssertionError):
            any_task.carry(other, {"hidden": torch.zeros(1)})
    losses = [any_task.loss(model, any_task.batch(0, 0, 1))[0].item() for model in (one, other)]
    assert losses[0] == losses[1]


def test_labels_are_counted_and_metrics_derived(any_task: tasks.Task, name: str) -> None:
    derived = any_task.derived({"cross_entropy": 1.5, "accuracy": 0.5})
    assert derived == ({"perplexity": math.exp(1.5)} if name == "LSTM" else {})
    counts = any_task.label_counts()
    if name == "LSTM":
        assert counts is None
        return
    assert counts is not None
    assert counts.dtype == torch.int64
    assert counts.shape == (3, {"Cifar100": 100, "ImageNet": 7, "Text": 4}.get(name, 10))
    assert counts.sum() == any_task.samples["train"]


def test_unknown_options_are_rejected_with_the_choices(name: str, data: Path) -> None:
    of_language = {
        "LSTM": "dataset, sequence_length, min_count",
        "Text": "dataset, tokenizer, sequence_length, ",
    }
    known = of_language.get(name, "normalization, initialization, ")
    words = f'task "{name}" has no option "depth", "width"; choose from {known}'
    with pytest.raises(ValueError, match=words):
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


def learned(task: tasks.Task, architecture: str, optimizer: Any, epochs: int) -> dict[str, float]:
    """The means of an evaluation after training one worker's model."""
    model = task.model(architecture, seed=1)
    of_model = optimizer(model.parameters())
    for epoch in range(epochs):
        for step in range(task.steps_per_epoch):
            of_model.zero_grad()
            task.loss(model, task.batch(0, epoch, step))[0].backward()
            of_model.step()
    sums = task.evaluate(model)
    return {name: value / sums["count"] for name, value in sums.items()}


@pytest.mark.long
def test_digits_and_texts_with_a_rule_are_learned_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word is 3 times the one before, modulo 17; letters follow the alphabet."""
    task = tasks.make("Digits", n_workers=1, batch_size=32, seed=1)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    assert learned(task, "CNN", sgd, epochs=5)["accuracy"] >= 0.95

    adam = partial(torch.optim.Adam, lr=0.01)
    words = torch.tensor([pow(3, i, 17) for i in range(160)])
    text = texts.Corpus(tuple(map(str, range(17))), {"train": words, "test": words})
    size = {"hidden_size": 32, "num_layers": 1, "dropout": 0.0}
    words_task = LanguageModeling(text, 5, options(task="LSTM", n_workers=1, batch_size=4), size)
    assert learned(words_task, "LSTM", adam, epochs=15)["accuracy"] >= 0.95

    for i in range(40):
        content = "abcdefghijklm"[i % 5 :] + "abcdefghijklm" * (2 + i % 7) + str(i)
        (tmp_path / f"{i}.txt").write_text(content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = {"dataset": str(tmp_path / "*.txt"), "sequence_length": 16}
    of_task = dataset | {"hidden_size": 32, "num_layers": 1}
    letters = tasks.make("Text", n_workers=1, batch_size=4, seed=1, task_options=of_task)
    assert learned(letters, "GPT", adam, epochs=4)["bits_per_byte"] < 1


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


def test_crops_and_flips_are_those_of_each_image() -> None:
    images = torch.randint(1, 256, (6, 5, 7, 3), dtype=torch.uint8)
    untouched = images.clone()
    flipped = augmentation.flip(images, torch.tensor([True, False, False, True, False, False]))
    assert torch.equal(flipped[[1, 2, 4, 5]], images[[1, 2, 4, 5]])
    assert np.array_equal(flipped[[0, 3]], images[[0, 3]].numpy()[:, :, ::-1])
    corners = torch.tensor([[0, 0], [2, 2], [4, 4], [0, 4], [1, 3], [3, 0]])
    together = augmentation.crop(images, corners, padding=2)
    assert torch.equal(images, untouched)
    assert torch.equal(together[1], images[1])
    for image, (row, column), result in zip(images, corners.tolist(), together, strict=True):
        padded = np.pad(image.numpy(), ((2, 2), (2, 2), (0, 0)))
        assert np.array_equal(result, padded[row : row + 5, column : column + 7])


def test_augmentation_shifts_and_mirrors_at_random() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 8, 8, 1)
    batch = augmentation.crop_and_flip(image.repeat(2000, 1, 1, 1), generator(0, "test"), 2)
    distinct, counts = batch.unique(dim=0, return_counts=True)
    assert len(distinct) == 5 * 5 * 2  # every shift, mirrored and not
    assert counts.min() > 15  # of 40 on average
    again = augmentation.crop_and_flip(image.repeat(2000, 1, 1, 1), generator(0, "test"), 2)
    assert torch.equal(batch, again)


def test_augmentation_depends_on_seed_worker_epoch_and_step() -> None:
    """It changes training batches only."""
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    same = LabeledImages(image.repeat(N_SAMPLES, 1, 1, 1), torch.arange(N_SAMPLES) % 10)

    def task(seed: int = 1, augment: Any = augmentation.crop_and_flip) -> ImageClassification:
        return ImageClassification(same, same, 10, options(seed=seed), augment)

    augmented, plain = task(), task(augment=None)
    first, labels = augmented.batch(0, 0, 0)
    assert torch.equal(first, task().batch(0, 0, 0)[0])
    assert not torch.equal(first, task(2).batch(0, 0, 0)[0])
    for place in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(first, augmented.batch(*place)[0])
    assert augmented.batches(range(2), 0, 0) is None  # each worker has random numbers of its own
    images, of_plain = plain.batch(0, 0, 0)
    assert torch.equal(labels, of_plain)
    assert not torch.equal(first, images)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert plain.evaluate(model, "train") == augmented.evaluate(model, "train")


# Names.


def test_a_folder_that_does_not_exist_is_rejected_by_every_task(tmp_path: Path) -> None:
    for name in tasks.TASKS:
        with pytest.raises(ValueError, match=r"^data_dir=.*absent: use an existing folder"):
            tasks.make(name, n_workers=1, batch_size=1, seed=0, data_dir=tmp_path / "absent")
