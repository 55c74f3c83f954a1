"""Experiment trackers: TensorBoard and Weights & Biases receive the rows of metrics.jsonl.

A scalar is named by the row's name and tags, accuracy/split-test/worker-0. Its step, an integer, is
1000 · epoch. The rows of an epoch are sent together. In Weights & Biases, each step also has the
scalars `epoch`, `bits`, `messages` and `seconds` of its last row, and the configuration becomes the
parameters of the run.

A resumed run continues the same run of the tracker, whose identity is in info.json. Steps that the
tracker has already are kept as they are.

Weights & Biases reads its own environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY,
WANDB_DIR, WANDB_NAME. Without them, the project is PROJECT, the run has the name of the output
folder, and its files are in that folder.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from powergossip.checks import BadValue

PROJECT = "powergossip"
AXES = ("epoch", "bits", "messages", "seconds")

Scalar = tuple[
    str, Mapping[str, float]
]  # name of the scalar; value, epoch, bits, messages, seconds


@dataclass(frozen=True)
class Resumed:
    """A run that continues.

    Attributes:
        epoch: Epoch of the last row.
        facts: Facts of each tracker by its name, as in info.json.
    """

    epoch: float
    facts: Mapping[str, Mapping[str, Any]]


def scalar(name: str, tags: Mapping[str, Any]) -> str:
    """Return the name of a row's scalar."""
    return "/".join([name, *(f"{key}-{value}" for key, value in tags.items())])


def step_of(values: Mapping[str, float]) -> int:
    """Return the step of a row's scalar."""
    return round(1000 * values.get("epoch", 0))


class TensorBoard:
    """Event files in the output folder.

    Attributes:
        facts: Identity of the run, for info.json.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: Resumed | None):
        from torch.utils.tensorboard import SummaryWriter

        # Later events of the files there are hidden: the run repeats their epochs.
        purge = None if resumed is None else step_of({"epoch": resumed.epoch}) + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        self.facts: dict[str, Any] = {}

    def write(self, step: int, rows: Sequence[Scalar]) -> None:
        """Add the rows of a step. Steps increase."""
        for name, values in rows:
            self._writer.add_scalar(name, values["value"], step)
        self._writer.flush()

    def close(self, complete: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Charts have the epoch on the horizontal axis.

    A resumed run has the same id. In offline mode its rows are in a further folder, which
    `wandb sync --append` adds to the run.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: Resumed | None):
        import wandb

        given = {} if resumed is None else resumed.facts.get("wandb", {})
        offline = os.environ.get("WANDB_MODE") == "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(folder.resolve())),
            config=dict(config),
            id=given.get("id"),
            resume="allow" if given and not offline else None,
            allow_val_change=True,
            reinit="create_new",  # a run that the caller has open stays open
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        self.facts = {"id": self._run.id, "url": self._run.url}

    def write(self, step: int, rows: Sequence[Scalar]) -> None:
        values, (_, last) = {name: row["value"] for name, row in rows}, rows[-1]
        axes = {axis: last[axis] for axis in AXES if axis in last}
        self._run.log(values | axes, step=step, commit=True)

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


Tracker = TensorBoard | WeightsAndBiases

# name: class; module that it needs, with one of its names; packages for pip
TRACKERS: dict[str, tuple[type[Tracker], str, str, str]] = {
    "tensorboard": (TensorBoard, "torch.utils.tensorboard", "SummaryWriter", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "init", "wandb"),
}


def configured(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the trackers of a configuration: {name: its key and value, for errors}.

    The key `tensorboard` is an alias.

    Raises:
        BadValue: For an unknown tracker.
    """
    asked = list(config.get("trackers") or [])
    for name in asked:
        if name not in TRACKERS:
            raise BadValue("trackers", f"[{name}]", f"a list of {', '.join(TRACKERS)}")
    found = {name: f"trackers=[{name}]" for name in asked}
    if config.get("tensorboard"):
        found = {"tensorboard": "tensorboard=true", **found}
    return found


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a tracker of the configuration is unknown or not installed."""
    for name, given in configured(config).items():
        _, module, needed, package = TRACKERS[name]
        try:
            getattr(import_module(module), needed)  # a folder of that name is a module, too
        except Exception as error:  # also of a broken installation
            raise ValueError(
                f"{given}: the package {module} cannot be imported "
                f"({_first_line(error)}); pip install {package}, or leave the tracker out"
            ) from error


class Trackers:
    """The trackers of a run.

    A tracker that fails gives a warning and receives no further rows. The run goes on.

    Raises:
        ValueError: If a tracker is not installed, or cannot begin or continue its run.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: Resumed | None = None):
        self._open: dict[str, Tracker] = {}
        self._pending: list[Scalar] = []
        self._step = 0
        check(config)
        for name, given in configured(config).items():
            begin = TRACKERS[name][0]
            try:
                self._open[name] = begin(folder, config, resumed)
            except Exception as error:  # each has its own exceptions
                self.close(complete=False)
                raise ValueError(f"{given}: {_first_line(error)}") from error

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """The identity of the run in each tracker that has one."""
        return {name: tracker.facts for name, tracker in self._open.items() if tracker.facts}

    def write(self, name: str, values: Mapping[str, float], tags: Mapping[str, Any]) -> None:
        """Add a row. It is passed on with the others of its step."""
        if not self._open:
            return
        step = step_of(values)
        if step != self._step:
            self.flush()
            self._step = step
        self._pending.append((scalar(name, tags), values))

    def flush(self) -> None:
        """Pass the pending rows on."""
        rows, self._pending = self._pending, []
        if rows:
            self._each(lambda tracker: tracker.write(self._step, rows))

    def close(self, complete: bool) -> None:
        """End the run in all trackers."""
        self.flush()
        self._each(lambda tracker: tracker.close(complete))
        self._open.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:  # each has its own exceptions
                del self._open[name]
                warnings.warn(
                    f"the tracker {name} failed and receives no further rows "
                    f"({_first_line(error)}); metrics.jsonl has them",
                    stacklevel=4,
                )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
