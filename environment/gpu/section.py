"""A part of the check is a program that prints its section of the report, in Markdown.

Lines that begin with FAILED are wrong results. A part that ends in the middle, even by a signal,
leaves what it has printed.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Setting:
    """
    device  # that is compared with the CPU: cuda:0, or cpu for a dry run
    quick   # fewer and smaller cases
    """

    device: torch.device
    quick: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all kernels."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def setting() -> Setting:
    """Read the options of a part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    return Setting(torch.device("cuda:0" if options.device == "cuda" else "cpu"), options.quick)


def text(markdown: str) -> None:
    """Print a paragraph."""
    print(f"{markdown}\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. Numbers are shown with three digits."""
    lines = [columns, ["---"] * len(columns), *rows]
    text("\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines))


def require(holds: bool, sentence: str) -> None:
    """Print a failure unless a condition holds."""
    if not holds:
        text(f"FAILED {sentence}")


def _cell(value: object) -> str:
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    return shown.replace("|", "\\|").replace("\n", " ")
