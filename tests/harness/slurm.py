"""A stand-in for Slurm's sbatch: it runs a job on this machine, after others of the same name."""

import os
from pathlib import Path

import pytest

from tests.harness.helpers import executable

# A job continues if sbatch is ended. PENDING=cancelled: it ends before it has begun.
SBATCH = """
for argument; do
    case "$argument" in
        --output=*) log=${argument#*=} ;;
        --wrap=*) script=${argument#*=} ;;
        --job-name=*) name=${argument#*=} ;;
        --dependency=singleton) alone=flock ;;
        --wait) waits=1 ;;
    esac
done
if [ -n "$SBATCH_PARTITION" ]; then
    echo "sbatch: error: invalid partition specified: $SBATCH_PARTITION" >&2
    exit 1
fi
case "${log//%%/}" in *%*) exit 1 ;; esac  # a pattern of Slurm, such as %j
echo "Submitted batch job $$"
[ "$PENDING" = cancelled ] && exit 0
export SLURM_JOB_ID=$$
(
    for file in /proc/$BASHPID/fd/*; do
        [ "${file##*/}" -gt 2 ] && eval "exec ${file##*/}>&-"  # the lock of the launcher
    done
    exec setsid ${alone:+flock "$(dirname "$0")/$name"} sh -c "$script"
) >>"${log//%%/%}" 2>&1 &
[ -z "$waits" ] || wait $!
"""


def stand_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put it into a folder, first on PATH."""
    executable(folder / "sbatch", SBATCH)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
