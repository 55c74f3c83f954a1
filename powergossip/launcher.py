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
