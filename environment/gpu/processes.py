"""Several processes on the GPUs of this machine: gloo with messages staged through host memory, and
NCCL where every process has a GPU of its own."""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from environment.gpu import cases
from environment.gpu.findings import Findings, Setting, difference
from environment.gpu.order import check_order, record
from powergossip import algorithms
from powergossip.network import Conversation, Mean, Network, Processes, ToAll, processes_of
from powergossip.network.torch.processes import GroupProcesses

STEPS = 3
SECONDS = 100.0  # after which processes that have not ended are killed


class Launch(NamedTuple):
    """
    transport  # gloo or nccl
    size       # processes
    """

    transport: str
    size: int


def run(setting: Setting, findings: Findings) -> None:
    """Check each transport in processes of its own."""
    shared = Launch("gloo", 2)
    launches = [shared]
    if setting.gpus > 1:
        size = max(n for n in range(2, setting.gpus + 1) if cases.WORKERS % n == 0)
        launches.append(Launch("nccl", size))
    elif setting.on_gpu:
        launches.append(Launch("nccl", 1))
        findings.text(
            "There is one GPU. NCCL needs one for each process, so that only its all-reduce with "
            "itself is checked."
        )
    for launch in launches:
        member = _check_alone if launch.size == 1 else _check
        start(setting, findings, launch, member)
    if not setting.quick and setting.has_training:
        check_torchrun(setting, findings)


Member = Callable[[Setting, Findings, Launch, int], None]


def start(setting: Setting, findings: Findings, launch: Launch, member: Member) -> None:
    """Run `member` in each process of a launch. One that fails is a failure of the check."""
    folder = setting.folder / f"{launch.transport}-{launch.size}"
    folder.mkdir()
    fork = multiprocessing.get_context("fork")  # GPUs are not in use before
    members = [
        fork.Process(target=_run_member, args=(setting, findings, launch, rank, folder, member))
        for rank in range(launch.size)
    ]
    for process in members:
        process.start()
    for process in members:
        process.join(SECONDS)
        if process.exitcode != 0:  # also None: it has not ended
            for other in members:
                other.kill()
            break
    for process in members:
        process.join()
    errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
    for text in errors:
        findings.text(f"```\n{text}```")
    codes = [process.exitcode for process in members]
    if any(codes):
        findings.failure(f"{launch.transport}: {launch.size} processes ended with codes {codes}")


def _run_member(
    setting: Setting, findings: Findings, launch: Launch, rank: int, folder: Path, member: Member
) -> None:
    """The life of one process: connect with the others, check, and end."""
    try:
        if setting.on_gpu:
            torch.cuda.set_device(rank % setting.gpus)
        dist.init_process_group(
            "gloo" if launch.size > 1 else launch.transport,
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=launch.size,
        )
        member(setting, findings, launch, rank)
        dist.barrier()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _check(setting: Setting, findings: Findings, launch: Launch, rank: int) -> None:
    """Check the channel, an exchange, both all-reduces, all rules, and the order of messages."""
    processes = processes_of(dist.group.WORLD)
    assert isinstance(processes, GroupProcesses)
    batches = record(processes.gloo)
    device = torch.device("cpu")
    if setting.on_gpu:
        device = torch.device("cuda", rank % setting.gpus)
    stage = launch.transport == "gloo"
    rows = []
    # All processes compute a row, and the first one reports the worst of all.
    for name, wrong in _results(device, processes, launch, stage, setting.quick):
        sentences = sorted({text for text in processes.gather(wrong) if text})
        if rank == 0:
            shown = f"{launch.transport}, {name}: {'; '.join(sentences)}"
            rows.append((name, findings.require(not sentences, shown)))
    orders = processes.gather(batches)
    if rank == 0:
        try:
            check_order(orders)
            rows.append(("order of the messages", "ok"))
        except ValueError as error:
            rows.append(("order of the messages", findings.require(False, str(error))))
        memory = "staged through host memory" if stage else "from GPU to GPU"
        findings.text(
            f"{launch.size} processes with {cases.WORKERS // launch.size} workers each, "
            f"{launch.transport}, {memory}. Rules are compared with one process on the CPU, after "
            f"{STEPS} steps."
        )
        findings.table(("check", "result"), rows)


def _results(
    device: torch.device, processes: Processes, launch: Launch, stage: bool, quick: bool
) -> Iterator[tuple[str, str]]:
    """(check, what is wrong in this process, or nothing)"""

    def network(**more: Any) -> Network:
        return cases.network(device, processes, stage=stage or None, **more)

    made = network()
    found = (
        None if made.connection.channel is None else made.connection.channel.name,
        made.connection.stage,
    )
    yield "transport", "" if found == (launch.transport, stage) else f"channel, stage = {found}"

    x = cases.values(seed=0)
    own = slice(made.workers.start, made.workers.stop)
    received: list[Tensor] = []

    def exchange(tensor: Tensor) -> Conversation:
        received.append((yield ToAll(tensor)).clone())

    made.run(exchange(x[own].to(device)))
    expected = x[made.neighbors.cpu()]
    yield "exchange", "" if torch.equal(received[0].cpu(), expected) else "wrong elements received"

    def mean(tensor: Tensor) -> Conversation:
        received.append((yield Mean(tensor)).clone())

    for kind in ("own", "native"):
        network(all_reduce=kind).run(mean(x[own].to(device)))
        apart = difference(received[-1][0], x.mean(0))
        yield f"all-reduce, {kind}", str(apart) if apart.off else ""

    for case in cases.averaging_cases(some=quick):
        results = []
        starts = x[own].clone().to(device), x.clone()
        for used, start in zip((network(), cases.network(x.device)), starts, strict=True):
            rule = algorithms.make(case.name, used, cases.layout(), **case.options)
            for _ in range(STEPS):
                used.run(rule.step(start))
            results.append(start)
        apart = difference(results[0], results[1][own])
        yield case.label, str(apart) if apart.off > case.allowed else ""


def _check_alone(setting: Setting, findings: Findings, launch: Launch, rank: int) -> None:
    """An all-reduce by NCCL in one process."""
    x = torch.arange(1000.0, device=setting.device)
    total = x.clone()
    dist.all_reduce(total)
    result = findings.require(torch.equal(total, x), "nccl: an all-reduce of one process changes x")
    findings.table(("check", "result"), [("NCCL's all-reduce, 1 process", result)])


def check_torchrun(setting: Setting, findings: Findings) -> None:
    """`torchrun train.py` in two processes ends with the parameters of one process."""
    from environment.gpu.runs import ARGUMENTS, WORKERS, parameters

    root, folder = Path(__file__).parents[2], setting.folder / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launchers = {"one": [sys.executable], "two": [*command, "--nproc-per-node=2"]}
    for name, launcher in launchers.items():
        device = setting.device.type
        given = ["train.py", *ARGUMENTS, f"device={device}", "--output-dir", str(folder / name)]
        ended = subprocess.run(
            [*launcher, *given],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if ended.returncode:
            findings.text(f"```\n{ended.stderr[-3000:]}\n```")
            findings.failure(f"{name} processes of train.py: exit code {ended.returncode}")
            return
    apart = difference(parameters(folder / "two"), parameters(folder / "one"))
    result = findings.require(not apart.off, f"torchrun: {apart}")
    findings.text(f"`torchrun train.py`, {WORKERS} workers in two processes instead of one:")
    findings.table(("difference of the parameters", "result"), [(apart, result)])
