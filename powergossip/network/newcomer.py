"""The first second of a process that replaces a lost one: python newcomer.py PROGRAM ARGUMENT …

The survivors wait in MPI until it has connected with them. It therefore does so before anything
else, and then runs the program, which takes seconds to load. See powergossip.network.joining.

PROGRAM is the path of a script, or -m and the name of a module.
"""

import os
import runpy
import signal
import sys
from typing import Any

# Variables for joining.py: the communicator as Fortran's handle, and the invitation in hex.
COMMUNICATOR, INVITATION = "POWERGOSSIP_NEWCOMER", "POWERGOSSIP_INVITATION"


_GREETING = 1  # tag


def greet(merged: Any, first: int) -> None:
    """Exchange a message with each new process. Their ranks begin with `first`.

    Two processes connect at their first message, where MPI would wait for ever for one that has
    ended meanwhile.
    """
    partners = range(merged.size) if merged.rank >= first else range(first, merged.size)
    others = [rank for rank in partners if rank != merged.rank]
    sends = [merged.isend(None, rank, _GREETING) for rank in others]
    for rank in others:
        merged.recv(source=rank, tag=_GREETING)
    for send in sends:
        send.wait()


def connect() -> None:
    """Meet the survivors. The process ends if one of them ends meanwhile: they start another."""
    from mpi4py import MPI

    try:
        merged = MPI.Comm.Get_parent().Merge(high=True)
        merged.Set_errhandler(MPI.ERRORS_RETURN)
        invitations = merged.bcast(None, root=0)
        greet(merged, merged.size - MPI.COMM_WORLD.size)
    except MPI.Exception:
        os.kill(os.getpid(), signal.SIGKILL)  # mpirun disregards it
    os.environ[COMMUNICATOR] = str(merged.py2f())
    os.environ[INVITATION] = invitations[MPI.COMM_WORLD.rank].hex()


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
