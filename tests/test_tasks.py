"""Laws of the tasks: who gets which sample, what a batch is, what models and files must be."""

import copy
import gzip
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tasks
from randomness import generator
from tasks import augmentation, digits, fashion_mnist, idx, models
from tasks.images import ImageClassification, LabeledImages
from tasks.shards import Shards, sorted_by_label
from tasks.task import Options

N_SAMPLES = 103  # of the small tasks here: a prime, so that nothing divides it
SPLITS: list[dict[str, Any]] = [
    {},
    {"reshuffle": False},
    {"decentralized": True},
    {"decentralized": True, "shuffled_ratio": 0.3},
]


def options(**changes: Any) -> Options:
    defaults: dict[str, Any] = {
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


# Who gets which sample.


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("n_workers", [1, 3, 4, 11])
def test_every_sample_belongs_to_one_worker_in_an_epoch(
    split: dict[str, Any], n_workers: int
) -> None:
    shards = Shards(torch.arange(N_SAMPLES) % 10, options(n_workers=n_workers, **split))
    for epoch in (0, 1):
        pieces = [shards.indices(worker, epoch) for worker in range(n_workers)]
        assert torch.equal(torch.cat(pieces).sort().values, torch.arange(N_SAMPLES))
        sizes = [len(piece) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert shards.steps_per_epoch == min(sizes) // 8


@pytest.mark.parametrize("split", SPLITS)
def test_batches_of_an_epoch_are_distinct_samples(split: dict[str, Any]) -> None:
    task = small_task(**split)
    seen = [
        number
        for worker in range(4)
        for step in range(task.steps_per_epoch)
        for number in numbers(task.batch(worker, 0, step))
    ]
    assert len(seen) == len(set(seen)) == 4 * 3 * 8  # of 25 or 26 a worker, 24 fill batches
    assert task.batch(0, 0, 0)[0].shape == (8, 1, 4, 4)
    assert task.batch(0, 0, 0)[0].dtype == torch.float32


@pytest.mark.parametrize("split", SPLITS)
def test_batches_do_not_depend_on_what_was_asked_before(split: dict[str, Any]) -> None:
    places = [
        (worker, epoch, step) for epoch in range(3) for worker in range(4) for step in range(3)
    ]
    task = small_task(**split)
    task.augment = augmentation.crop_and_flip
    in_order = {place: task.batch(*place) for place in places}
    for place in generator(0, "test").permutation(np.array(places)).tolist():
        images, labels = task.batch(*place)
        assert torch.equal(images, in_order[tuple(place)][0])
        assert torch.equal(labels, in_order[tuple(place)][1])


@pytest.mark.parametrize("split", SPLITS)
def test_order_depends_on_epoch_worker_and_seed(split: dict[str, Any]) -> None:
    first = numbers(small_task(**split).batch(0, 0, 0))
    assert first != numbers(small_task(**split).batch(0, 1, 0))
    assert first != numbers(small_task(**split).batch(1, 0, 0))
    assert first != numbers(small_task(seed=2, **split).batch(0, 0, 0))


@pytest.mark.parametrize("split", SPLITS)
def test_shards_are_kept_unless_reshuffled(split: dict[str, Any]) -> None:
    shards = Shards(torch.arange(N_SAMPLES) % 10, options(**split))
    early, late = (set(shards.indices(2, epoch).tolist()) for epoch in (0, 7))
    assert (early == late) == bool(split)


def concentration(counts: Tensor) -> float:
    """χ² / degrees of freedom of label counts [worker, label]; about 1 if dealt out at random."""
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    return chi_squared / ((counts.shape[0] - 1) * (counts.shape[1] - 1))


def test_sorting_gives_each_worker_few_labels_and_mixing_undoes_it() -> None:
    counts = {
        ratio: tasks.make(
            "Digits", n_workers=8, batch_size=8, seed=3, decentralized=True, shuffled_ratio=ratio
        ).label_counts()
        for ratio in (0.0, 0.2, 0.5, 1.0)
    }
    labels_held = (counts[0.0] > 0).sum(1)
    assert labels_held.max() <= 3
    concentrations = [concentration(count) for count in counts.values()]
    assert concentrations == sorted(concentrations, reverse=True)
    # With 63 degrees of freedom: a deviation of 5 standard deviations, √(2/63) each.
    bound = 1 + 5 * math.sqrt(2 / 63)
    assert concentrations[-1] < bound < concentrations[-2] / 10
    reshuffled = tasks.make("Digits", n_workers=8, batch_size=8, seed=3)
    assert concentration(reshuffled.label_counts(epoch=2)) < bound
    for count in counts.values():
        assert torch.equal(count.sum(0), reshuffled.label_counts().sum(0))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_shuffled_ratio_is_the_share_of_samples_that_may_move(ratio: float) -> None:
    labels = torch.arange(1000) % 7
    order = sorted_by_label(labels, ratio, generator(0, "test"))
    assert sorted(order) == list(range(1000))
    moved = (order != labels.argsort(stable=True).numpy()).mean()
    assert ratio - 0.01 <= moved <= ratio  # a sample may come back to its own place


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_shuffled_ratio_must_be_a_share(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"decentralized_data_shuffled_ratio=.* is not a share"):
        small_task(decentralized=True, shuffled_ratio=ratio)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 26},
            "103 samples for 4 workers are 25 for each; use batch_size ≤ 25 or n_workers ≤ 3",
        ),
        ({"batch_size": 1, "n_workers": 104}, "are 0 for each; use n_workers ≤ 103"),
        ({"batch_size": 104}, "use batch_size ≤ 25$"),
        ({"batch_size": 104, "n_workers": 104}, "use fewer of both"),
        ({"batch_size": 0}, "batch_size=0 is not possible"),
        ({"n_workers": 0}, "n_workers=0 is not possible"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_task(**changes)


def test_a_batch_may_be_a_whole_shard() -> None:
    assert small_task(batch_size=25).steps_per_epoch == 1


# Every task of the registry that this machine can load.


@pytest.fixture(params=tasks.TASKS, scope="module")
def any_task(request: pytest.FixtureRequest) -> tasks.Task:
    try:
        return tasks.make(request.param, n_workers=3, batch_size=16, seed=5, download=False)
    except ValueError as error:
        pytest.skip(str(error))


def test_batches_are_normalized(any_task: tasks.Task) -> None:
    images = torch.cat(
        [any_task.batch(worker, 0, step)[0] for worker in range(3) for step in range(20)]
    )
    assert images.dtype == torch.float32
    assert images.mean().abs() < 0.05
    assert (images.std() - 1).abs() < 0.05


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_models_start_from_their_seed_alone(any_task: tasks.Task, architecture: str) -> None:
    state = torch.get_rng_state()
    first = nn.utils.parameters_to_vector(any_task.model(architecture, seed=1).parameters())
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    again = nn.utils.parameters_to_vector(any_task.model(architecture, seed=1).parameters())
    other = nn.utils.parameters_to_vector(any_task.model(architecture, seed=2).parameters())
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_loss_and_evaluation_agree(any_task: tasks.Task, architecture: str) -> None:
    model = any_task.model(architecture, seed=1).eval()
    images, labels = any_task.batch(0, 0, 0)
    before = copy.deepcopy(model.state_dict())
    loss, metrics = any_task.loss(model, (images, labels))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert set(metrics) == {"cross_entropy", "accuracy"}
    assert not any(value.requires_grad for value in metrics.values())
    scores = model(images).detach()
    by_hand = -scores.log_softmax(1)[torch.arange(16), labels].mean()
    torch.testing.assert_close(metrics["cross_entropy"], by_hand)
    assert loss.item() == metrics["cross_entropy"].item()
    assert metrics["accuracy"] == np.mean(scores.argmax(1).numpy() == labels.numpy())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


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
    assert sums["accuracy"] / sums["count"] >= 0.97


# Evaluation.


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("n_parts", [2, 7, 400])
def test_parts_of_an_evaluation_add_up(split: tasks.Split, n_parts: int) -> None:
    task = tasks.make("Digits", n_workers=2, batch_size=8, seed=1)
    model = task.model("MLP", seed=1)
    whole = task.evaluate(model, split)
    parts = [task.evaluate(model, split, (i, n_parts)) for i in range(n_parts)]
    assert (
        whole["count"]
        == sum(part["count"] for part in parts)
        == {"train": 1437, "test": 360}[split]
    )
    assert whole["accuracy"] == sum(part["accuracy"] for part in parts)
    assert whole["cross_entropy"] == pytest.approx(sum(part["cross_entropy"] for part in parts))
    assert 0 < whole["accuracy"] < whole["count"]


def test_evaluation_leaves_the_model_as_it_was() -> None:
    task = tasks.make("Digits", n_workers=2, batch_size=8, seed=1)
    model = task.model("ResNet20", seed=1).train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    first = task.evaluate(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert first == task.evaluate(model.eval())  # batch statistics would have differed
    assert torch.is_grad_enabled()


# Models.


@pytest.mark.parametrize("build", models.ARCHITECTURES.values(), ids=models.ARCHITECTURES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_models_take_images_of_any_task(build: Any, shape: tuple[int, ...]) -> None:
    assert build(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


def test_resnet20_has_the_published_number_of_parameters() -> None:
    model = models.ResNet20((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 272_474
    assert model.blocks(torch.zeros(1, 16, 32, 32)).shape == (1, 64, 8, 8)


def test_resnet20_with_group_norm_has_no_batch_statistics() -> None:
    model = models.ResNet20((3, 32, 32), 10, norm="group")
    assert sum(p.numel() for p in model.parameters()) == 272_474
    assert not list(model.buffers())
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(images)[:2], model(images[:2]))
    assert not torch.allclose(model(images)[0], model(images)[1])
    with pytest.raises(ValueError, match='norm "layer" is unknown; choose from batch, group'):
        models.ResNet20((3, 32, 32), 10, norm="layer")


@pytest.mark.parametrize("name", ["CNN", "MLP"])
def test_small_models_have_no_batch_statistics(name: str) -> None:
    assert not list(models.ARCHITECTURES[name]((3, 32, 32), 10).buffers())


# Augmentation.


def test_crop_cuts_each_padded_image_at_its_corner() -> None:
    images = torch.randint(1, 256, (6, 3, 5, 7), dtype=torch.uint8)
    untouched = images.clone()
    corners = torch.tensor([[0, 0], [2, 2], [4, 4], [0, 4], [1, 3], [3, 0]])
    together = augmentation.crop(images, corners, padding=2)
    assert torch.equal(images, untouched)
    assert torch.equal(together[1], images[1])
    for image, (row, column), result in zip(images, corners.tolist(), together, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)))
        assert np.array_equal(result, padded[:, row : row + 5, column : column + 7])


def test_flip_mirrors_the_chosen_images() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 7), dtype=torch.uint8)
    untouched = images.clone()
    together = augmentation.flip(images, torch.tensor([True, False, False, True]))
    assert torch.equal(images, untouched)
    assert torch.equal(together[1:3], images[1:3])
    assert np.array_equal(together[[0, 3]], images[[0, 3]].numpy()[..., ::-1])


def test_augmentation_shifts_and_mirrors_at_random() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
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


def idx_bytes(array: np.ndarray, magic: tuple[int, ...] | None = None) -> bytes:
    header = bytes(magic or (0, 0, 8, array.ndim))
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def write_files(folder: Path, compress: bool = False, n_train: int = 50, side: int = 28) -> None:
    """FashionMNIST's four files with few random images."""
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


def test_idx_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    array = generator(0, "test").integers(0, 256, (3, 4, 5)).astype(np.uint8)
    path = tmp_path / "array"
    path.write_bytes(idx_bytes(array))
    assert np.array_equal(idx.read(path, rank=3), array)
    path.write_bytes(gzip.compress(idx_bytes(array)))
    assert np.array_equal(idx.read(path, rank=3), array)
    idx.write(path, torch.from_numpy(array))
    assert path.read_bytes() == idx_bytes(array)


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


# FashionMNIST: where it is looked for.


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the images; returns the user's cache folder on it."""
    monkeypatch.delenv("DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    return tmp_path / "cache" / "decentralized-deep-learning" / "FashionMNIST"


def make_fashion_mnist(**changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 2, "batch_size": 8, "seed": 1, "download": False}
    return tasks.make("FashionMNIST", **(arguments | changes))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("subfolder", ["", "FashionMNIST"])
def test_data_dir_is_read(nowhere: Path, tmp_path: Path, compress: bool, subfolder: str) -> None:
    write_files(tmp_path / "data" / subfolder, compress)
    task = make_fashion_mnist(data_dir=str(tmp_path / "data"))
    images, labels = task.batch(0, 0, 0)
    assert images.shape == (8, 1, 28, 28)
    assert labels.dtype == torch.int64
    assert task.evaluate(task.model("CNN", 1))["count"] == 20


def test_places_are_searched_in_order(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is in none of"):
        fashion_mnist.find(None, download=False)
    monkeypatch.setenv("DATA", str(tmp_path / "environment"))
    for place in (
        nowhere,
        tmp_path / "debian",
        tmp_path / "environment" / "FashionMNIST",
        tmp_path / "environment",
    ):
        write_files(place)
        assert fashion_mnist.find(None, download=False) == place
    write_files(tmp_path / "given")
    assert fashion_mnist.find(tmp_path / "given", download=False) == tmp_path / "given"


def test_a_given_folder_without_the_files_is_an_error(nowhere: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "debian")
    with pytest.raises(ValueError, match=r"data_dir=.*absent is not a folder"):
        make_fashion_mnist(data_dir=tmp_path / "absent")
    given = tmp_path / "given"
    write_files(given)
    (given / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"given lacks t10k-labels-idx1-ubyte \("):
        make_fashion_mnist(data_dir=given)


def test_without_files_and_download_the_message_says_where_it_looked(nowhere: Path) -> None:
    with pytest.raises(
        ValueError, match=r"\$DATA \(not set\), .*debian, .*cache.* download is off"
    ):
        make_fashion_mnist()


def test_without_a_network_fetching_fails_soon(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("datasets")
    monkeypatch.setattr(fashion_mnist, "PATIENCE", 0.2)

    def hang(*_: Any, **__: Any) -> None:
        time.sleep(3)

    monkeypatch.setattr(hub.HfApi, "dataset_info", hang)
    with pytest.raises(
        ValueError, match=r"not fetched: .*hub did not answer within 0.2 s.* Install"
    ):
        make_fashion_mnist(download=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nand much more")

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    with pytest.raises(ValueError, match=r"out of reach \(ConnectionError: no route\)\. Install"):
        make_fashion_mnist(download=True)
    assert not nowhere.exists()


def test_fetched_images_are_kept_in_the_cache(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    images = generator(0, "test").integers(0, 256, (30, 28, 28)).astype(np.uint8)
    labels = np.arange(30) % 10
    split = datasets.Dataset.from_dict(
        {"image": [pil.fromarray(image) for image in images], "label": labels},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
        ),
    )
    answer = datasets.DatasetDict({"train": split, "test": split})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: answer)
    monkeypatch.setattr(fashion_mnist, "_out_of_reach", lambda: None)
    make_fashion_mnist(download=True)
    assert make_fashion_mnist(download=False).steps_per_epoch == 1
    loaded = fashion_mnist.load(nowhere, "train")
    assert np.array_equal(loaded.images[:, 0], images)
    assert np.array_equal(loaded.labels, labels)
    assert [path.name for path in nowhere.parent.iterdir()] == ["FashionMNIST"]

    del answer["test"]
    for path in nowhere.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="not fetched: KeyError"):
        make_fashion_mnist(download=True)
    assert [path.name for path in nowhere.parent.iterdir()] == ["FashionMNIST"]


def test_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path)
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
    with pytest.raises(ValueError, match="differ in size"):
        make_fashion_mnist(data_dir=tmp_path)


def test_the_real_fashion_mnist_is_complete() -> None:
    try:
        folder = fashion_mnist.find(None, download=False)
    except ValueError as error:
        pytest.skip(str(error))
    train, test = fashion_mnist.load(folder, "train"), fashion_mnist.load(folder, "test")
    assert train.images.shape == (60_000, 1, 28, 28)
    assert torch.equal(torch.bincount(train.labels), torch.full((10,), 6000))
    assert torch.equal(torch.bincount(test.labels), torch.full((10,), 1000))
    # The mean and deviation of a pixel as they are commonly given, in units of 255.
    pixels = train.images[:10_000].double() / 255
    assert pixels.mean().item() == pytest.approx(0.286, abs=0.003)
    assert pixels.std().item() == pytest.approx(0.353, abs=0.003)


# Names.


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match='task "Digit" is unknown; choose from Digits, FashionMNIST'
    ):
        tasks.make("Digit", n_workers=1, batch_size=1, seed=0)
    task = tasks.make("Digits", n_workers=1, batch_size=1, seed=0)
    with pytest.raises(
        ValueError, match='task_architecture "VGG" is unknown; choose from CNN, MLP, '
    ):
        task.model("VGG", seed=0)


def test_a_folder_that_does_not_exist_is_refused_by_every_task(tmp_path: Path) -> None:
    for name in tasks.TASKS:
        with pytest.raises(ValueError, match=r"data_dir=.*absent is not a folder"):
            tasks.make(name, n_workers=1, batch_size=1, seed=0, data_dir=tmp_path / "absent")
