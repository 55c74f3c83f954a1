#!/usr/bin/env bash
# Builds a CUDA-aware Open MPI on UCX, creates .venv with it, and checks the result.
#
#     bash environment/gpu_cluster.sh --dry-run PREFIX     shows the commands
#     bash environment/gpu_cluster.sh PREFIX               runs them
#
# PREFIX is the folder for UCX and Open MPI: writable, and shared by all nodes. Nothing is written
# elsewhere, except for .venv in the repository, and nothing needs root. Completed steps are skipped in
# a second run. environment/gpu_cluster.md explains each step, and the remedies if a check fails.
#
# CUDA_HOME=…      the CUDA toolkit; default: that of nvcc on PATH
# GDRCOPY=DIR|no   the folder of GDRCopy (include/gdrapi.h); default: /usr if it is there
# VERBS=DIR|no     the folder of the InfiniBand headers; default: /usr if they are there
# JOBS=N           concurrent compilers; default: the number of cores
#
# It has not yet been run on a cluster (see gpu_cluster.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Checksums from the recipes of Spack (UCX 1.20.1, package.py) and Homebrew (Open MPI 5.0.11, formula
# open-mpi). The version of Open MPI is that of the package in environment/constraints.txt.
UCX_VERSION=1.20.1
UCX_SHA256=545c419a7b5e04643cb8bff5a19b3b5071a8f8f0605f1e8efb36f8f3d7bfb9d3
UCX_URL=https://github.com/openucx/ucx/releases/download/v$UCX_VERSION/ucx-$UCX_VERSION.tar.gz
OPENMPI_VERSION=5.0.11
OPENMPI_SHA256=e668a3c4acd50c41dc204c8a6dd98a611e0f26af89cf677577fa9be8a2698003
OPENMPI_URL=https://download.open-mpi.org/release/open-mpi/v${OPENMPI_VERSION%.*}/openmpi-$OPENMPI_VERSION.tar.bz2

say() { printf 'gpu_cluster: %s\n' "$*"; }
refuse() {
    printf 'gpu_cluster: error: %s\n' "$*" >&2
    exit 2
}
fail() {
    printf 'gpu_cluster: error: %s\n' "$*" >&2
    exit 1
}

# ── Arguments ───────────────────────────────────────────────────────────────────────────────────────
usage="use: bash environment/gpu_cluster.sh [--dry-run] PREFIX"
dry='' prefix=''
for word in "$@"; do
    case "$word" in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' environment/gpu_cluster.sh
        exit
        ;;
    --dry-run) dry=yes ;;
    -*) refuse "option $word is unknown; $usage" ;;
    *)
        [ -z "$prefix" ] || refuse "one PREFIX is enough, these are two: $prefix and $word; $usage"
        prefix=$word
        ;;
    esac
done
[ -n "$prefix" ] || refuse "there is no PREFIX, the folder for UCX and Open MPI; $usage"
case "$prefix" in
/*) ;;
*) refuse "PREFIX=$prefix: use an absolute path, because the libraries store it" ;;
esac
case "$prefix" in
*[[:space:]]*) refuse "PREFIX=$prefix: use a path without spaces, because these builds fail on them" ;;
esac
jobs=${JOBS:-$(nproc)}
case "$jobs" in
'' | *[!0-9]* | 0) refuse "JOBS=$jobs: use a number, 1 or more" ;;
esac

# ── Requirements ────────────────────────────────────────────────────────────────────────────────────
missing=()
for tool in cc c++ make tar gzip bzip2 perl sha256sum pkg-config python3; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
fetcher=(curl --fail --location --silent --show-error --output)
if ! command -v curl >/dev/null; then
    if command -v wget >/dev/null; then
        fetcher=(wget --quiet --output-document)
    else
        missing+=("curl or wget")
    fi
fi
cuda=${CUDA_HOME:-}
if [ -z "$cuda" ] && nvcc=$(command -v nvcc); then
    cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
fi
if [ -z "$cuda" ]; then
    missing+=("nvcc (or CUDA_HOME)")
    cuda=/usr/local/cuda # for --dry-run
elif [ ! -f "$cuda/include/cuda.h" ]; then
    missing+=("cuda.h in $cuda/include (or another CUDA_HOME)")
fi
# A stub of the driver's library, by which configure finds CUDA on machines without a GPU.
stubs=$cuda/lib64/stubs
if [ ${#missing[@]} = 0 ] && [ ! -e "$stubs/libcuda.so" ]; then
    missing+=("libcuda.so in $stubs (or another CUDA_HOME)")
fi
if [ ${#missing[@]} -gt 0 ]; then
    list=$(printf ', %s' "${missing[@]}")
    [ -n "$dry" ] || refuse "requirements are missing: ${list:2}; load their modules or install their packages"
    printf '# not here, and needed: %s\n' "${list:2}"
fi

# arguments: name of the option, folder, header
optional() {
    local name=$1 wanted=$2 header=$3
    case "$wanted" in
    no) echo "--without-$name" ;;
    '') if [ -f "/usr/include/$header" ]; then echo "--with-$name=/usr"; else echo "--without-$name"; fi ;;
    *)
        [ -n "$dry" ] || [ -f "$wanted/include/$header" ] || refuse "there is no $wanted/include/$header; use no, or the folder with this header"
        echo "--with-$name=$wanted"
        ;;
    esac
}
gdrcopy=$(optional gdrcopy "${GDRCOPY:-}" gdrapi.h)
verbs=$(optional verbs "${VERBS:-}" infiniband/verbs.h)

# ── Run or print commands ───────────────────────────────────────────────────────────────────────────
shown() { printf '%q ' "$@" | sed 's/ $//'; }
enter() { # a folder
    if [ -n "$dry" ]; then echo "cd $(shown "$1")"; else cd "$1"; fi
}
run() {
    if [ -n "$dry" ]; then
        shown "$@"
        echo
        return
    fi
    say "$(shown "$@")"
    "$@" >>"$log" 2>&1 </dev/null || {
        tail -n 25 "$log" >&2
        fail "the last command failed (see above, and $log); environment/gpu_cluster.md has hints"
    }
}
log=$prefix/src/log
if [ -z "$dry" ]; then
    mkdir -p "$prefix/src" || refuse "PREFIX=$prefix: use a folder that can be created"
    : >"$log"
fi

# arguments: file, address, checksum
fetch() {
    local file=$prefix/src/$1
    if [ -n "$dry" ]; then
        run "${fetcher[@]}" "$file" "$2"
        echo "sha256sum --check <<<'$3  $file'"
        return
    fi
    [ -f "$file" ] || { run "${fetcher[@]}" "$file.part" "$2" && mv "$file.part" "$file"; }
    echo "$3  $file" | sha256sum --check --status ||
        fail "$file has another checksum than it should; remove it and run this again; if the checksum is still wrong, do not use the file"
}

# arguments: name and version, archive, address, checksum, command and options of configure
build() {
    local name=$1 archive=$2 address=$3 checksum=$4 stamp=$prefix/src/$1.built
    shift 4
    if [ -z "$dry" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$*" ]; then
        say "$name is built already"
        return
    fi
    fetch "$archive" "$address" "$checksum"
    run rm -rf "$prefix/src/$name"
    run tar --extract --file "$prefix/src/$archive" --directory "$prefix/src"
    enter "$prefix/src/$name"
    run "$@"
    run make -j "$jobs"
    run make install
    enter "$repository"
    [ -n "$dry" ] || printf '%s\n' "$*" >"$stamp"
}
repository=$PWD

# ── UCX ─────────────────────────────────────────────────────────────────────────────────────────────
# configure-release is configure without debugging code. mt: several threads may call MPI.
build "ucx-$UCX_VERSION" "ucx-$UCX_VERSION.tar.gz" "$UCX_URL" "$UCX_SHA256" \
    ./contrib/configure-release --prefix="$prefix" --enable-mt --enable-cma \
    --with-cuda="$cuda" "$gdrcopy" "$verbs" --without-java --without-go --disable-doxygen-doc

# ── Open MPI ────────────────────────────────────────────────────────────────────────────────────────
# With internal PMIx, PRRTE, hwloc and libevent, to be independent of those of the machine. btl-uct is a
# second interface to UCX, which UCX' authors advise against. The rpath is for UCX in the same folder.
build "openmpi-$OPENMPI_VERSION" "openmpi-$OPENMPI_VERSION.tar.bz2" "$OPENMPI_URL" "$OPENMPI_SHA256" \
    ./configure --prefix="$prefix" --with-ucx="$prefix" --with-cuda="$cuda" \
    --with-cuda-libdir="$stubs" --with-slurm --with-hwloc=internal --with-libevent=internal \
    --with-pmix=internal --with-prrte=internal --enable-mca-no-build=btl-uct \
    --disable-mpi-fortran --disable-oshmem LDFLAGS="-Wl,-rpath,$prefix/lib"

# ── The project ─────────────────────────────────────────────────────────────────────────────────────
# setup.sh uses the mpirun on PATH. Its mpi4py may be a prebuilt one that loads this library. One that is
# built with this mpicc matches the library exactly.
[ -z "$dry" ] || echo "export PATH=$prefix/bin:\$PATH"
export PATH=$prefix/bin:$PATH
run env MPI=machine bash environment/setup.sh
run env MPICC="$prefix/bin/mpicc" .venv/bin/python -m pip install \
    -c environment/constraints.txt --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py

# ── Checks ──────────────────────────────────────────────────────────────────────────────────────────
# arguments: property, pattern in the output, error message, command
ask() {
    local question=$1 wanted=$2 otherwise=$3
    shift 3
    if [ -n "$dry" ]; then
        echo "$(shown "$@") | grep $(shown "$wanted")"
        return
    fi
    # No pipe into grep -q, which would end the command before its last line.
    grep -q -e "$wanted" <<<"$("$@" 2>&1)" || fail "$otherwise"
    say "$question: yes"
}
ask "UCX was built for CUDA" "with-cuda=$cuda" "UCX was built without CUDA; see $prefix/src/ucx-$UCX_VERSION/config.log" \
    "$prefix/bin/ucx_info" -v
ask "UCX has transports for GPU memory" cuda_copy "UCX finds no GPU here; run this on a node with one" \
    "$prefix/bin/ucx_info" -d
ask "Open MPI was built for CUDA" mpi_built_with_cuda_support:value:true "Open MPI was built without CUDA; see $prefix/src/openmpi-$OPENMPI_VERSION/config.log" \
    "$prefix/bin/ompi_info" --parsable --all
ask "Open MPI uses UCX" "MCA pml: ucx" "Open MPI was built without UCX; see $prefix/src/openmpi-$OPENMPI_VERSION/config.log" \
    "$prefix/bin/ompi_info"
ask "torch was built for CUDA" "[0-9]" "this torch is a build without CUDA; point pip to torch's CUDA builds and install the pinned version again" \
    .venv/bin/python -c 'import torch; print(torch.version.cuda)'
ask "MPI accepts GPU memory" "CUDA-aware: yes" "Open MPI says that it is not CUDA-aware; training works, staged through pinned host memory (see environment/gpu_cluster.md)" \
    env OMPI_MCA_pml=ucx bash -c 'source .venv/bin/activate && mpirun -np 2 python -m powergossip.mpi_check'
[ -n "$dry" ] || say "done. Before each use: export PATH=$prefix/bin:\$PATH && source .venv/bin/activate"
