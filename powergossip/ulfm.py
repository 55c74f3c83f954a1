"""Checks of ULFM, the part of MPI that lets a run survive the end of a process."""

import os

_FAILED = (75, 76)  # MPI_ERR_PROC_FAILED and MPI_ERR_PROC_FAILED_PENDING of Open MPI


def enabled() -> bool:
    """True if the launcher has enabled ULFM. Without it, the end of a process ends all."""
    value = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 mpirun's spelling
    return value.lower() in ("1", "true")


def is_loss(error: BaseException) -> bool:
    """True if an exception is MPI's report of a process that has ended."""
    error_class = getattr(error, "Get_error_class", None)
    return error_class is not None and error_class() in _FAILED


def require(setting: str) -> None:
    """Raise ValueError if ULFM is not enabled. `setting` is the key and value that need it."""
    if enabled():
        return
    reason = "without this flag, mpirun ends all processes when one ends"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        reason = "torchrun ends all processes when one ends"
    elif "SLURM_STEP_NUM_TASKS" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        reason = "srun ends all processes when one ends"
    elif "OMPI_COMM_WORLD_SIZE" not in os.environ:
        reason = "it has no meaning for a single process"
    raise ValueError(f"{setting}: start the run with mpirun --with-ft ulfm; {reason}")
