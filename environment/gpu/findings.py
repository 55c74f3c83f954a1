"""The input of the parts of the check, and the section of the report that each of them writes."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Differences between devices, relative to the root mean square of the values. Sums in another order
# differ by about 1e-6, and a few steps of power iteration amplify that.
TOLERANCE = 1e-4
LEAST = 1e-2  # values that are 0 but for rounding are compared with this


@dataclass(frozen=True)
class Setting:
    """
    device        # that is compared with the CPU: cuda:0, or cpu for a dry run
    gpus          # number of GPUs, 0 for a dry run
    quick         # fewer and smaller cases
    folder        # for files of the part
    has_training  # whether train.py can be imported
    """

    device: torch.device
    gpus: int
    quick: bool
    folder: Path
    has_training: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all kernels."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Findings:
    """The section of a part: Markdown and failures, written to a file line by line.

    A part that ends in the middle, even by a signal, leaves what it has found so far.
    """

    def __init__(self, file: Path):
        self._file = file

    def text(self, markdown: str) -> None:
        """Add a paragraph."""
        self._write("text", markdown)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table. Numbers are shown with three digits."""
        lines = [columns, ["---"] * len(columns), *rows]
        self.text("\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines))

    def failure(self, sentence: str) -> None:
        """Add a failure: the check as a whole then fails."""
        self._write("failure", sentence)

    def require(self, holds: bool, sentence: str) -> str:
        """Add a failure unless a condition holds. Returns a cell of a table: ok or FAILED."""
        if not holds:
            self.failure(sentence)
        return "ok" if holds else "FAILED"

    def _write(self, kind: str, content: str) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([kind, content]) + "\n")


def read(file: Path) -> tuple[list[str], list[str]]:
    """The paragraphs and the failures in a file of `Findings`."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    paragraphs = [content for kind, content in lines if kind == "text"]
    return paragraphs, [content for kind, content in lines if kind == "failure"]


@dataclass(frozen=True)
class Difference:
    """
    largest  # difference, relative to the root mean square of the expected values, or to LEAST
    off      # fraction of the elements that differ by more than TOLERANCE
    """

    largest: float
    off: float

    def __str__(self) -> str:
        off = f", {self.off:.2g} of the elements off" if self.off else ""
        return f"{self.largest:.1g}{off}"


def difference(found: Tensor, expected: Tensor) -> Difference:
    """Compare tensors of any devices. NaN and infinity differ from everything."""
    a, b = (tensor.detach().double().cpu() for tensor in (found, expected))
    scale = b.square().mean().sqrt().clamp(min=LEAST)
    apart = ((a - b).abs() / scale).nan_to_num(nan=torch.inf)
    if not apart.numel():
        return Difference(0.0, 0.0)
    return Difference(float(apart.max()), float((apart > TOLERANCE).double().mean()))


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, was too small."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
