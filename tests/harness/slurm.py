"""A stand-in for sbatch: the job runs here and now, and continues if sbatch is ended."""

import os
from pathlib import Path

from tests.harness.helpers import executable

NUMBER = "17"  # of every job
SBATCH = f"""
for word in "$@"; do case "$word" in
    --output=*) log=${{word#*=}} ;;
    --chdir=*) cd "${{word#*=}}" ;;
    --wrap=*) script=${{word#*=}} ;;
    esac; done
[[ ${{log//%%/}} != *%* ]] || exit 9  # %j is the number of the job, %% is %
log=${{log//%%/%}}
[ "${{SBATCH_PARTITION:-}}" != nowhere ] ||
    {{ echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1; }}
echo 'Submitted batch job {NUMBER}'
[ "${{SBATCH_PARTITION:-}}" != cancelled ] || exit 0
(
    for fd in $(ls /proc/$$/fd); do [ $fd -le 2 ] || [ $fd = 255 ] || eval "exec $fd>&-"; done
    SLURM_JOB_ID={NUMBER} exec setsid sh -c "$script" >>"$log" 2>&1
) &
wait $!"""


def path(folder: Path) -> str:
    """A PATH with this sbatch."""
    executable(folder / "sbatch", SBATCH)
    return f"{folder}:{os.environ['PATH']}"
