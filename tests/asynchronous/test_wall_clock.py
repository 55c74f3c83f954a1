"""Training in processes whose exchanges may be late, and that may be lost."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import train
from powergossip.errors import BadInput
from powergossip.events import packing, wall_clock
from powergossip.events.worker import Message
from powergossip.network import Processes, processes
from powergossip.network.resilient.worker_messages import LOST, Links
from powergossip.runs import files, metrics, output
from powergossip.runs.checkpoints import Checkpoints
from powergossip.training import ending
from powergossip.training.trainer import Trainer
from tests.harness import internet, launch
from tests.harness.asynchronous import (
    METHODS,
    SURVIVING,
    TINY,
    ULFM,
    at_step,
    failing,
    on_virtual_clock,
)
from tests.harness.training import built, recording, reproducible, select, trained


@pytest.fixture
def with_ulfm(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun's flag. None of these processes ends."""
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    monkeypatch.setattr(Links, "end_alone", lambda links: None)
    monkeypatch.setattr(train, "config", OmegaConf.structured(train.Config))


MEASURED = ("value", "bits", "messages")


def measured(rows: pd.DataFrame) -> dict[str, float]:
    """Each value, and the bits and messages at that moment, by the tags of the row."""
    return {
        f"{key} of {row | dict.fromkeys(MEASURED)}": row[key]
        for row in reproducible(rows)
        for key in MEASURED
    }


def own_rows(run: Trainer, whole: Trainer) -> torch.Tensor:
    return whole.parameters.x[list(run.network.workers)]


OTHERS: dict[str, dict[str, Any]] = {
    "normalized": {"optimizer": "choco", "learning": "gt-nsgd"},
    "copies": {"optimizer": "choco", "learning": "motef"},
    "adam": {"optimizer": "dpsgd", "learning": "quasi-global-momentum"}
    | {"local_optimizer": "adamw"},
    "corrections": {"optimizer": "dpsgd", "learning": "k-gt", "local_steps": 2},
    "momenta": {"optimizer": "power-gossip", "learning": "momentum-tracking"},
    "outer": {"optimizer": "choco", "learning": "gasloc", "local_steps": 2},
    "pull": {"optimizer": "dpsgd", "learning": "noloco"},
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_synchronous_exchanges_have_the_bits_of_the_virtual_clock(method, with_ulfm, monkeypatch):
    check_bits({**TINY, **METHODS[method]}, monkeypatch)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("method", OTHERS)
def test_so_do_those_of_other_learning_rules(method, with_ulfm, monkeypatch):
    check_bits({**TINY, **OTHERS[method]}, monkeypatch)


def check_bits(values, monkeypatch):
    monkeypatch.setattr(wall_clock.WallClock, "find_late", lambda *_: None)
    run, rows = trained(**values, **SURVIVING)
    expected, _ = on_virtual_clock(**values, scenario={})
    assert torch.equal(run.parameters.x, own_rows(run, expected))
    if processes().rank == 0:
        assert select(rows, "workers")["value"].tolist() == [4, 4]
        views = 8  # bits of a message's view, in whole bytes
        own = len(run.network.workers)
        bits = expected.network.bits[:own] + views * expected.network.messages[:own]
        assert run.network.bits.tolist() == bits.tolist()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("method", ["power", "momentum"])
def test_machines_with_a_ticket_have_the_same_bits(method, monkeypatch):
    monkeypatch.setattr(Links, "end_alone", lambda links: None)
    monkeypatch.setattr(wall_clock.WallClock, "find_late", lambda *_: None)
    values = {**TINY, **METHODS[method]}
    run, rows = trained(internet.under_mpi(), **values, **SURVIVING)
    expected, _ = on_virtual_clock(**values, scenario={})
    assert torch.equal(run.parameters.x, own_rows(run, expected))
    assert select(rows, "workers")["value"].tolist() == [4, 4], "in the rows of every machine"
    run.end()


def number_of_workers(folder: Path, again: tuple[int, ...] = ()) -> list[float]:
    """By epoch. again: epochs after which the run was resumed with another number."""
    chosen = select(metrics.load(folder), "workers")
    epochs = sorted([*range(1, len(chosen) + 1 - len(again)), *again])
    assert chosen["epoch"].tolist() == epochs, "each once, in order"
    return list(chosen["value"])


@pytest.mark.parametrize(
    ("method", "gossip", "ends"),
    [
        ("power", "synchronous", ("ERROR", "EXIT")),
        pytest.param("sign", "bounded", ("SIGKILL", "SIGKILL"), marks=pytest.mark.slow),
        pytest.param("duals", "asynchronous", ("ERROR", "SIGKILL"), marks=pytest.mark.slow),
        pytest.param("momentum", "synchronous", ("SIGKILL", "SIGKILL"), marks=pytest.mark.slow),
        pytest.param("tracking", "bounded", ("EXIT", "ERROR"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_without_lost_processes(method, gossip, ends, tmp_path):
    """Processes 0 and 2 are lost. The last epoch begins with a stop of process 3. Process 1 takes
    steps meanwhile, and process 3 catches up."""
    values = {**METHODS[method], "gossip": gossip, "num_epochs": 4}
    values |= {"use_decentralized_data": True, "data_of_lost": "redistributed"}
    events = [at_step(0, 5, ends[0]), at_step(2, 9, ends[1])]
    events.append(at_step(3, 12, "SIGSTOP", seconds=2))
    rows = failing(events, tmp_path / "run", code=LOST, **values)
    assert sorted(row["process"] for row in rows) == [1, 3]
    counts = number_of_workers(tmp_path / "run")
    assert counts == sorted(counts, reverse=True)
    assert (len(counts), counts[-1]) == (4, 2)
    info = json.loads((tmp_path / "run" / files.INFO_FILE).read_text())
    assert info[output.ENDING] == output.COMPLETE
    assert info["lost_workers"] == [0, 2]


def test_slow_processes_are_not_lost_and_a_kill_leaves_whole_checkpoints(tmp_path):
    """Processes are slow where data are loaded, and where a checkpoint is written."""
    folder = tmp_path / "run"
    events = [
        {"process": 2, "point": "load", "signal": "SLOW", "seconds": 1},
        {"process": 3, "point": "save", "count": 1, "signal": "SLOW", "seconds": 1},
        {"process": 0, "point": "save", "count": 2, "signal": "SIGKILL"},
    ]
    values: dict[str, Any] = {"num_epochs": 3, "checkpoint_interval": 1, "worker_timeout": 0.3}
    rows = failing(events, folder, code=LOST, **values, optimizer="dpsgd")
    assert sorted(row["process"] for row in rows) == [1, 2, 3]
    assert number_of_workers(folder) == [4, 4, 3]
    index = json.loads((folder / "checkpoints" / "index.json").read_text())
    assert [part["workers"] for part in index["last"]["parts"]] == [[1, 2], [2, 3], [3, 4]]
    for part in index["last"]["parts"]:
        file = folder / "checkpoints" / index["last"]["folder"] / part["file"]
        assert hashlib.sha256(file.read_bytes()).hexdigest() == part["sha256"]
    rows_at = index["last"]["facts"]["metrics_bytes"]
    assert len(metrics.kept_rows(folder / metrics.FILE, rows_at)) == rows_at > 0


@pytest.mark.slow
def test_a_run_without_lost_workers_resumes_with_new_ones_and_can_be_evaluated(tmp_path):
    """One that is complete stays complete."""
    folder = tmp_path / "run"
    values: dict[str, Any] = {"num_epochs": 2, "optimizer": "choco", "use_decentralized_data": True}
    failing([at_step(2, 5)], folder, code=LOST, **values)
    complete = (folder / metrics.FILE).read_bytes()
    failing([], folder, **values, resume=True, on_worker_loss="continue")
    assert (folder / metrics.FILE).read_bytes() == complete
    found = evaluated(folder, Processes(), **SURVIVING, **values)
    assert found["worker"].dropna().tolist() == [0, 1, 3]
    values |= {"num_epochs": 3, "learning_rate": 0.05, "resume": True}
    rows = failing([], folder, **values)
    assert sorted(row["process"] for row in rows) == [0, 1, 2, 3]
    assert number_of_workers(folder, again=(2,)) == [4, 3, 4, 4]
    fewer = failing([], folder, size=3, **{**values, "num_epochs": 4, "n_workers": 3})
    assert sorted(row["worker"] for row in fewer) == [0, 1, 2]
    assert number_of_workers(folder, again=(2, 3)) == [4, 3, 4, 4, 3, 3]


def evaluated(folder: Path, who: Processes, **values: Any) -> pd.DataFrame:
    """The accuracy of the workers in an evaluation of the last checkpoint."""
    rows: list[dict[str, Any]] = []
    asked = {**TINY, **values, "evaluate_only": True}
    built(recording(rows), who=who, resume_from=folder, **asked).evaluate()
    return select(pd.DataFrame(rows), "accuracy", split="test") if rows else pd.DataFrame()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("deaths", [[], [{"worker": 3, "at": 2.5}]])
def test_a_run_on_the_virtual_clock_is_evaluated_by_several_processes(deaths, tmp_path):
    """One that has lost workers, by one process only."""
    who, alone, folder = processes(), Processes(), Path(processes().broadcast(str(tmp_path)))
    values = {"optimizer": "dpsgd", "num_epochs": 1, "scenario": {"deaths": deaths}}
    if who.rank == 0:
        built(who=alone, **{**TINY, **values}).train(Checkpoints(folder, alone))
    who.gather(None)  # the checkpoint is written
    expected = evaluated(folder, alone, **values)
    if deaths:
        with pytest.raises(BadInput, match=r"^evaluate_only=true: use one process"):
            evaluated(folder, who, **values)
        return
    found = evaluated(folder, who, **values)
    if who.rank == 0:
        assert measured(found) == pytest.approx(measured(expected), rel=1e-6)
        assert len(found) == 4


# --- Messages and rows ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64])
@pytest.mark.parametrize("view", [None, (0, 1, 0), (0, 1, 4)])
def test_messages_keep_their_bits(dtype, view):
    part = torch.arange(5).to(dtype)
    message = Message(7, 300, view or (0, 0, 0), part)
    payload = packing.packed(message, view is not None)
    found = packing.unpacked(7, payload, part, (0, 0, 0), view is not None)
    assert (found.k, found.incarnation, found.view) == (7, 300, message.view)
    assert found.part is not None
    assert torch.equal(found.part, part)
    assert found.part.dtype == dtype
    if view is not None:
        of_view = payload.numel() - packing.packed(message, False).numel()
        assert 8 * (of_view - 1) == packing.bits_of_view(view)


def test_the_next_writer_adds_the_rows_that_are_missing(tmp_path):
    config = OmegaConf.create({"overwrite": False, "tensorboard": False})
    values = {"value": 1.0, "epoch": 1, "bits": 2, "messages": 3, "seconds": 4.0}
    first = output.Output(str(tmp_path), config)
    first.write("workers", values, {})
    first.write("accuracy", values, {"split": "test"})
    with (tmp_path / metrics.FILE).open("ab") as file:
        file.write(b'{"name": "half')
    rows = [("workers", values, {}), ("accuracy", {**values, "seconds": 9.0}, {"split": "test"})]
    rows.append(("accuracy", values, {"split": "valid"}))
    output.take_over(tmp_path, config, rows, 1).close(output.COMPLETE)
    found = metrics.load(tmp_path)
    assert found["name"].tolist() == ["workers", "accuracy", "accuracy"]
    assert found["seconds"].tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": "push-sum"}, "on_worker_loss"),
        ({"optimizer": "powersgd"}, "optimizer"),
        ({"optimizer": "deepsqueeze"}, "optimizer"),
        ({"optimizer": "dpsgd", "topology": "one-peer-exponential"}, "topology"),
        ({"learning": "relay-sgd", "topology": "chain"}, "on_worker_loss"),
    ],
)
def test_methods_without_exchanges_by_edges_are_rejected(changes, key, with_ulfm):
    with pytest.raises(ValueError, match=key):
        built(**{**TINY, **SURVIVING, **changes})


def test_a_run_without_some_workers_names_them() -> None:
    words = ending.complete_without([1, 5, 6, 7, 9], 10)
    assert re.findall(r"\d+(?:-\d+)?", words) == ["0", "2-4", "8", "1", "5-7", "9"]
    assert "lost" not in ending.complete_without([], 10)


@pytest.mark.parametrize(
    "values",
    [
        ("optimizer=moniqua", "on_worker_loss=continue"),  # no exchanges by edges
        (*(f"{key}={json.dumps(value)}" for key, value in TINY.items()), "learning_rate=1e30"),
    ],
    ids=["rejected", "diverged"],
)
def test_only_the_first_process_ends_with_another_code_than_0(
    values: tuple[str, ...], tmp_path: Path
) -> None:
    """With ULFM, mpirun may hang after two processes that do."""
    shell = ("sh", "-c", '"$0" "$@"; echo "code $?"')
    survives = [*values, "n_workers=3", "on_worker_loss=continue"]
    ended = launch.python(
        "train.py",
        *survives,
        "--output-dir",
        tmp_path / "run",
        processes=3,
        options=(*ULFM, *shell),
    )
    codes = [line for line in ended.stdout.splitlines() if line.startswith("code")]
    first = "code 2" if "optimizer=moniqua" in values else "code 1"
    assert sorted(codes) == ["code 0", "code 0", first], ended.stdout + ended.stderr
    assert ended.stderr.count("error:") == 1
