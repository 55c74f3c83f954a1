"""FashionMNIST: 60,000 + 10,000 gray images of clothes, 28 × 28 pixels, 10 labels.

Xiao, Rasul & Vollgraf (2017), arXiv 1708.07747.
"""

import importlib.util
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

from tasks import idx
from tasks.images import ImageClassification, LabeledImages
from tasks.task import Options, Task

N_LABELS = 10
PREFIXES = {"train": "train", "test": "t10k"}  # split → how its files' names start
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
HUB_NAME = "zalando-datasets/fashion_mnist"  # on the Hugging Face hub
PATIENCE = 5.0  # seconds until the hub counts as out of reach


def task(options: Options) -> Task:
    """The images from `data_dir`, or from the first place that has them: $DATA, Debian's package
    dataset-fashion-mnist, the user's cache, the Hugging Face hub.

    Raises ValueError if they are nowhere, if a file is damaged, or if the options do not fit them.
    """
    folder = find(options.data_dir, options.download)
    train, test = load(folder, "train"), load(folder, "test")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(f"training and test images in {folder} differ in size")
    return ImageClassification(train, test, N_LABELS, options)


def load(folder: Path, split: str) -> LabeledImages:
    """A split from its two IDX files. Raises ValueError if they are damaged or do not match."""
    images_path, labels_path = (_file(folder, name) for name in _names(PREFIXES[split]))
    images, labels = idx.read(images_path, rank=3), idx.read(labels_path, rank=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} holds {len(images)} images, {labels_path} {len(labels)} labels"
        )
    if labels.max() >= N_LABELS:
        raise ValueError(f"{labels_path} holds label {labels.max()}; 0 to {N_LABELS - 1} exist")
    return LabeledImages(images[:, None], labels.to(torch.int64))


def find(data_dir: Path | None, download: bool) -> Path:
    """The folder with the four IDX files; may fetch them into the user's cache first.

    Raises ValueError, saying where it looked and what would do, if they are not to be had.
    """
    if data_dir is not None:
        places = _with_subfolder(data_dir)
    else:
        places = [*_with_subfolder(_environment()), DEBIAN_FOLDER, _cache()]
    for place in places:
        if not _missing(place):
            return place
    if data_dir is not None:
        raise ValueError(f"data_dir={data_dir} lacks {_listed(_missing(data_dir))}")
    problem = _fetch(_cache()) if download else "download is off"
    if not _missing(_cache()):
        return _cache()
    unset = "" if _environment() else "$DATA (not set), "
    raise ValueError(
        f"FashionMNIST is in none of {unset}{', '.join(map(str, places))}, and was not fetched: "
        f"{problem}. Install Debian's package dataset-fashion-mnist, set data_dir to a folder with "
        f"{_listed(_missing(Path()))}, or connect to the internet"
    )


def _environment() -> Path | None:
    value = os.environ.get("DATA")
    return Path(value).expanduser() if value else None


def _names(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def _file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _missing(folder: Path) -> list[str]:
    names = [name for prefix in PREFIXES.values() for name in _names(prefix)]
    return [name for name in names if not _file(folder, name).is_file()]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} (or the same with .gz)"


def _with_subfolder(folder: Path | None) -> list[Path]:
    return [] if folder is None else [folder, folder / "FashionMNIST"]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "decentralized-deep-learning" / "FashionMNIST"


def _fetch(folder: Path) -> str | None:
    """Fetch the images from the hub and write them into a folder; returns what went wrong, if so.

    Each file appears complete or not at all, also if several processes do this at a time.
    """
    problem = _out_of_reach()
    if problem is not None:
        return problem
    # Takes seconds, and comes with the extra `data` only.
    import datasets

    try:
        splits = datasets.load_dataset(HUB_NAME)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for split, prefix in PREFIXES.items():
                columns = splits[split].with_format("numpy")
                for name, column in zip(_names(prefix), ("image", "label"), strict=True):
                    array = np.stack(list(columns[column])).astype(np.uint8)
                    idx.write(Path(scratch) / name, torch.from_numpy(array))
                    (Path(scratch) / name).replace(folder / name)
    except Exception as error:  # the library lets errors of many others through
        return f"{type(error).__name__}: {error}"
    return None


def _out_of_reach() -> str | None:
    """Why the hub cannot be asked, or None; known within `PATIENCE`.

    The library itself repeats its attempts for minutes, and a name lookup cannot be interrupted:
    hence one attempt, in a thread that nobody waits for.
    """
    if importlib.util.find_spec("datasets") is None:
        return "the extra `data` (Hugging Face datasets) is not installed"
    from huggingface_hub import HfApi

    problem = [f"the Hugging Face hub did not answer within {PATIENCE:g} s"]

    def ask() -> None:
        try:
            HfApi().dataset_info(HUB_NAME, timeout=PATIENCE)
            problem.clear()
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            problem[0] = (
                f"the Hugging Face hub is out of reach ({type(error).__name__}: {first_line})"
            )

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return problem[0] if problem else None
