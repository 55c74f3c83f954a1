"""The launcher of a run, and the connection of its processes."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from operator import is_
from pathlib import Path
from typing import Any

import torch.distributed as dist

from powergossip import exits, kernels, launcher, ulfm
from powergossip.errors import BadInput
from powergossip.network import interfaces
from powergossip.network.processes import ChildProcess, Processes

BACKENDS = ("auto", "mpi", "gloo", "nccl")

_found: Processes | None = None
_known: list[tuple[tuple[Any, ...], Processes]] = []  # groups and communicators, their processes


def processes(
    backend: str = "auto",
    file: str | None = None,
    rank: int = 0,
    size: int = 1,
    ticket: str | None = None,
    ticket_options: Mapping[str, Any] | None = None,
    definition: str = "",
) -> Processes:
    """The processes of this run. The first call finds them, and connects them if they are several.

    An uncaught exception in one of several processes then ends them all.

    In a child of one of several processes, such as a worker of a data loader, these have its rank
    and size, and cannot communicate.

    Args:
        backend: mpi, gloo, nccl, or auto for the first of torch.distributed if torchrun has started
            this process, MPI if mpirun or another launcher with a PMI has, the default group of
            torch.distributed if the program has made it, and this process alone. gloo and nccl also
            accept the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, a `file`, and
            mpirun, whose processes then exchange their addresses by MPI.
        file: A file in a common folder, where processes that no launcher has started find each
            other: this one has index `rank` of `size`.
        ticket: "new", a ticket, or the name of a run, for processes on machines anywhere. A new run
            has `size` machines.
        ticket_options: See internet.meeting.Options.
        definition: Text of the first machine, for the others.

    Raises:
        BadInput: For several processes without a connection: each would carry out the run alone.
    """
    global _found
    if _found is None:
        try:
            if ticket is None:
                _found = _find(backend, file, rank, size)
            else:
                _found = _by_ticket(backend, ticket, size, ticket_options or {}, definition)
        except BadInput:
            sys.excepthook = _reject
            raise
        use(_found)
    elif backend != "auto" and _found.size > 1 and (backend == "mpi") != _found.is_mpi:
        raise BadInput(
            f"distributed_backend={backend}: this program already uses {_found.transport}; "
            "choose the backend in its first use of processes()"
        )
    return _found


def use(found: Processes) -> None:
    """Make these the processes of this run. All of them call it."""
    global _found
    _found = found
    if isinstance(found, ChildProcess):
        return
    exits.connect(found)
    found.set_threads()
    if found.size > 1:
        launcher.mark_connected(found.rank, found.size, found.local_rank, found.local_size)
        exits.end_together(found)
        kernels.agree(found)
    else:
        exits.end_with_sentences()


def processes_of(group: Any = None) -> Processes:
    """The processes of a group: None for all processes of the run, a ProcessGroup of
    torch.distributed, a communicator of mpi4py, or Processes.

    All members call it. They get the same object each time. Messages use a copy of the group.
    """
    if group is None:
        return processes()
    if isinstance(group, Processes):
        return group
    if isinstance(group, dist.ProcessGroup):
        return _group_processes(group)
    if _is_communicator(group):
        from powergossip.network.mpi import MPIProcesses

        return _known_or(
            lambda: MPIProcesses(group.Dup()) if group.size > 1 else Processes(), group
        )
    raise BadInput(
        f"process_group={group!r}: use a ProcessGroup of torch.distributed that has this process, "
        "or a communicator of mpi4py"
    )


def _is_communicator(group: Any) -> bool:
    return "mpi4py.MPI" in sys.modules and isinstance(group, sys.modules["mpi4py.MPI"].Intracomm)


def _known_or(make: Callable[[], Processes], *groups: Any) -> Processes:
    """The processes of these groups. The first call makes and connects them."""
    for known, found in _known:
        if len(known) == len(groups) and all(map(is_, known, groups)):
            return found
    made = make()
    if made.size > 1:
        exits.end_together(made)
        kernels.agree(made)
    _known.append((groups, made))
    return made


def _group_processes(group: dist.ProcessGroup, backend: str = "auto") -> Processes:
    from powergossip.network.torch.processes import GroupProcesses

    def make() -> Processes:
        alone = dist.get_world_size(group) == 1
        return Processes() if alone else GroupProcesses(group, backend)

    return _known_or(make, group)


def processes_of_replicas(group: dist.ProcessGroup, shards: dist.ProcessGroup) -> Processes:
    """The processes with the same shard of all replicas, where `shards` are the processes of a
    replica.

    All processes of the replicas call it.
    """
    if dist.get_world_size(group) == 1:
        return Processes()
    from powergossip.network.torch.processes import ReplicaProcesses

    return _known_or(lambda: ReplicaProcesses(group, _group_processes(shards)), group, shards)


def _find(backend: str, file: str | None, rank: int, size: int) -> Processes:
    if backend not in BACKENDS:
        raise BadInput(f"distributed_backend={backend}: use {', '.join(BACKENDS)}")
    if (place := launcher.place_of_parent()) and not dist.is_initialized():
        return ChildProcess(*place)
    torchrun = launcher.TORCHRUN in os.environ
    found: Processes | None
    if backend in ("gloo", "nccl"):
        found = _by_torch(backend, torchrun, file, rank, size)
    elif backend == "auto" and torchrun:
        found = _by_torch("auto", torchrun, file, rank, size)
    else:
        found = _by_mpi(backend)
        if found is None and backend == "auto" and dist.is_initialized():
            assert dist.group.WORLD is not None
            found = _group_processes(dist.group.WORLD)
    if found is not None and found.size > 1:
        return found
    _check_launch(backend)
    return Processes()


def _by_mpi(backend: str) -> Processes | None:
    """The processes of MPI, or None without a launcher, where MPI is not needed.

    Raises BadInput if they have different backends.
    """
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in launcher.MPI):
        return None
    if multiprocessing.parent_process() is not None and "mpi4py.MPI" not in sys.modules:
        raise BadInput(
            "processes() in a child, which MPI does not know: call it before in the parent"
        )
    from powergossip.network import mpi

    interfaces.check("OMPI_MCA_btl_tcp_if_include")
    found = mpi.world()
    if found is not None:
        found.check_same({"distributed_backend": backend})
    return found


def _by_torch(
    backend: str, torchrun: bool, file: str | None, rank: int, size: int
) -> Processes | None:
    """The processes of torch.distributed, or None if there is one only."""
    from powergossip.network.torch import rendezvous

    if dist.is_initialized() or torchrun or all(name in os.environ for name in launcher.RENDEZVOUS):
        return _group_processes(rendezvous.group_of_launcher(), backend)
    if file is not None:
        if not 0 <= rank < size:
            raise BadInput(f"rank={rank}: use 0 to {size - 1} for n_workers={size} processes")
        method = f"file://{Path(file).absolute()}"
        group = rendezvous.start_group(init_method=method, rank=rank, world_size=size)
        return _group_processes(group, backend)
    mpi_processes = _by_mpi(backend)
    if mpi_processes is None:
        return None
    return _group_processes(rendezvous.group_under_mpi(mpi_processes), backend)


def _by_ticket(
    backend: str, ticket: str, size: int, options: Mapping[str, Any], definition: str
) -> Processes:
    """The processes of machines that meet with a ticket."""
    from powergossip.network.internet import meeting
    from powergossip.network.internet.processes import InternetProcesses, Machines

    if backend != "auto" or launcher.has_started_this():
        raise BadInput("ticket: start one process on each machine, with distributed_backend=auto")
    given = meeting.Options.of(options)
    node, keys, known = meeting.connect(ticket, size, given, definition)
    kind = Machines if node.is_away else InternetProcesses
    found = kind(node, keys, known.name)
    print(f"this machine is process {found.rank} of {found.size}", flush=True)
    return found


def _check_launch(backend: str) -> None:
    """Raise BadInput if a launcher has started several processes."""
    for name, starter in (("WORLD_SIZE", "a launcher"), (launcher.SLURM, "srun")):
        number = os.environ.get(name, "")
        if number.isdecimal() and int(number) > 1:
            hint = "mpirun or torchrun"
            if backend == "mpi":
                hint = "mpirun, or use distributed_backend=auto with torchrun"
            elif backend == "auto" and all(name in os.environ for name in launcher.RENDEZVOUS):
                hint += ", or use distributed_backend=gloo"
            raise BadInput(
                f"{starter} has started {number} processes ({name}={number}), which are not "
                f"connected, so that each would carry out the whole run; start them with {hint}"
            )


def _reject(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Report a launch that is not possible, once, and end with exit code 2."""
    if not isinstance(error, BadInput):
        sys.__excepthook__(kind, error, trace)
        return
    if exits.speaks_of(error):
        print(f"error: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(exits.exit_code(2, exits.is_first()))


def command(found: Processes) -> str:
    """The beginning of a command that starts a Python program in as many processes, or with a
    ticket, this machine's."""
    if found.has_own_files:
        return f"powergossip-join {found.name}"
    if launcher.TORCHRUN in os.environ:
        return f"torchrun --nproc-per-node {found.local_size}"
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        options = " --with-ft ulfm" if ulfm.enabled() else ""
        return f"mpirun -np {os.environ['OMPI_COMM_WORLD_SIZE']}{options} python"
    starter = "srun" if launcher.SLURM in os.environ else "mpiexec"
    return f"{starter} -n {found.size} python" if found.size > 1 else "python"
