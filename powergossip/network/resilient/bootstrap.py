"""The first second of a process that replaces a lost one: python bootstrap.py PROGRAM ARGUMENT …

The survivors wait in MPI until it has connected with them. It therefore does so before anything
else, and then runs the program, which takes seconds to load. See spawning.py.

PROGRAM is the path of a script, or -m and the name of a module.
"""

import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Variables for spawning.py: the communicator as Fortran's handle, and the assignment in hex.
COMMUNICATOR, ASSIGNMENT = "POWERGOSSIP_SPAWNED", "POWERGOSSIP_ASSIGNMENT"


_HANDSHAKE = 1  # tag


def handshake(merged: Any, first: int, value: Any = None) -> dict[int, Any]:
    """Exchange a value with each new process. Their ranks begin with `first`. Returns rank → value.

    Two processes connect at their first message, where MPI would wait for ever for one that has
    ended meanwhile.
    """
    partners = range(merged.size) if merged.rank >= first else range(first, merged.size)
    others = [rank for rank in partners if rank != merged.rank]
    sends = [merged.isend(value, rank, _HANDSHAKE) for rank in others]
    received = {rank: merged.recv(source=rank, tag=_HANDSHAKE) for rank in others}
    for send in sends:
        send.wait()
    return received


def stat(pid: int) -> tuple[str, str]:
    """The state of a process of this host and the time of its start, or "" (Linux only)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]


def identity() -> tuple[str, int, str, str]:
    """This process, see powergossip.network.resilient.heartbeats.Identity."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        namespace = ""
    return socket.gethostname(), os.getpid(), stat(os.getpid())[1], namespace


def connect() -> None:
    """Connect with the survivors. The process ends if one of them does: they start another."""
    from mpi4py import MPI

    try:
        merged = MPI.Comm.Get_parent().Merge(high=True)
        merged.Set_errhandler(MPI.ERRORS_RETURN)
        assignments = merged.bcast(None, root=0)
        handshake(merged, merged.size - MPI.COMM_WORLD.size, identity())
    except MPI.Exception:
        os.kill(os.getpid(), signal.SIGKILL)  # mpirun disregards it
    os.environ[COMMUNICATOR] = str(merged.py2f())
    os.environ[ASSIGNMENT] = assignments[MPI.COMM_WORLD.rank].hex()


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    connect()
    program, *arguments = sys.argv[1:]
    if program == "-m":
        name, *arguments = arguments
        sys.path.insert(0, os.getcwd())
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
