"""Averaging steps as CUDA graphs: captured once, and replayed without the host.

A graph has the kernels of its capture with their arguments. What a rule computes on the host is
thus the same in each replay: a step counter, and with it the random numbers.
"""

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.device_timing import milliseconds
from benchmarks.shapes import MODELS
from environment.gpu import cases
from environment.gpu.cases import GPUCase
from environment.gpu.findings import Findings, Setting, difference
from powergossip import algorithms
from powergossip.parameters import Layout

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2  # in a graph: the directions of PowerGossip alternate between rows and columns
WARM = 4  # steps before


def run(setting: Setting, findings: Findings) -> None:
    """Capture the steps of each rule, or report what prevents it."""
    layout = cases.layout() if setting.quick else Layout(MODELS["resnet20"]())
    rows: list[tuple[object, ...]] = []
    for case in cases.averaging_cases(some=setting.quick):
        wait = first_wait(setting, case, layout)
        if wait is not None:
            rows.append((case.label, "no", wait, "", "", ""))
        elif not setting.on_gpu:
            rows.append((case.label, "not on a CPU", "none", "", "", ""))
        else:
            rows.append((case.label, *capture(setting, findings, case, layout)))
    findings.text(
        f"A graph has {STEPS} steps. *Wait*: the first line of a step at which the host waits for "
        "the device, or copies to it. No graph can contain it. *Replays equal to steps*: *first* "
        "alone if the step depends on a counter of the host, such as that of random numbers."
    )
    columns = ("rule", "captured", "wait", "replays equal to steps", "ms a step", "ms in a graph")
    findings.table(columns, rows)


class _Stepper:
    """A rule and its x on a device, after WARM steps."""

    def __init__(self, setting: Setting, case: GPUCase, layout: Layout):
        self.network = cases.network(setting.device)
        self.rule = algorithms.make(case.name, self.network, layout, **case.options)
        random = torch.Generator().manual_seed(0)
        self.x = torch.randn(cases.WORKERS, layout.size, generator=random).to(setting.device)
        self.start = self.x.clone()
        self.steps(WARM)

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.network.run(self.rule.step(self.x))


def first_wait(setting: Setting, case: GPUCase, layout: Layout) -> str | None:
    """The first line of the library at which a step waits for the device. None if there is none."""
    stepper = _Stepper(setting, case, layout)
    if not setting.on_gpu:
        with _Waits() as waits:
            stepper.steps()
        return waits.first
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepper.steps()
    except RuntimeError as error:
        return place(traceback.extract_tb(error.__traceback__))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture(
    setting: Setting, findings: Findings, case: GPUCase, layout: Layout
) -> tuple[object, ...]:
    """Capture STEPS steps and compare replays with steps: the cells of the table."""
    eager, captured = (_Stepper(setting, case, layout) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(setting.device)
    try:
        with torch.cuda.graph(graph):
            captured.steps()
    except RuntimeError as error:
        first: BaseException = error  # the end of the capture raises another one
        while first.__context__ is not None:
            first = first.__context__
        reason = str(first).partition("\n")[0]
        where = place(traceback.extract_tb(first.__traceback__))
        return "no", f"{where}: {reason}", "", "", ""
    equal = []
    for _ in range(3):
        eager.steps()
        graph.replay()
        equal.append(difference(captured.x, eager.x).off <= case.allowed)
    replays = "all" if all(equal) else "first" if equal[0] else "none"
    findings.require(equal[0], f"CUDA graph of {case.label}: the first replay is not the step")

    def reset() -> None:
        eager.x.copy_(eager.start)
        captured.x.copy_(captured.start)

    rounds, seconds = (3, 0.02) if setting.quick else (5, 0.2)
    times = milliseconds([eager.steps, graph.replay], setting.device, rounds, seconds, reset)
    return "yes", "", replays, *(ms / STEPS for ms in times)


def place(stack: traceback.StackSummary) -> str:
    """The innermost line of the library in a stack: `file:line code`."""
    own = [frame for frame in stack if str(ROOT / "powergossip") in frame.filename]
    frame = own[-1] if own else stack[-1]
    file = frame.filename.removeprefix(f"{ROOT}/")
    return f"`{file}:{frame.lineno} {frame.line}`"


class _Waits(TorchDispatchMode):
    """On a CPU, a stand-in: operations that on a GPU would wait for it, or copy to it."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_unique2", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and _has_mask(args)
        if self.first is None and (name in self.NAMES or by_mask):
            self.first = place(traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Whether an operation is given a boolean index, whose true elements the host must count."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
