"""The launcher of this process, as far as its environment shows it before processes connect.

Imports nothing heavy: a command line is read and rejected before torch is imported.
"""

import multiprocessing
import os
import sys
from pathlib import Path

MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = "SLURM_STEP_NUM_TASKS"
TORCHRUN = "TORCHELASTIC_RUN_ID"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
_PLACES = (  # rank, size, and both among the processes of the host
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", SLURM, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
)
_CONNECTED = "POWERGOSSIP_CONNECTED"  # the process that has connected, and its launch


def has_started_this() -> bool:
    """Whether this may be one of several processes, as also after a program has connected them."""
    names = (*MPI, *RENDEZVOUS, SLURM, TORCHRUN)
    if any(name in os.environ for name in names) or "mpi4py.MPI" in sys.modules:
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the first process of its launcher."""
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    return not ranks or ranks[0] == "0"


def _launch() -> str:
    """The variables of this launch."""
    names = ("PMIX_NAMESPACE", *MPI, *RENDEZVOUS, SLURM, TORCHRUN)
    return " ".join(os.environ.get(name, "") for name in names)


def connected() -> None:
    """Mark this process, which has connected with others, for its children."""
    os.environ[_CONNECTED] = f"{os.getpid()} {_launch()}"


def is_inherited() -> bool:
    """Whether the launcher's variables are those of a parent: of a data loader, for instance.

    The parent has connected, or this process is one of multiprocessing's that had the variables
    from its start. Launchers that use multiprocessing set them later.
    """
    parent, _, launch = os.environ.get(_CONNECTED, "").partition(" ")
    if parent and launch == _launch():
        return parent != str(os.getpid())
    names = (TORCHRUN,) if TORCHRUN in os.environ else MPI
    if multiprocessing.parent_process() is None or not any(name in os.environ for name in names):
        return False
    try:
        start = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # not Linux
        return True
    return any(variable.partition("=")[0] in names for variable in start)


def place() -> tuple[int, int, int, int]:
    """Rank and size, and both among the processes of the host, from the launcher's variables."""
    for names in _PLACES if TORCHRUN in os.environ else reversed(_PLACES):
        if names[0] in os.environ and names[1] in os.environ:
            rank, size, *local = (int(os.environ.get(name, 0)) for name in names)
            return rank, size, local[0], max(1, local[1])
    return 0, 1, 0, 1
