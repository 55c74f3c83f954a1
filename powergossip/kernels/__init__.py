"""Compiled loops for averaging on a CPU: one pass over memory where PyTorch's operations take many.

The C files of this package are compiled when they are used for the first time, by the C compiler of
the machine (`cc`, or $CC), and the library is kept in the user's cache. Without a compiler
everything is computed by PyTorch, which is also the reference of the tests.
`POWERGOSSIP_KERNELS=0` selects PyTorch.

All processes use the same one, see `load`: both ends of an edge must compute the same bits. The
bits of the compiled loops depend on the source only, not on the compiler's choice of instructions:
sums have a fixed order (common.h), and products are rounded before they are added.

Functions take addresses of contiguous memory, see `function` and `address`. Nothing is checked, so
callers check shapes and types once, when they prepare their arguments.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from powergossip.atomic_files import scratch

Kernels = ctypes.CDLL


class Processes(Protocol):
    """The processes of a run, see powergossip.network."""

    def one_by_one(self, action: Callable[[], Any]) -> Any: ...
    def gather(self, value: Any) -> list[Any]: ...
    def __hash__(self) -> int: ...


class Network(Protocol):
    """The workers of this process, see powergossip.network."""

    @property
    def processes(self) -> Processes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


_FILES = (
    "common.h",
    "compressed.c",
    "power_gossip.c",
    "difference_code.c",
    "sums.c",
)  # one translation unit, in this order
SWITCH = "POWERGOSSIP_KERNELS"
_FLAGS = (
    *("-O3", "-march=native", "-std=c11", "-fPIC", "-shared"),
    # The same bits with any instructions: a product is rounded before it is added.
    "-ffp-contract=off",
    # Nobody reads errno or the flags of exceptions. Without these, floor and sqrt are calls.
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fno-strict-aliasing",  # floats are read as integers
)


def load(network: Network) -> Kernels | None:
    """The compiled functions, or None where PyTorch is to be used: on a GPU, without a compiler in
    one of the processes, in double precision, or with POWERGOSSIP_KERNELS=0."""
    if network.dtype != torch.float32:
        return None
    return load_for(network.processes, network.device)


def load_for(processes: Processes, device: torch.device) -> Kernels | None:
    """The same, without a network."""
    return agree(processes) if device.type == "cpu" else None


agreed: WeakKeyDictionary[Processes, Kernels | None] = WeakKeyDictionary()


def agree(processes: Processes) -> Kernels | None:
    """The compiled functions if all processes have them. Collective at the first call, which is
    made where the processes are connected."""
    if processes not in agreed:
        found = processes.one_by_one(compiled)
        sources = processes.gather(None if found is None else _source())
        same = None not in sources and len(set(sources)) == 1
        agreed[processes] = found if same else None
    return agreed[processes]


@functools.cache
def compiled() -> Kernels | None:
    """The compiled functions on this machine, or None."""
    words = os.environ.get("CC", "").split() or ["cc"]
    compiler = shutil.which(words[0])
    if os.environ.get(SWITCH, "1") == "0" or compiler is None:
        return None
    try:
        return _library([compiler, *words[1:]])
    except (OSError, subprocess.SubprocessError):
        return None


def name(library: Kernels | None) -> str:
    """How averaging is computed, for info.json: compiled or torch."""
    return "torch" if library is None else "compiled"


def _source() -> str:
    folder = resources.files(__package__)
    return "\n".join(folder.joinpath(file).read_text(encoding="utf-8") for file in _FILES)


def _library(compiler: list[str]) -> Kernels:
    """The library of the cache. Compiles it if it is not there, or damaged.

    Its name ends with its checksum: the machine's loader would crash on a damaged one.
    """
    source, file = _source(), Path(compiler[0]).stat()
    # A home folder may be common to machines with different instructions.
    ingredients = [source, _FLAGS, compiler, file.st_size, file.st_mtime_ns, _processor()]
    key = _checksum("\0".join(map(str, ingredients)).encode())
    try:
        folder = _cache()
        for library in folder.glob(f"kernels-{key}-*.so"):
            if library.stem.endswith(_checksum(library.read_bytes())):
                return ctypes.CDLL(str(library))
            library.unlink(missing_ok=True)
        with scratch(folder) as place:
            made = build(compiler, source, place)
            # Processes may compile at the same time.
            library = folder / f"kernels-{key}-{_checksum(made.read_bytes())}.so"
            return ctypes.CDLL(str(made.replace(library)))
    except (OSError, RuntimeError):  # no place for a cache, or no home folder
        with tempfile.TemporaryDirectory() as temporary:
            return ctypes.CDLL(str(build(compiler, source, Path(temporary))))


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def build(compiler: list[str], source: str, folder: Path) -> Path:
    made = folder / "kernels.so"
    command = [*compiler, *_FLAGS, "-x", "c", "-", "-o", str(made), "-lm"]
    subprocess.run(command, input=source.encode(), capture_output=True, check=True)
    return made


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "decentralized-deep-learning" / "kernels"


def _processor() -> str:
    """The instructions of this processor (Linux), or its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "": None,
}


def function(library: Kernels, name: str, arguments: str, result: str = "") -> Callable[..., Any]:
    """A function of the library. Its types are given by letters: p for an address, i for int64_t, u
    for uint64_t, f for float, d for double."""
    found = library[name]  # a new object each time
    found.argtypes = [_TYPES[letter] for letter in arguments]
    found.restype = _TYPES[result]
    return found


def address(tensor: torch.Tensor) -> int:
    """The address of a contiguous tensor on the CPU."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()
