"""ImageNet: 1.28 million + 50,000 color images of any size, 1000 labels.

The images of a label are files in a folder with its name: train/n01440764/n01440764_18.JPEG,
val/n01440764/ILSVRC2012_val_00000293.JPEG. Any data set in this layout can be used. Images are
decoded when they are needed, and not kept in memory.

References:
    Deng et al. (2009), doi:10.1109/CVPR.2009.5206848.
"""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from powergossip.tasks import images, option_checks
from powergossip.tasks.images import ImageClassification
from powergossip.tasks.models import IMAGENET
from powergossip.tasks.task import Task, TaskOptions

# As in the published configuration of ResNet-50 for Deep Gradient Compression (arXiv:1712.01887).
DEFAULTS: Mapping[str, Any] = {
    "task_architecture": "ResNet50",
    "batch_size": 32,
    "num_epochs": 90,
    "learning_rate": 0.0125,
    "lr_schedule_milestones": [[30.0, 0.1], [60.0, 0.1], [80.0, 0.1]],
    "weight_decay": 0.0001,
}
OPTIONS = {**images.OPTIONS, "image_size": option_checks.COUNT, "threads": option_checks.COUNT}
SPLITS = ("train", "val")  # names of the folders
SUFFIXES = (".jpeg", ".jpg", ".png")
FOLDERS = ("", "imagenet", "ImageNet")  # of the data, in data_dir or $DATA

# The mean and standard deviation of the training images that the published programs use.
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_DEVIATION = (0.229, 0.224, 0.225)

# Random crops: Szegedy et al. (2015), arXiv:1409.4842, § 6
AREAS = (0.08, 1.0)  # fraction of the image
ASPECTS = (3 / 4, 4 / 3)  # columns / rows
ATTEMPTS = 10  # to place a crop of a random area and aspect in the image


def task(options: TaskOptions) -> Task:
    """Classification of the images in `data_dir`, or else in $DATA.

    Training images are a random part of an image, scaled to image_size × image_size and mirrored
    with probability ½. For evaluation the shorter side is scaled to 8/7 of image_size, and the
    center is used.

    task_options, besides the options of the models and of normalization::

        image_size  rows and columns, by default 224
        threads     that decode images in this process, by default 4

    Raises ValueError if the folders are not found or do not match, or if options are invalid.
    """
    option_checks.check(
        options.task, options.task_options, OPTIONS, options.architecture, images.MODEL_OPTIONS
    )
    given = options.task_options
    size, threads = given.get("image_size", 224), given.get("threads", 4)
    folder = _find(options.data_dir)
    decoder = Decoder(size, threads)
    labels = sorted(entry.name for entry in os.scandir(folder / "train") if entry.is_dir())
    train, test = (_listed(folder / split, labels, decoder) for split in SPLITS)
    return ImageClassification(
        train, test, len(labels), options, architectures=IMAGENET, known_options=OPTIONS
    )


def _find(data_dir: Path | None) -> Path:
    """The folder with train/ and val/. Raises ValueError."""
    place = data_dir or (Path(data).expanduser() if (data := os.environ.get("DATA")) else None)
    wanted = "a folder with train/LABEL/*.JPEG and val/LABEL/*.JPEG"
    if place is None:
        raise ValueError(f"task=ImageNet is not downloaded; use data_dir={wanted}")
    for name in FOLDERS:
        if all((place / name / split).is_dir() for split in SPLITS):
            return place / name
    raise ValueError(f"{'DATA' if data_dir is None else 'data_dir'}={place}: use {wanted}")


def _listed(folder: Path, labels: list[str], decoder: "Decoder") -> "ImageFiles":
    """The images of a split. Raises ValueError if its folders differ from the labels."""
    found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if found != labels:
        differing = sorted({*found} ^ {*labels})
        raise ValueError(
            f"{folder}: use the same folders as in train; {', '.join(differing[:3])} "
            f"{'is' if len(differing) == 1 else 'are'} in one of them only"
        )
    paths, numbers = [], []
    for number, label in enumerate(labels):
        names = sorted(
            entry.name
            for entry in os.scandir(folder / label)
            if entry.name.lower().endswith(SUFFIXES)
        )
        paths += [f"{label}/{name}" for name in names]
        numbers += [number] * len(names)
    if not paths:
        raise ValueError(f"{folder} has no images; use a folder with {', '.join(SUFFIXES)} files")
    encoded = np.array([os.fsencode(path) for path in paths])  # a byte per character
    return ImageFiles(folder, encoded, torch.tensor(numbers), decoder)


@dataclass(frozen=True)
class Decoder:
    """Reads images from files and scales them, in threads of this process."""

    size: int  # rows and columns of the result
    threads: int

    def training_image(self, path: Path, random: np.ndarray) -> np.ndarray:
        """A random part, scaled, maybe mirrored: uint8 [row, column, channel].

        Args:
            random: Random numbers in [0, 1), see `n_random`.
        """
        image = _read(path)
        columns, rows = image.size
        crop = image.crop(random_part(columns, rows, random[1:].reshape(ATTEMPTS, 4)))
        scaled = crop.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(scaled)
        return pixels[:, ::-1] if random[0] < 0.5 else pixels

    def evaluation_image(self, path: Path) -> np.ndarray:
        """The center of the image, scaled: uint8 [row, column, channel]."""
        image = _read(path)
        shorter = self.size * 8 // 7
        columns, rows = (max(shorter, side * shorter // min(image.size)) for side in image.size)
        left, top = (round((side - self.size) / 2) for side in (columns, rows))
        scaled = image.resize((columns, rows), Image.Resampling.BILINEAR)
        return np.asarray(scaled.crop((left, top, left + self.size, top + self.size)))


N_RANDOM = 1 + 4 * ATTEMPTS  # random numbers of a training image


def random_part(columns: int, rows: int, random: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part of an image.

    Args:
        random: Random numbers [attempt, 4] in [0, 1), for area, aspect, left and top. The first
            attempt that fits in the image is used. If none does: the largest part in the center
            with an accepted aspect.
    """
    low, high = (math.log(aspect) for aspect in ASPECTS)
    for area, aspect, left, top in random.tolist():
        pixels = columns * rows * (AREAS[0] + (AREAS[1] - AREAS[0]) * area)
        ratio = math.exp(low + (high - low) * aspect)
        width, height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            x, y = int(left * (columns - width + 1)), int(top * (rows - height + 1))
            return x, y, x + width, y + height
    width = min(columns, round(rows * ASPECTS[1]))
    height = min(rows, round(columns / ASPECTS[0]))
    x, y = (columns - width) // 2, (rows - height) // 2
    return x, y, x + width, y + height


def _read(path: Path) -> Image.Image:
    """An image in three colors. Raises ValueError if the file is damaged."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} is damaged, or no image: {error}") from error


@dataclass(frozen=True)
class ImageFiles:
    """The images of a split, in files."""

    folder: Path
    paths: np.ndarray  # bytes [sample], below the folder
    labels: Tensor  # int64 [sample]
    decoder: Decoder

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        return 3, self.decoder.size, self.decoder.size

    def where(self, chosen: Tensor) -> "ImageFiles":
        """The samples for which `chosen`, bool [sample], is true."""
        return ImageFiles(
            self.folder, self.paths[chosen.numpy()], self.labels[chosen], self.decoder
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ImageNet's pixels, in 0 … 1: float64 [channel]."""
        mean, deviation = (
            torch.tensor(c, dtype=torch.float64) for c in (PIXEL_MEAN, PIXEL_DEVIATION)
        )
        return mean, deviation

    def reader(self, device: torch.device) -> "FileReader":
        """The pixels, on a device."""
        return FileReader(self, device)


class FileReader:
    """A `Reader` that decodes images in the background."""

    augments: ClassVar[bool] = True

    def __init__(self, files: ImageFiles, device: torch.device) -> None:
        self._files, self._device = files, device
        self._pool = ThreadPoolExecutor(files.decoder.threads, thread_name_prefix="images")

    def request(
        self, samples: Tensor | slice, random: np.random.Generator | None = None
    ) -> Callable[[], Tensor]:
        """The pixels of these samples: uint8 [sample, row, column, channel]."""
        files, decoder = self._files, self._files.decoder
        chosen = samples if isinstance(samples, slice) else samples.cpu().numpy()
        paths = [files.folder / os.fsdecode(path) for path in files.paths[chosen]]
        futures: list[Future[np.ndarray]]
        if random is None:
            futures = [self._pool.submit(decoder.evaluation_image, path) for path in paths]
        else:
            numbers = random.random((len(paths), N_RANDOM))
            futures = [
                self._pool.submit(decoder.training_image, path, row)
                for path, row in zip(paths, numbers, strict=True)
            ]
        return lambda: torch.from_numpy(np.stack([f.result() for f in futures])).to(self._device)
