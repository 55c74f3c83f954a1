"""Averaging steps as CUDA graphs: captured once, and replayed without the host.

A graph has the kernels of its capture with their arguments. What a rule computes on the host is
thus the same in each replay: a step counter, and with it the random numbers.
"""

import traceback
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import MODELS
from benchmarks.timing import BEFORE_THEY_AGREE, in_turns
from environment.gpu import section
from environment.gpu.section import Setting
from powergossip.parameters import Layout
from tests.harness.averaging import ALONE, EVERY, Case, start
from tests.harness.launch import ROOT
from tests.harness.on_device import SHAPES, WORKERS, Rule, allowed, described, difference, ring

STEPS = 2  # in a graph: the directions of PowerGossip alternate between rows and columns
WARM = 4  # steps before


def main(setting: Setting) -> None:
    """Capture the steps of each rule, or report what prevents it."""
    layout = Layout(SHAPES if setting.quick else MODELS["resnet20"]())
    first = [next(cases) for _, cases in groupby(EVERY, key=lambda case: case[0])]
    rows: list[tuple[object, ...]] = []
    for case in first if setting.quick else EVERY:
        name = described(*case)
        wait = first_wait(setting, case, layout)
        if wait is not None:
            rows.append((name, "no", wait, "", "", ""))
        elif not setting.on_gpu:
            rows.append((name, "not on a CPU", "none", "", "", ""))
        else:
            rows.append((name, *capture(setting, case, layout)))
    section.text(
        f"A graph has {STEPS} steps. *Wait*: the first line of a step at which the host waits for "
        "the device, or copies to it. No graph can contain it. *Replays equal to steps*: *first* "
        "alone if the step depends on a counter of the host, such as that of random numbers."
    )
    columns = ("rule", "captured", "wait", "replays equal to steps", "ms a step", "ms in a graph")
    section.table(columns, rows)


def warm(setting: Setting, case: Case, layout: Layout) -> Rule:
    """A rule on the device after some steps."""
    name, options = case
    rule = Rule(name, options, ring(setting.device), start(WORKERS, layout), layout)
    rule.steps(WARM)
    return rule


def first_wait(setting: Setting, case: Case, layout: Layout) -> str | None:
    """The first line of the library at which a step waits for the device, or None."""
    rule = warm(setting, case, layout)
    if not setting.on_gpu:
        with _Waits() as waits:
            rule.steps(STEPS)
        return waits.first
    torch.cuda.set_sync_debug_mode("error")
    try:
        rule.steps(STEPS)
    except RuntimeError as error:
        return place(traceback.extract_tb(error.__traceback__))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture(setting: Setting, case: Case, layout: Layout) -> tuple[object, ...]:
    """Capture STEPS steps and compare replays with steps: the cells of the table."""
    eager, captured = (warm(setting, case, layout) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(setting.device)
    kept = captured.averaging.state_dict()  # the graph reads its memory, which a rule may replace
    try:
        with torch.cuda.graph(graph):
            captured.steps(STEPS)
    except RuntimeError as error:
        first: BaseException = error  # the end of the capture raises another one
        while first.__context__ is not None:
            first = first.__context__
        reason = str(first).partition("\n")[0]
        where = place(traceback.extract_tb(first.__traceback__))
        return "no", f"{where}: {reason}", "", "", ""
    equal = []
    for _ in range(3):
        eager.steps(STEPS)
        graph.replay()
        equal.append(difference(captured.x, eager.x).off <= allowed(case[0], case[1]))
    replays = "all" if all(equal) else "first" if equal[0] else "none"
    del kept
    section.require(equal[0], f"CUDA graph of {described(*case)}: the first replay is not the step")

    def reset() -> None:
        eager.reset()
        captured.reset()

    times = in_turns(
        {"steps": lambda: eager.steps(STEPS), "graph": graph.replay},
        *((3, 0.02) if setting.quick else (5, 0.2)),
        ALONE,
        setting.device,
        before=reset,
        calls=BEFORE_THEY_AGREE,
    )
    return "yes", "", replays, *(median(ms) / STEPS for ms in times.values())


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
    """True if an operation is given a boolean index, whose true elements the host must count."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)


if __name__ == "__main__":
    main(section.setting())
