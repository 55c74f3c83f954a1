"""Small things that several test files need."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd


def executable(path: Path, script: str) -> Path:
    """A shell script in the place of a program. Its interpreter needs no PATH."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    """Fails if the condition is not true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)


def reproducible(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of metrics without times, as dictionaries; what a row lacks is None."""
    kept = rows[rows["name"] != "phase_seconds"].drop(columns="seconds")
    records = kept.astype(object).where(kept.notna(), None).to_dict("records")
    return [{str(column): value for column, value in record.items()} for record in records]
