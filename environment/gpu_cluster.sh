#!/usr/bin/env bash
# Builds a CUDA-aware Open MPI on UCX, makes .venv with it, and checks the result.
#
#     bash environment/gpu_cluster.sh --dry-run PREFIX     shows the commands
#     bash environment/gpu_cluster.sh PREFIX               runs them
#
# PREFIX is where UCX and Open MPI go: a folder of yours that all nodes share. Nothing is written
# elsewhere, but for .venv in the repository, and nothing needs root. What is done is not done again.
# environment/gpu_cluster.md explains each step, and what to do if a check fails.
#
# CUDA_HOME=…      the CUDA toolkit; otherwise the one that nvcc on PATH belongs to
# GDRCOPY=DIR|no   where GDRCopy is (include/gdrapi.h); otherwise /usr if it is there
# VERBS=DIR|no     where the headers of InfiniBand are; otherwise /usr if they are there
# JOBS=N           compilers at the same time; otherwise one for each core
#
# It has not yet been run on a cluster (see gpu_cluster.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Checksums as in the recipes of Spack (UCX 1.20.1, package.py) and Homebrew (Open MPI 5.0.11, formula
# open-mpi). Open MPI is of the version that environment/constraints.txt has as a ready-made package.
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
[ -n "$prefix" ] || refuse "there is no PREFIX, the folder where UCX and Open MPI go; $usage"
case "$prefix" in
/*) ;;
*) refuse "PREFIX=$prefix: use an absolute path, which the libraries remember" ;;
esac
case "$prefix" in
*[[:space:]]*) refuse "PREFIX=$prefix: use a path without spaces, on which such builds fail" ;;
esac
jobs=${JOBS:-$(nproc)}
case "$jobs" in
'' | *[!0-9]* | 0) refuse "JOBS=$jobs: use a number, 1 or more" ;;
esac

# ── What the machine has ────────────────────────────────────────────────────────────────────────────
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
# Stands for the driver's library on machines without a GPU; configure finds CUDA by it.
stubs=$cuda/lib64/stubs
if [ ${#missing[@]} = 0 ] && [ ! -e "$stubs/libcuda.so" ]; then
    missing+=("libcuda.so in $stubs (or another CUDA_HOME)")
fi
if [ ${#missing[@]} -gt 0 ]; then
    list=$(printf ', %s' "${missing[@]}")
    [ -n "$dry" ] || refuse "this needs what is not here: ${list:2}; load the modules or install the packages that have it"
    printf '# not here, and needed: %s\n' "${list:2}"
fi

# name of the option, wanted folder, header
optional() {
    local name=$1 wanted=$2 header=$3
    case "$wanted" in
    no) echo "--without-$name" ;;
    '') if [ -f "/usr/include/$header" ]; then echo "--with-$name=/usr"; else echo "--without-$name"; fi ;;
    *)
        [ -n "$dry" ] || [ -f "$wanted/include/$header" ] || refuse "there is no $wanted/include/$header; use no, or the folder that has it"
        echo "--with-$name=$wanted"
        ;;
    esac
}
gdrcopy=$(optional gdrcopy "${GDRCOPY:-}" gdrapi.h)
verbs=$(optional verbs "${VERBS:-}" infiniband/verbs.h)

# ── Running, or showing ─────────────────────────────────────────────────────────────────────────────
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
        fail "the last command failed (see above, and $log); environment/gpu_cluster.md may know why"
    }
}
log=$prefix/src/log
if [ -z "$dry" ]; then
    mkdir -p "$prefix/src" || refuse "PREFIX=$prefix cannot be made; use a folder of yours"
    : >"$log"
fi

# file, address, checksum
fetch() {
    local file=$prefix/src/$1
    if [ -n "$dry" ]; then
        run "${fetcher[@]}" "$file" "$2"
        echo "sha256sum --check <<<'$3  $file'"
        return
    fi
    [ -f "$file" ] || { run "${fetcher[@]}" "$file.part" "$2" && mv "$file.part" "$file"; }
    echo "$3  $file" | sha256sum --check --status ||
        fail "$file has another checksum than it should; remove it and run this again, and if that changes nothing do not use it"
}

# name and version, archive, address, checksum, command and options of configure
build() {
    local name=$1 archive=$2 address=$3 checksum=$4 stamp=$prefix/src/$1.built
    shift 4
    if [ -z "$dry" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$*" ]; then
        say "$name is there"
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
# configure-release is configure without debugging code; mt: MPI may be called by several threads.
build "ucx-$UCX_VERSION" "ucx-$UCX_VERSION.tar.gz" "$UCX_URL" "$UCX_SHA256" \
    ./contrib/configure-release --prefix="$prefix" --enable-mt --enable-cma \
    --with-cuda="$cuda" "$gdrcopy" "$verbs" --without-java --without-go --disable-doxygen-doc

# ── Open MPI ────────────────────────────────────────────────────────────────────────────────────────
# Its own PMIx and the like, so that it depends on no others. btl-uct is a second way to UCX, which
# UCX' authors advise against. The rpath is for UCX beside it.
build "openmpi-$OPENMPI_VERSION" "openmpi-$OPENMPI_VERSION.tar.bz2" "$OPENMPI_URL" "$OPENMPI_SHA256" \
    ./configure --prefix="$prefix" --with-ucx="$prefix" --with-cuda="$cuda" \
    --with-cuda-libdir="$stubs" --with-slurm --with-hwloc=internal --with-libevent=internal \
    --with-pmix=internal --with-prrte=internal --enable-mca-no-build=btl-uct \
    --disable-mpi-fortran --disable-oshmem LDFLAGS="-Wl,-rpath,$prefix/lib"

# ── The project ─────────────────────────────────────────────────────────────────────────────────────
# setup.sh takes the mpirun on PATH. Its mpi4py may be a ready-made one that loads this library; one
# that is built with this mpicc knows it in every detail.
[ -z "$dry" ] || echo "export PATH=$prefix/bin:\$PATH"
export PATH=$prefix/bin:$PATH
run env MPI=machine bash environment/setup.sh
run env MPICC="$prefix/bin/mpicc" .venv/bin/python -m pip install \
    -c environment/constraints.txt --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py

# ── Checks ──────────────────────────────────────────────────────────────────────────────────────────
# what is asked, what the answer must hold, what it means if it does not, command
ask() {
    local question=$1 wanted=$2 otherwise=$3
    shift 3
    if [ -n "$dry" ]; then
        echo "$(shown "$@") | grep $(shown "$wanted")"
        return
    fi
    # no pipe into grep -q, which would end the command before its last line
    grep -q -e "$wanted" <<<"$("$@" 2>&1)" || fail "$otherwise"
    say "$question: yes"
}
ask "UCX was built for CUDA" "with-cuda=$cuda" "UCX was built without CUDA; see $prefix/src/ucx-$UCX_VERSION/config.log" \
    "$prefix/bin/ucx_info" -v
ask "UCX has transports for GPU memory" cuda_copy "UCX finds no GPU here; run this on a node that has one" \
    "$prefix/bin/ucx_info" -d
ask "Open MPI was built for CUDA" mpi_built_with_cuda_support:value:true "Open MPI was built without CUDA; see $prefix/src/openmpi-$OPENMPI_VERSION/config.log" \
    "$prefix/bin/ompi_info" --parsable --all
ask "Open MPI uses UCX" "MCA pml: ucx" "Open MPI was built without UCX; see $prefix/src/openmpi-$OPENMPI_VERSION/config.log" \
    "$prefix/bin/ompi_info"
ask "torch was built for CUDA" "[0-9]" "this torch is a build without CUDA; point pip to torch's CUDA builds and install the pinned version again" \
    .venv/bin/python -c 'import torch; print(torch.version.cuda)'
ask "MPI takes GPU memory" "CUDA-aware: yes" "Open MPI says that it is not CUDA-aware; training works, through pinned host memory (see environment/gpu_cluster.md)" \
    env OMPI_MCA_pml=ucx bash -c 'source .venv/bin/activate && mpirun -np 2 python -m powergossip.mpi_check'
[ -n "$dry" ] || say "done. Before each use: export PATH=$prefix/bin:\$PATH && source .venv/bin/activate"
