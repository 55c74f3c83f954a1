"""Training with a given configuration, and a program that does it until it kills itself.

python tests/harness/killed.py FOLDER CHANGES step STEP        in the middle of that step
python tests/harness/killed.py FOLDER CHANGES function NAME    in the second call of the
                                                function of powergossip.runs.checkpoints
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

import train
from powergossip.runs import checkpoints
from powergossip.training import recorder
from powergossip.training.stepping import Together


def run(folder: Path, changes: dict[str, Any]) -> None:
    """Train in this process. The configuration of `train` stays as it was for later tests."""
    torch.set_num_threads(1)
    config = OmegaConf.structured(train.Config)
    for key, value in changes.items():
        config[key] = value
    # A table and a figure take twice as long as these runs.
    with (
        patch.object(train, "config", config),
        patch.object(train, "output_dir", str(folder)),
        patch.object(recorder, "report"),
    ):
        train.main()


def die_at_step(step: int) -> None:
    original = Together.gradient

    def gradient(run: Any, epoch: int, of_epoch: int) -> Any:
        found = original(run, epoch, of_epoch)
        if run.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Together.gradient = gradient  # type: ignore[method-assign,assignment]


def die_while_writing(name: str) -> None:
    """In a part of the second checkpoint, or when only its index is missing."""
    count = 0
    original = getattr(checkpoints, name)

    def die(path: Path, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            if name == "write_part":
                path.write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *arguments)

    setattr(checkpoints, name, die)


if __name__ == "__main__":
    folder, changes, kind, argument = sys.argv[1:]
    if kind == "step":
        die_at_step(int(argument))
    else:
        die_while_writing(argument)
    run(Path(folder), json.loads(changes))
