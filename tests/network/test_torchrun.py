"""torchrun in place of mpirun: the same rows, bits and checkpoints; launches that nothing connects;
signals, crashes and lost processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powergossip import exits, topologies
from powergossip.errors import BadInput, PeerLost
from powergossip.network import (
    Conversation,
    Gather,
    Mean,
    Network,
    Processes,
    ToAll,
    ToEach,
    checked_barrier_at_exit,
    interfaces,
    processes,
    processes_of,
    standstill,
)
from powergossip.network import (
    launch as launching,
)
from powergossip.network.processes import in_parts
from powergossip.network.staging import Connection
from powergossip.network.torch import channels, rendezvous
from powergossip.network.torch.channels import GlooChannel, NCCLChannel, Waiters
from powergossip.network.torch.processes import GroupProcesses
from powergossip.runs.checkpoints import Checkpoints
from tests.harness import launch
from tests.harness.helpers import wait_until
from tests.harness.order import check_order, record

TINY = ["task_architecture=MLP", "num_epochs=2", "max_steps_per_epoch=4", "log_verbosity=0"]

# Runs that are compared between transports: arguments of train.py.
RUNS: dict[str, list[str]] = {
    "power-gossip": ["optimizer=power-gossip"],
    "time-varying": ["optimizer=dpsgd", "topology=one-peer-exponential", "n_workers=4"],
    "choco": ["optimizer=choco", "optimizer_compressor=top-k", "n_workers=4"],
    "all-reduce": ["optimizer=all-reduce", "n_workers=4"],
    "powersgd": ["optimizer=powersgd"],
    "dgc": ["optimizer=dgc"],
    "hook": ["optimizer=ddp-powersgd", "optimizer_start_iteration=2"],
}
DRIVER = """
import json, sys, warnings
import gossip_run, train
from powergossip.runs import configuration
from powergossip.training import recorder
warnings.simplefilter("ignore")
recorder.report = lambda *_: None  # a table and a figure take longer than these runs

def main(arguments):
    for name, asked in json.loads(arguments[1]).items():
        program = gossip_run if name == "consensus" else train
        program.main([*asked, "--output-dir", f"{arguments[0]}/{name}"])

configuration.run_entry_point(main)
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows but times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in found
        if row["name"] != "phase_seconds"
    ]


@pytest.mark.parametrize(
    "count", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_rows_are_the_same_to_the_bit_and_checkpoints_resume_under_the_other(
    count: int, tmp_path: Path
) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    consensus = [
        "n_workers=4",
        "matrix_size=8",
        "num_steps=20",
        "algorithm=[power_gossip,sign_choco]",
    ]
    chosen = RUNS if count == 4 else ("power-gossip", "dgc", "hook")
    runs = {name: [*TINY, *RUNS[name]] for name in chosen}
    runs["consensus"] = [*consensus, "hyperparameter_num_samples=3", "log_verbosity=0"]
    resumed = ("power-gossip", "dgc")[: count // 2]
    runs |= {f"{name}, half": [*runs[name], "num_epochs=1"] for name in resumed}
    for launcher in ("mpirun", "torchrun"):
        ended = launch.python(
            driver, tmp_path / launcher, json.dumps(runs), processes=count, launcher=launcher
        )
        assert ended.returncode == 0, ended.stderr
    directions = [("mpirun", "torchrun"), ("torchrun", "mpirun")][: count // 2]
    for launcher, other in directions:
        folder = tmp_path / f"{launcher}-{other}"
        for name in resumed:
            shutil.copytree(tmp_path / launcher / f"{name}, half", folder / name)
        whole = {name: [*runs[name], "resume=true"] for name in resumed}
        ended = launch.python(driver, folder, json.dumps(whole), processes=count, launcher=other)
        assert ended.returncode == 0, ended.stderr
    for name in runs:
        assert rows(tmp_path / "torchrun" / name) == rows(tmp_path / "mpirun" / name), name
        information = json.loads((tmp_path / "torchrun" / name / "info.json").read_text())
        assert name == "consensus" or information["transport"] == "gloo"
    for launcher, other in directions:
        for name in resumed:
            assert rows(tmp_path / f"{launcher}-{other}" / name) == rows(
                tmp_path / "mpirun" / name
            ), name


# --- Launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "arguments", "named"),
    [
        # One process that hosts all workers, also in a script of sbatch, which has SLURM_NTASKS.
        ({"WORLD_SIZE": "1", "RANK": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, [], None),
        ({"WORLD_SIZE": "4", "RANK": "0"}, [], "WORLD_SIZE=4"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, [], "SLURM_STEP_NUM_TASKS=8"),
        (
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4"},
            ["distributed_backend=mpi"],
            "WORLD_SIZE=4",
        ),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["distributed_backend=gloo"], "SLURM_STEP_NUM_TASKS=8"),
        ({}, ["distributed_backend=smoke-signals"], "distributed_backend=smoke-signals"),
        (
            {},
            ["distributed_backend=gloo", "distributed_init_file=new", "n_workers=2", "rank=2"],
            "rank=2",
        ),
    ],
    ids=str,
)
def test_a_launch_of_processes_that_nothing_connects_is_bad_input(
    variables: dict[str, str], arguments: list[str], named: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "library.py"
    script.write_text(
        "import torch\n"
        "from powergossip.optimizers import GossipOptimizer\n"
        "parameters = [torch.nn.Parameter(torch.zeros(2, 2))]\n"
        "GossipOptimizer(torch.optim.SGD(parameters, lr=0.1), 'power-gossip')\n"
    )
    folder = tmp_path / "run"
    program = ["train.py", *TINY, "n_workers=2", *arguments, "--output-dir", str(folder)]
    programs = [program] if arguments else [[str(script)], program]
    for words in programs:
        ended = launch.python(*words, variables=variables)
        if named is None:
            assert ended.returncode == 0, ended.stderr
            continue
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert line.startswith("error: ")
        assert named in line
        assert not folder.exists()


def pair(folder: Path, *words: str, variables: dict[str, str] | None = None) -> list[str]:
    """The output of two programs that no launcher connects. Each has its rank as a last word and,
    if there are variables, as one."""
    environment = {**os.environ, "PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1"}
    programs = [
        subprocess.Popen(
            [*launch.stand_in(), *words, str(rank)],
            cwd=folder,
            env=environment | ({**variables, "RANK": str(rank)} if variables else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [program.communicate(timeout=120)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    return outputs


ASKS = """
import os, sys
import torch.distributed as dist
from powergossip.network import processes

how = sys.argv[1]
if how == "initialized":
    rank, file = int(sys.argv[2]), os.path.abspath("of-the-user")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
comm = processes("gloo" if how == "gloo" else "auto")
assert comm.gather(comm.rank) == [0, 1]
if comm.rank == 0:
    print(how, comm.size, comm.transport)
"""


@pytest.mark.timeout(200)
def test_the_launcher_decides(tmp_path: Path) -> None:
    """torchrun comes before the variables of an mpirun that started it. A group that the program
    has made is used. With distributed_backend=gloo, so are mpirun and the variables of torch."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    of_mpirun = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    ended = launch.python(script, "torchrun", processes=2, launcher="torchrun", variables=of_mpirun)
    assert ended.stdout.split() == ["torchrun", "2", "gloo"], ended.stderr
    ended = launch.python(script, "gloo", processes=2)
    assert ended.stdout.split() == ["gloo", "2", "gloo"], ended.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for how, given in (("initialized", None), ("gloo", variables)):
        first, _ = pair(tmp_path, str(script), how, variables=given)
        assert first.split() == [how, "2", "gloo"]


def test_an_interface_that_is_not_here_is_one_sentence_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process of each host says it: the others may have no such error."""
    monkeypatch.setattr(exits, "is_first", lambda: False)
    for value in ("nope", "nope,10.9.8.0/24"):
        monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", value)
        with pytest.raises(BadInput, match=rf"if_include={value}: use .*lo \(127.0.0.1\)") as found:
            interfaces.check("OMPI_MCA_btl_tcp_if_include")
        for local, speaks in (("0", True), ("1", False)):
            monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local)
            assert exits.speaks_of(found.value) == speaks
    for value in ("lo", "127.0.0.0/8,nope", "127.0.0.1/8"):
        monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", value)
        interfaces.check("OMPI_MCA_btl_tcp_if_include")


def test_a_process_that_waits_for_others_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that finds no interface to others for the host's name takes the default route's."""
    monkeypatch.delenv(rendezvous.GLOO, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "7")
    monkeypatch.setattr(rendezvous, "address_of", {"here": "127.0.1.1"}.get)
    monkeypatch.setattr(rendezvous, "interface_towards", {rendezvous.ANYWHERE: "lo"}.get)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused\nat a line")

    def waiting(_: Any, others: Any, text: str) -> AbstractContextManager[None]:
        said.append(text)
        return nullcontext()

    said: list[str] = []
    monkeypatch.setattr(standstill, "waiting", waiting)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", refuse)
    with pytest.raises(BadInput, match=r"^no connection \(refused\); tried .*") as found:
        rendezvous.start_group()
    assert len(said) == 1
    for text in (*said, str(found.value)):
        assert "MASTER_ADDR=here (127.0.1.1, this host alone), MASTER_PORT=7, interface lo" in text
    monkeypatch.delenv(rendezvous.GLOO)


def test_a_process_that_is_lost_at_the_end_is_reported_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python would print a traceback of a function at exit, and go on."""

    class Lost(Processes):
        def checked_barrier(self, *_: Any) -> None:
            raise PeerLost("the connection to another process is lost")

    at_exit: list[Any] = []
    reported: list[BaseException] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: reported.append(error))
    pair = Lost()
    pair.size = 2
    checked_barrier_at_exit(pair, lambda: None)
    at_exit[0]()
    assert [type(error) for error in reported] == [PeerLost]


def test_processes_meet_in_a_file_as_in_published_drivers(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, train\n"
        "train.config['n_workers'] = 2\n"
        "train.config['rank'] = int(sys.argv[1])\n"
        "train.config['distributed_backend'] = 'gloo'\n"
        "train.config['distributed_init_file'] = 'meeting'\n"
        "for item in ('task_architecture=MLP', 'num_epochs=1', 'max_steps_per_epoch=4'):\n"
        "    key, value = item.split('=')\n"
        "    train.config[key] = int(value) if value.isdigit() else value\n"
        "train.output_dir = 'run'\n"
        "train.main()\n"
    )
    pair(tmp_path, "driver.py")
    information = json.loads((tmp_path / "run" / "info.json").read_text())
    assert (information["processes"], information["transport"]) == (2, "gloo")


# --- Signals, crashes, lost processes ------------------------------------------------------------

SLOW = """
import os, pathlib, signal, sys, time, train
from powergossip.network import processes
from powergossip.runs import configuration
from powergossip.training import trainer
from powergossip.training.stepping import Together
gradient, how = Together.gradient, sys.argv.pop(1)
trainer.PATIENCE = 1.0 if how == "stall" else trainer.PATIENCE

def slow(run, epoch, step):
    rank = run.view.processes.rank
    if run.step == 10:
        pathlib.Path(f"process-{rank}").write_text(str(os.getpid()))
        while rank == 1 and how != "train" and len(list(pathlib.Path().glob("process-*"))) < 3:
            time.sleep(0.01)
        if rank == 1 and how == "raise":
            raise RuntimeError("a fault of the user's own")
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "stall":
            time.sleep(1000)
    time.sleep(0.02)
    return gradient(run, epoch, step)

Together.gradient = slow
configuration.run_entry_point(train.main)
"""


class Job:
    """torchrun with three processes that train slowly, until `end`."""

    def __init__(self, folder: Path, how: str):
        (folder / "driver.py").write_text(SLOW)
        self.folder = folder
        words = ["driver.py", how, *TINY, "num_epochs=1000", "max_steps_per_epoch=100"]
        words += ["--output-dir", "run"]
        command = launch.torchrun(3, [*launch.stand_in(), *words])
        self.program = subprocess.Popen(
            [*launch.stand_in(), *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def at_step_10(self) -> None:
        while len(list(self.folder.glob("process-*"))) < 3:
            assert self.program.poll() is None, self.program.communicate()[0]
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        try:
            text, _ = self.program.communicate(timeout=60)
        finally:
            self.program.kill()
        return self.program.returncode, text


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_end_of_one_process_ends_all(how: str, tmp_path: Path) -> None:
    job = Job(tmp_path, how)
    job.at_step_10()
    code, text = job.end()
    assert code != 0
    if how == "raise":
        assert text.count("RuntimeError: a fault of the user's own") == 1, text
        assert 'driver.py", line' in text
        assert "process 1 of 3" in text
    assert Checkpoints(tmp_path / "run", Processes()).describe() is None
    assert "resume=true" not in text


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_writes_a_checkpoint(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, "train")
    job.at_step_10()
    job.program.send_signal(signal.Signals[name])
    _, text = job.end()
    last = Checkpoints(tmp_path / "run", Processes()).describe()
    assert last is not None, text
    assert re.search(rf"error: stopped by SIG\w+ after step {last['step']} ", text), text
    assert re.search("torchrun --nproc-per-node 3 .*train.py --output-dir run resume=true", text)


@pytest.mark.timeout(150)
def test_sigterm_without_all_processes_gives_up(tmp_path: Path) -> None:
    """Process 1 stalls in its code. The others wait for its message, in gloo."""
    job = Job(tmp_path, "stall")
    job.at_step_10()
    time.sleep(1)
    for rank in (0, 2):
        os.kill(int((tmp_path / f"process-{rank}").read_text()), signal.SIGTERM)
    code, text = job.end()
    assert code != 0
    assert "SIGTERM, without a checkpoint" in text
    assert Checkpoints(tmp_path / "run", Processes()).describe() is None


@pytest.mark.timeout(150)
def test_uneven_steps_end_in_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(
        "import sys, torch\n"
        "from powergossip.network import processes\n"
        "from powergossip.optimizers import GossipOptimizer\n"
        "parameter = torch.nn.Parameter(torch.zeros(2, 2))\n"
        "optimizer = GossipOptimizer(torch.optim.SGD([parameter], lr=0.1), 'power-gossip')\n"
        "for _ in range(3 + processes().rank):\n"
        "    optimizer.zero_grad()\n"
        "    parameter.sum().backward()\n"
        "    optimizer.step()\n"
        "if sys.argv[1] == 'destroy':\n"
        "    torch.distributed.destroy_process_group()\n"
    )
    ended = launch.python(script, "keep", processes=2, launcher="torchrun", timeout=60)
    assert ended.returncode != 0
    assert "error: process 0 is at the end of the program after 3 steps, process 1" in ended.stderr


# --- Groups and the order of messages ------------------------------------------------------------


def all_kinds(network: Network) -> Conversation:
    x = torch.ones(network.rows, 5)
    each = torch.ones(
        network.rows, max(1, network.edges[network.round % len(network.edges)].n_out), 3
    )
    yield ToAll(x), Mean(x.clone())
    yield ToEach(each)
    yield Gather([torch.ones(int(worker)) for worker in network.workers])
    yield Mean(x)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(("hosted", "kind"), [(1, "gloo"), (2, "nccl")])
def test_batches_have_one_global_order(
    hosted: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL requires this order. It holds with several conversations in flight and with processes
    that have no neighbors, for gloo's channel and for the code of NCCL's in a group of gloo.

    Long messages are split, and empty ones are left out.
    """
    monkeypatch.setitem(in_parts.__globals__, "LONGEST", 3)  # bytes, less than an element
    comm, cpu = group_of_all(), torch.device("cpu")
    channel: Any = GlooChannel(comm.gloo, direct=True, in_order=True)
    if kind == "nccl":
        channel = NCCLChannel(comm.gloo, comm.torch_group("gloo"), cpu)
    connection = Connection(comm, cpu, channel=channel)
    batches = record(comm.gloo)
    for name in ("ring", "one-peer-exponential", "star", "round-robin"):
        topology = topologies.make(name, hosted * comm.size)
        check_sums(Network(topology, connection=connection))
        network = Network(topology, connection=connection)
        other = Network(topology, connection=connection)
        for _ in range(3):
            first, second = network.start(all_kinds(network)), other.start(all_kinds(other))
            for _ in range(comm.rank):
                network.progress()
            second.finish()
            first.finish()
    everywhere = comm.gather(batches)
    check_order(everywhere)
    assert len(batches) > 100
    sizes = [size for _, *both in batches for of in both for size in of.values()]
    assert min(sizes) > 0
    broken = [list(batches) for batches in everywhere]
    broken[0][3], broken[0][4] = broken[0][4], broken[0][3]
    with pytest.raises(ValueError, match="batch 3"):
        check_order(broken)


def check_sums(network: Network) -> None:
    """Messages of the channel have the right values."""
    own = torch.tensor(network.workers, dtype=torch.float32)[:, None]

    def conversation() -> Conversation:
        mean, received = yield Mean(own.clone()), ToAll(own)
        assert mean.tolist() == [[(network.n_workers - 1) / 2]]
        there = network.neighbors >= 0
        assert (received[..., 0][there] == network.neighbors[there]).all()
        pieces = yield Gather([worker.repeat(int(worker)) for worker in own])
        assert [piece.tolist() for piece in pieces] == [[i] * i for i in range(network.n_workers)]

    network.run(conversation())


_all: list[GroupProcesses] = []


def group_of_all() -> GroupProcesses:
    """All processes by gloo, whatever connects the tests."""
    if isinstance(processes(), GroupProcesses):
        return processes()  # type: ignore[return-value]
    if not _all:
        from powergossip.network.torch.rendezvous import group_under_mpi

        _all.append(GroupProcesses(group_under_mpi(processes())))
    return _all[0]


@pytest.mark.parallel([2, 4])
def test_processes_of_a_group_are_its_members() -> None:
    comm = group_of_all()
    everyone = comm.gather(comm.rank)
    group = (
        torch.distributed.new_group(everyone[:2], use_local_synchronization=True)
        if (comm.rank < 2)
        else None
    )
    if comm.rank < 2:
        pair = processes_of(group)
        assert processes_of(group) is pair
        assert (pair.rank, pair.size) == (comm.rank, 2)
        assert pair.gather(comm.rank) == [0, 1]
        assert pair.sum(np.array([1.5, comm.rank])).tolist() == [3.0, 1.0]
        assert pair.start_max(np.array([comm.rank, -comm.rank]))().tolist() == [1, 0]
        array = np.array([comm.rank + 1.0])
        pair.broadcast_array(array)
        assert array.tolist() == [1.0]
        network = Network(topologies.make("ring", 4), pair)
        network.run(all_kinds(network))
    assert comm.gather(None) == [None] * comm.size


class Message:
    """A message that arrives when it is given."""

    def __init__(self) -> None:
        self.arrived = threading.Event()

    def wait(self) -> None:
        assert self.arrived.wait(60)


def test_messages_arrive_in_any_order() -> None:
    """A message that arrives early is known before those that were tested first."""
    waiters, messages = Waiters(), [Message() for _ in range(3)]
    outcomes = [waiters.submit([message]) for message in messages]  # type: ignore[list-item]
    for message, outcome in zip(messages[::-1], outcomes[::-1], strict=True):
        assert not outcome.done()
        message.arrived.set()
        wait_until(outcome.done, seconds=5)


def test_a_message_that_fails_in_a_thread_raises_where_it_is_waited_for() -> None:
    """As where it is waited for without a thread."""

    class Failing:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    outcome = Waiters().submit([Failing()])  # type: ignore[list-item]
    wait_until(outcome.done, seconds=5)
    for wait in (outcome.result, partial(channels.wait_for, [Failing()])):  # type: ignore[list-item]
        with pytest.raises(PeerLost):
            wait()


def test_only_groups_and_communicators_are_processes() -> None:
    with pytest.raises(launching.BadInput, match="process_group=7"):
        processes_of(7)
