"""The laws of the compiled loops: PyTorch's code is their reference."""

import os
import platform
import tempfile
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powergossip import algorithms, kernels, topologies
from powergossip.algorithms import (
    Averaging,
    ChocoGossip,
    DeepSqueeze,
    Moniqua,
    compiled_compression,
)
from powergossip.network import Network, Processes, processes
from powergossip.parameters import Layout
from powergossip.tasks import data_files
from tests.harness.helpers import DAMAGES, damage, with_one_each

ALONE = Processes()
# Lengths below and above a block of 1024, of a multiple of 8 and not, with positions of 1 and 2
# bytes; and of 2 bytes from 2¹⁵ on, and of 4.
LAYOUT = Layout([(40, 33), (7,), (), (3, 5), (64, 9, 2), (3, 5), (130,)])
LONG = Layout([(3,), (200, 200), (290, 230)])
SPARSE = [{"compressor": "top-k", "keep_ratio": ratio} for ratio in (0.01, 0.3, 1.0)]
LEVELS = [{"compressor": "qsgd", "levels": levels} for levels in (1, 3, 4, 40, 127)]
SHARED = [
    {"compressor": "random-k"},
    {"compressor": "random-k", "keep_ratio": 0.3},
    {"compressor": "random-k", "rank": 1},
    {"compressor": "random-block"},
]
SIGNS = [{"compressor": "sign-and-norm"}]
OF_EVERY_COMPRESSOR: list[Any] = [*SPARSE, *SHARED, *LEVELS, *SIGNS]

needs_compiler = pytest.mark.skipif(kernels.compiled() is None, reason="needs a C compiler")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_a(value: float) -> Callable[[], Tensor]:
    def make() -> Tensor:
        x = normal(4, LAYOUT.size)
        x[0, 3], x[1, 2600] = value, -value
        return x

    return make


VALUES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(4, LAYOUT.size),
    "zeros": lambda: torch.zeros(4, LAYOUT.size),
    "-0": lambda: -torch.zeros(4, LAYOUT.size),
    "ties": lambda: normal(4, LAYOUT.size).round(),
    "large": lambda: normal(4, LAYOUT.size) * 1e15,
    # Top-k expects to find them elsewhere, too.
    "large at equal distances": lambda: normal(4, LAYOUT.size).mul_(
        torch.where(torch.arange(LAYOUT.size) // 16 % 8 == 0, 1e3, 1.0)
    ),
    "rows with a stride": lambda: normal(4, LAYOUT.size + 3)[:, :-3],
    "NaN": with_a(float("nan")),
    "inf": with_a(float("inf")),
}


ALL_VALUES = [*VALUES, "long"]


def compressor(options: dict[str, Any]) -> str:
    return str(options["compressor"])


class Run:
    """An algorithm on a star, whose leaves have slots without a neighbor, in one process."""

    def __init__(
        self,
        name: str,
        compiled: bool,
        topology: str = "star",
        layout: Layout = LAYOUT,
        **options: Any,
    ):
        self.network = Network(topologies.make(topology, 4), ALONE)
        rates = torch.tensor([0.3, 0.1, 0.2, 0.4])
        self.averaging = algorithms.make(
            name, self.network, layout, diffusion_rate=rates, **options
        )
        self._compiled = compiled

    def step(self, x: Tensor, replace: Tensor | None = None) -> Tensor:
        """A step. Returns its messages [worker, bytes]; `replace` takes their place."""
        with pytest.MonkeyPatch.context() as patch:
            if not self._compiled:
                patch.setattr(kernels, "load", lambda network: None)
            conversation = self.averaging.step(x)
            message = next(conversation)
        sent = message.tensor.clone()
        if replace is not None:
            message.tensor.copy_(replace)
        received = self.network.receive(self.network.post([message]))
        with pytest.raises(StopIteration):
            conversation.send(received[0])
        self.network.round += 1
        return sent


def state(run: Run) -> dict[str, Tensor]:
    """The tensors of the algorithm's state. Slots without a neighbor may have any values."""
    found = {k: v for k, v in run.averaging.state_dict().items() if isinstance(v, Tensor)}
    if "publics" in found:
        found["publics"] = found["publics"][run.network.neighbors >= 0]
    return found


def assert_same(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def fields(averaging: Averaging, message: Tensor) -> Tensor:
    """C(v) of messages [worker, bytes]: [worker, D]."""
    assert isinstance(averaging, ChocoGossip | DeepSqueeze)
    return averaging.codec.decode(message, averaging.codec.workers, 0).clone()


@needs_compiler
@pytest.mark.parametrize("name", ["sign-and-norm", "qsgd"])
def test_norms_are_sums_in_double_precision(name: str) -> None:
    """Those of equal elements, whose rounding errors add up, to 6e-6 in single precision."""
    x = torch.full((4, 1_000_000), 0.1)
    run = Run("choco", True, layout=Layout([(1000, 1000)]), compressor=name)
    found = run.step(x.clone())[:, :4].contiguous().view(torch.float32)
    wide = x.double()
    expected = wide.abs().mean(1) if name == "sign-and-norm" else wide.norm(dim=1)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-6, atol=0)


@needs_compiler
def test_too_few_distinct_draws_give_the_positions_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (
        Run("choco", by_loops, layout=LONG, compressor="random-k") for by_loops in (True, False)
    )
    x = normal(4, LONG.size)
    expected = theirs.step(x.clone())
    monkeypatch.setattr(compiled_compression, "number_of_draws", lambda count, entries: count)
    assert_same(ours.step(x), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        *(("choco", *pair) for pair in with_one_each(OF_EVERY_COMPRESSOR, ALL_VALUES, compressor)),
        *(("deepsqueeze", o, v) for o, v in zip(OF_EVERY_COMPRESSOR, cycle(ALL_VALUES))),
    ],
)
def test_messages_are_encoded_and_decoded_as_by_pytorch(
    name: str, options: dict[str, Any], values: str
) -> None:
    """To the rounding of a norm. Of equal magnitudes, any are the largest. Copies and errors are
    the same to the bit, and x is to rounding."""
    layout = LONG if values == "long" else LAYOUT
    ours, theirs = (Run(name, compiled, layout=layout, **options) for compiled in (True, False))
    x = normal(4, LONG.size) if values == "long" else VALUES[values]()
    y, before = x.clone(), x.clone()
    message = ours.step(x)
    expected = theirs.step(y, replace=message)
    a, b = (fields(run.averaging, sent) for run, sent in ((ours, message), (theirs, expected)))
    if options["compressor"] == "top-k" and values == "ties":
        assert_same(a.abs().sum(1), b.abs().sum(1))
        assert_same(torch.where(a != 0, before, 0), a)
    else:
        differ = ~torch.isclose(a, b, rtol=1e-5, atol=0, equal_nan=True)
        allowed = 1e-4 if options["compressor"] == "qsgd" else 0  # a level rounds the other way
        assert differ.float().mean() <= allowed
    y = x.clone()
    theirs.step(y, replace=ours.step(x))
    assert_same(state(ours), state(theirs))
    finite = x.isfinite() & y.isfinite()
    scale = 1e15 if values == "large" else 1.0
    assert_close(x[finite] / scale, y[finite] / scale)
    assert torch.equal(x.isnan(), y.isnan())


@needs_compiler
@pytest.mark.parametrize("topology", ["star", "one-peer-exponential"])
def test_moniqua_is_that_of_pytorch(topology: str) -> None:
    """To the bit, also of the messages."""
    theta = torch.tensor([0.25, 0.5, 0.25, 1.0])
    for values in sorted(set(VALUES) - {"large", "inf"}):
        ours, theirs = (
            Run("moniqua", compiled, topology, theta=theta, seed=3) for compiled in (True, False)
        )
        x = VALUES[values]()
        y = x.clone()
        for _ in range(3):
            assert_same(ours.step(x), theirs.step(y))
            assert_same(x, y)
        assert isinstance(ours.averaging, Moniqua)


def forget() -> None:
    kernels.compiled.cache_clear()
    kernels.agreed.clear()


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No kernel is loaded in this process, before and after."""
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("POWERGOSSIP_KERNELS", "0"), ("CC", "false"), ("CC", "no-such-compiler")],
)
def test_without_a_compiler_pytorch_is_used(
    forgotten: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    forgotten.setenv(variable, value)
    run = Run("choco", compiled=True)
    assert kernels.name(kernels.load(run.network)) == "torch"
    run.step(normal(4, LAYOUT.size))


LEAST = {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(platform.machine())
WITH_LOOPS: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {}),
    ("moniqua", {}),
    ("power-gossip", {"rank": 1}),
    ("power-gossip", {"rank": 2}),
    *((name, options) for name in ("choco", "deepsqueeze") for options in OF_EVERY_COMPRESSOR),
]


@pytest.mark.long
@needs_compiler
@pytest.mark.skipif(LEAST is None, reason="an unknown kind of processor")
def test_the_bits_are_the_same_with_the_fewest_instructions(
    forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes on unlike machines compute the same. (AVX and FMA are not in x86-64.)"""

    def computed() -> list[Tensor]:
        found = []
        for name, options in WITH_LOOPS:
            run, x = Run(name, compiled=True, **options), normal(4, LAYOUT.size)
            for _ in range(3):
                run.network.run(run.averaging.step(x))
            found += [x, *state(run).values()]
        return found

    expected = computed()
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O1 -march={LEAST}\n')
    compiler.chmod(0o755)
    forgotten.setenv("CC", str(compiler))
    forgotten.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    assert kernels.name(kernels.compiled()) == "compiled"
    for a, b in zip(computed(), expected, strict=True):
        assert_same(a, b)


@pytest.fixture
def compiling(forgotten: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """The content of a library, which is compiled in no time, with an empty cache."""
    library = kernels.compiled()
    assert library is not None
    content = Path(library._name).read_bytes()

    def compiler(command: list[str], source: str, folder: Path) -> Path:
        (folder / "kernels.so").write_bytes(content)
        return folder / "kernels.so"

    forgotten.setattr(kernels, "build", compiler)
    forgotten.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.compiled.cache_clear()
    return content


@pytest.mark.long
@needs_compiler
def test_a_damaged_library_is_compiled_again(compiling: bytes, tmp_path: Path) -> None:
    assert kernels.compiled() is not None
    (library,) = tmp_path.rglob("kernels-*.so")
    for kind in DAMAGES:
        damage(library, kind)
        kernels.compiled.cache_clear()
        assert kernels.name(kernels.compiled()) == "compiled", kind
        assert [path.read_bytes() for path in tmp_path.rglob("*.so")] == [compiling]


@needs_compiler
def test_a_machine_without_a_home_folder_has_no_cache(
    compiling: bytes, forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    forgotten.delenv("XDG_CACHE_HOME")
    forgotten.setattr(Path, "home", no_home)
    forgotten.setattr(tempfile, "tempdir", str(tmp_path))
    assert kernels.name(kernels.compiled()) == "compiled"
    assert not list(tmp_path.rglob("*.so"))
    assert data_files.cache("Text").is_relative_to(tmp_path)


def test_processes_of_an_earlier_run_are_released() -> None:
    alone = Processes()
    kernels.agree(alone)
    reference = weakref.ref(alone)
    del alone
    assert reference() is None


@needs_compiler
@pytest.mark.parallel([2])
def test_all_processes_use_pytorch_if_one_lacks_a_compiler(forgotten: pytest.MonkeyPatch) -> None:
    comm = processes()
    device = torch.device("cpu")
    assert kernels.name(kernels.load_for(comm, device)) == "compiled"
    forget()
    if comm.rank == 1:
        forgotten.setenv("CC", "false")
    assert kernels.name(kernels.load_for(comm, device)) == "torch"
