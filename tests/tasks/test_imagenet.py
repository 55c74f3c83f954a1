"""ImageNet from a folder: layout, random parts, scaling."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from powergossip import tasks
from powergossip.randomness import generator
from powergossip.tasks.imagenet import ASPECTS, ATTEMPTS, N_RANDOM, Decoder, random_part
from tests.harness.small_data import write_imagenet

SMALL = {"image_size": 32, "threads": 2}


def make(data_dir: Path | None, **changes: Any) -> tasks.Task:
    arguments: dict[str, Any] = {"n_workers": 2, "batch_size": 4, "seed": 1, "task_options": SMALL}
    return tasks.make("ImageNet", data_dir=data_dir, **(arguments | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_imagenet(tmp_path, n_labels=3, n_train=4)
    return tmp_path


# The folder.


def test_the_folder_is_data_dir_or_in_it_or_in_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_imagenet(tmp_path / "ImageNet", n_labels=3, n_train=4)
    monkeypatch.delenv("DATA", raising=False)
    for place in (tmp_path, tmp_path / "ImageNet"):
        assert make(place).samples == {"train": 12, "test": 6}
    with pytest.raises(ValueError, match=r"data_dir=a folder with train/"):
        make(None)
    monkeypatch.setenv("DATA", str(tmp_path))
    assert make(None).samples == {"train": 12, "test": 6}


def test_folders_that_do_not_match_or_have_no_images_are_rejected(folder: Path) -> None:
    for path in (folder / "val").rglob("*.JPEG"):
        path.unlink()
    with pytest.raises(ValueError, match=r"val has no images"):
        make(folder)
    (folder / "val" / "n001").rename(folder / "val" / "x001")
    with pytest.raises(ValueError, match=r"val: use .*n001, x001"):
        make(folder)
    (folder / "val").rename(folder / "test")
    with pytest.raises(ValueError, match=r"^data_dir=.*: use a folder with train/.* and val/"):
        make(folder)


def test_a_damaged_image_is_named(folder: Path) -> None:
    path = folder / "val" / "n001" / "1_0.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    task = make(folder)
    with pytest.raises(ValueError, match=r"n001/1_0.JPEG is damaged"):
        task.evaluate(task.model("ResNet18", 1))


def test_labels_are_those_of_the_sorted_folders(folder: Path) -> None:
    """Each image has one color, as its file has."""
    task = make(folder, batch_size=6)
    deviation = torch.tensor([0.229, 0.224, 0.225])
    pairs = zip(task.batch(0, 0, 0), task.batch(1, 0, 0), strict=True)
    images, labels = (torch.cat(pair) for pair in pairs)
    color = images[:, :, 16, 16] * deviation + torch.tensor([0.485, 0.456, 0.406])
    for label in range(3):
        files = sorted((folder / "train" / f"n{label:03}").iterdir())
        wanted = [np.asarray(Image.open(file))[5, 5] / 255 for file in files]
        found = color[labels == label].tolist()
        np.testing.assert_allclose(sorted(found), sorted(w.tolist() for w in wanted), atol=0.01)


def test_held_out_images_are_no_training_images(folder: Path) -> None:
    task: Any = make(folder, validation_ratio=0.25)
    assert task.samples == {"train": 9, "valid": 3, "test": 6}
    assert task.batches(range(2), 0, 0) is None  # each image is augmented by itself
    model = task.model("ResNet18", 1)
    assert task.evaluate(model, "valid")["count"] == 3


# The images.


def uniforms(n: int) -> np.ndarray:
    return generator(0, "test").random((n, ATTEMPTS, 4))


def test_random_parts_have_the_published_areas_and_aspects() -> None:
    columns, rows = 500, 375
    parts = np.array([random_part(columns, rows, u) for u in uniforms(2000)])
    left, top, right, bottom = parts.T
    assert left.min() == top.min() == 0
    assert (right.max(), bottom.max()) == (columns, rows)
    width, height = right - left, bottom - top
    aspects, areas = width / height, width * height / (columns * rows)
    assert ASPECTS[0] * 0.98 < aspects.min() < 0.78
    assert 1.3 < aspects.max() < ASPECTS[1] * 1.02
    assert 0.075 < areas.min() < 0.09
    assert 0.9 < areas.max() <= 1
    assert np.log(aspects).mean() == pytest.approx(0, abs=0.06)  # wide ones fit more often
    assert 0.40 < areas.mean() < 0.54  # of large parts, more do not fit


def test_a_part_of_a_long_image_is_in_its_center() -> None:
    failing = np.full((ATTEMPTS, 4), 0.99)  # the largest areas, which do not fit
    assert random_part(1000, 30, failing) == (480, 0, 520, 30)
    assert random_part(30, 1000, failing) == (0, 480, 30, 520)
    assert random_part(100, 100, np.full((ATTEMPTS, 4), 0.5))[2] <= 100


def picture(folder: Path, columns: int, rows: int, mode: str = "RGB") -> tuple[Path, np.ndarray]:
    """A file without loss, and its pixels."""
    shape = (rows, columns, 3) if mode == "RGB" else (rows, columns)
    pixels = generator(0, "picture").integers(0, 256, shape).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return folder / "picture.png", pixels


def test_evaluation_takes_the_center(tmp_path: Path) -> None:
    """A gray image has three equal colors."""
    for mode in ("RGB", "L"):
        path, pixels = picture(tmp_path, 50, 36, mode)  # 36 = 32 · 8/7, so that nothing is scaled
        expected = pixels[2:34, 9:41] if mode == "RGB" else pixels[2:34, 9:41, None].repeat(3, 2)
        np.testing.assert_array_equal(Decoder(32, 1).evaluation_image(path), expected)
    path, _ = picture(tmp_path, 72, 300)
    assert Decoder(32, 1).evaluation_image(path).shape == (32, 32, 3)


def test_training_images_are_mirrored_or_not(tmp_path: Path) -> None:
    path, _ = picture(tmp_path, 50, 40)
    random = generator(0, "test").random(N_RANDOM)
    images = [Decoder(32, 1).training_image(path, random) for random[0] in (0.2, 0.7)]
    np.testing.assert_array_equal(images[0], images[1][:, ::-1])
    assert not np.array_equal(images[0], images[1])
