"""Failures of a run: bad input is one sentence before anything is written, an exception in one
process ends all, a divergence names the step and the worker.

Most cases of bad input share one mpirun: a driver tries them one after the other.
"""

import itertools
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import gossip_run
import train
from powergossip import errors
from powergossip.algorithms import AVERAGING, ddp_hooks
from powergossip.algorithms.aggregation import AGGREGATIONS
from powergossip.algorithms.learning import LEARNING
from powergossip.compressors import COMPRESSORS
from powergossip.network import Processes, processes
from powergossip.runs import configuration, metrics
from powergossip.runs.signals import Signals
from powergossip.tasks.images import ImageClassification
from powergossip.training import ending
from powergossip.training.config_checks import checked
from powergossip.training.local_optimizers import LOCAL_OPTIMIZERS
from powergossip.training.stepping import Together
from powergossip.training.trainer import Trainer
from tests.harness import launch
from tests.harness.checkpoints import entry_of
from tests.harness.training import trained

TINY = ["task_architecture=MLP", "num_epochs=1", "log_verbosity=0"]


# In the middle of a run.

RAISING = """
import time
import train
from powergossip import network, tasks

loss, calls = tasks.images.ImageClassification.loss, []

def failing(self, model, batch):
    calls.append(None)
    if network.processes().rank == 1 and len(calls) == 5:
        open("raised", "w").write(str(time.time()))
        raise RuntimeError("worker 1 is on strike")
    return loss(self, model, batch)

tasks.images.ImageClassification.loss = failing
train.main([*TINY, "--output-dir", "run"])
"""


def test_an_exception_in_one_process_ends_all(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(RAISING.replace("TINY", repr(TINY)))
    ended = launch.python("driver.py", processes=3, cwd=tmp_path)
    assert time.time() - float((tmp_path / "raised").read_text()) < 10
    assert ended.returncode != 0
    assert ended.stderr.count("process 1 of 3") == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.count("RuntimeError: worker 1 is on strike") == 1
    assert "in failing" in ended.stderr
    assert "in worker 1 at step 4 (epoch 1)" in ended.stderr
    assert "After 1 epoch" not in ended.stdout


# Divergence, in all processes.

ALL_METHODS: list[dict[str, Any]] = [
    *({"optimizer": name} for name in AVERAGING if name != "choco"),
    *(
        {"optimizer": "choco", "optimizer_compressor": compressor, "optimizer_diffusion_rate": 0.1}
        for compressor in COMPRESSORS
    ),
    *({"optimizer": name} for name in AGGREGATIONS),
    *({"optimizer": name} for name in ddp_hooks.HOOKS),
    {"optimizer": "power-gossip", "optimizer_rank": 2},
    {"optimizer": "powersgd", "optimizer_rank": 2},
    {"optimizer": "dpsgd", "gradient_clipping": 1.0, "overlapping": False},
    {"optimizer": "dgc", "gradient_clipping": 1.0},
    {"optimizer": "dpsgd", "local_optimizer": "adamw", "learning_rate": 0.003},
]


@pytest.mark.parallel(nprocs=2)
def test_a_maximum_that_is_started_keeps_its_values() -> None:
    comm = processes()
    for step in range(100):
        maximum = comm.start_max(np.array([step, 50 * (comm.rank == 0), comm.rank]))
        np.array([-1, -1, -1])  # would take the place of values that nobody keeps
        assert maximum().tolist() == [step, 50, 1]


@pytest.mark.parallel(nprocs=2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ALL_METHODS, ids=lambda m: "-".join(map(str, m.values())))
def test_a_loss_that_is_nan_in_one_process_ends_all(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process gets the NaN in messages, and the process itself in all steps after."""
    comm, loss = processes(), ImageClassification.loss
    calls: list[None] = []

    def bad(self: Any, model: Any, batch: Any) -> Any:
        calls.append(None)
        value, of_batch = loss(self, model, batch)
        return value * (torch.nan if comm.rank == 1 and len(calls) == 4 else 1), of_batch

    monkeypatch.setattr(ImageClassification, "loss", bad)
    monkeypatch.setattr(ending, "INTERVAL", 1e9)  # seconds: they agree at the end of the epoch
    changes = {"task_architecture": "MLP", "max_steps_per_epoch": 9, "log_verbosity": 0}
    config = OmegaConf.merge(OmegaConf.structured(train.Config), changes, method)
    with pytest.raises(train.Diverged, match=r"worker 1's loss is nan at step 3 \(epoch 1\)"):
        Trainer(checked(config, comm), comm).train()  # type: ignore[arg-type]
    assert len(calls) == 9


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_reported_with_every_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the losses are finite, the parameters show it at the end of the epoch."""
    loss, bad = ImageClassification.loss, torch.nan

    def spoiled(self: Any, model: Any, batch: Any) -> Any:
        value, metrics = loss(self, model, batch)
        value.register_hook(lambda gradient: gradient * bad)
        return value, metrics

    monkeypatch.setattr(ImageClassification, "loss", spoiled)
    methods: list[dict[str, Any]] = [
        *({"optimizer": name} for name in (*AVERAGING, *AGGREGATIONS)),
        *({"optimizer": name, "n_workers": 1} for name in ddp_hooks.HOOKS),
        *(
            {"optimizer": "choco" if rule in ("beer", "motef") else "dpsgd", "learning": rule}
            for rule in LEARNING
        ),
        *({"optimizer": "dpsgd", "local_optimizer": name} for name in LOCAL_OPTIMIZERS),
    ]
    for method, bad in zip(methods, itertools.cycle((torch.nan, torch.inf))):
        topology = "chain" if method.get("learning") == "relay-sgd" else "ring"
        found = "none"
        try:
            trained(**{"n_workers": 2} | method, max_steps_per_epoch=1, topology=topology)
        except train.Diverged as error:
            found = str(error)
        assert re.search(r"worker \d's .* (nan|inf) at step 1 ", found), (method, bad, found)


def test_the_first_divergence_counts_and_spoils_no_row_or_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process hosts all workers. The parameters are checked where no loss shows them."""
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.setattr(train, "output_dir", str(tmp_path))
    finish, steps = Together.train_step, 5

    def spoiled(run: Together, epoch: int, step: int) -> Any:
        result = finish(run, epoch, step)
        if run.step == 2 * steps:
            run.view.x[2:, 0] = torch.inf
        return result

    monkeypatch.setattr(Together, "train_step", spoiled)
    arguments = [*TINY, "n_workers=4", f"max_steps_per_epoch={steps}", "num_epochs=3"]
    assert exit_of(train.main, [*arguments, "checkpoint_interval=1"], monkeypatch) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert re.search(r"worker 2's .* inf at step 10 \(epoch 2\)", line)
    assert "After" not in shown.out, "no table of a run that failed"
    assert set(metrics.load(tmp_path)["epoch"]) == {1}
    assert entry_of(tmp_path)["step"] == steps


# Signals. tests/runs/test_checkpoints.py has SIGTERM and SIGUSR1 of a run in several layouts.


def test_the_second_signal_has_its_usual_effect() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_raises_after_a_delay() -> None:
    """Process 0, which may wait for a message of this one, reports first."""

    def run(seconds: float) -> None:
        with Signals(at_once="text", delay=0.05):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(seconds)

    with pytest.raises(errors.Signaled) as caught:
        run(5)
    assert caught.value.exit_code == 143
    run(0)
    time.sleep(0.1)  # nothing is raised after the block


def exit_of(main: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as ended:
        configuration.run_entry_point(main)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_ctrl_c_of_one_process_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradient = Together.gradient

    def interrupted(run: Together, epoch: int, step: int) -> Any:
        if run.step == 6:
            signal.raise_signal(signal.SIGINT)
        return gradient(run, epoch, step)

    monkeypatch.setattr(Together, "gradient", interrupted)
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))
    monkeypatch.chdir(tmp_path)
    assert exit_of(train.main, [*TINY, "n_workers=2", "num_epochs=2"], monkeypatch) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert "SIGINT after step 7 " in line
    (folder,) = (tmp_path / "output").iterdir()
    assert entry_of(folder)["step"] == 7
    monkeypatch.setattr(Together, "gradient", gradient)
    program, file, *arguments = shlex.split(line.partition("resume with: ")[2])
    assert (program, Path(file).resolve()) == ("python", Path(train.__file__))
    train.main(arguments)
    assert entry_of(folder)["step"] > 7


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_ends_gossip_run_with_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number, rows = signal.Signals[name], []

    def log_metric(*row: Any) -> None:
        rows.append(row)
        if len(rows) == 7:
            signal.raise_signal(number)

    monkeypatch.setattr(gossip_run, "log_metric", log_metric)
    monkeypatch.setattr(gossip_run, "config", OmegaConf.structured(gossip_run.Config))
    monkeypatch.setattr(gossip_run, "output_dir", str(tmp_path))
    arguments = ["n_workers=4", "matrix_size=10", "num_steps=100", "log_verbosity=0"]
    assert exit_of(gossip_run.main, arguments, monkeypatch) == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert name in line
    assert len(rows) == 7
    assert not (tmp_path / "figure.png").exists()


class Late(Processes):
    """Of two processes on a virtual clock, one. A maximum arrives after the latency, and not while
    a link is busy: for some seconds at the beginning of every round of 2 seconds."""

    def __init__(self, clock: list[float], latency: float, busy: float = 0.0):
        super().__init__()
        self.size, self.starts, self.waited = 2, 0, 0.0
        self._clock, self._latency, self._busy = clock, latency, busy

    def start_max(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        self.starts += 1
        now = self._clock[0]
        arrives = now + self._latency + max(0.0, self._busy - now % 2.0)

        def result() -> np.ndarray:
            self.waited += max(0.0, arrives - self._clock[0])
            self._clock[0] = max(self._clock[0], arrives)
            return values

        return result

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize(
    ("latency", "busy", "fewest", "most", "waiting"),
    [
        (0.0, 0.0, 399, 400, 0.0),  # after every step
        (0.3, 0.0, 20, 70, 0.6),
        (0.0, 1.2, 10, 60, 3.0),  # long messages at the beginning of every round
    ],
)
def test_late_results_of_agreements_are_not_waited_for(
    latency: float,
    busy: float,
    fewest: int,
    most: int,
    waiting: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """400 steps of 50 ms."""
    clock = [0.0]
    monkeypatch.setattr(ending.time, "perf_counter", lambda: clock[0])
    late = Late(clock, latency, busy)
    agreeing = ending.Agreement(late)
    for step in range(1, 401):
        clock[0] += 0.05
        assert agreeing.after_step(step, None) is None
    assert fewest <= late.starts <= most
    assert late.waited <= waiting


def test_a_signal_arrives_within_two_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, received = [0.0], None
    monkeypatch.setattr(ending.time, "perf_counter", lambda: clock[0])
    agreeing = ending.Agreement(Late(clock, latency=3.0))
    for step in range(1, 10_000):
        clock[0] += 0.2
        if received is None and step > 100:
            received = clock[0]
        if agreeing.after_step(step, signal.SIGTERM if received else None) is not None:
            break
    assert received is not None
    assert clock[0] - received <= 2 * max(ending.LONGEST, 3.0) + 0.4
