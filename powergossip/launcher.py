"""The launcher of this process, as far as its environment shows it before processes connect.

Imports nothing heavy: a command line is read and rejected before torch is imported.
"""

import os
import sys

MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = "SLURM_STEP_NUM_TASKS"
TORCHRUN = "TORCHELASTIC_RUN_ID"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
_CONNECTED = "POWERGOSSIP_CONNECTED"  # the process that has connected, its place and its launch


def has_started_this() -> bool:
    """True if this may be one of several processes, also after a program has connected them."""
    names = (*MPI, *RENDEZVOUS, SLURM, TORCHRUN)
    if any(name in os.environ for name in names) or "mpi4py.MPI" in sys.modules:
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def is_first() -> bool:
    """True in the first process of its launcher."""
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    return not ranks or ranks[0] == "0"


def _launch() -> str:
    """The variables that tell a launch from others."""
    names = ("PMIX_NAMESPACE", *MPI, *RENDEZVOUS, SLURM, TORCHRUN)
    return "".join(f" {os.environ.get(name)}" for name in names)


def mark_connected(*place: int) -> None:
    """Tell children of this process that it has connected with others, and its place there."""
    os.environ[_CONNECTED] = " ".join(map(str, (os.getpid(), *place))) + _launch()


def place_of_parent() -> list[int] | None:
    """The place of a connected process that has started this one, with its own variables."""
    marked = os.environ.get(_CONNECTED, "").removesuffix(_launch())
    pid, *place = map(int, marked.split()) if marked.replace(" ", "").isdecimal() else [0]
    return place if pid not in (0, os.getpid()) else None
