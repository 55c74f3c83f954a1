"""Results on a device, compared with those of the CPU to rounding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from environment.gpu import cases
from environment.gpu.cases import GPUCase
from environment.gpu.findings import Findings, Setting, difference
from powergossip import algorithms, randomness
from powergossip.algorithms import aggregation
from powergossip.network import Network, Processes
from powergossip.runs.checkpoints import Checkpoints
from powergossip.trees import map_tensors

CPU = torch.device("cpu")
STEPS = 2  # before a checkpoint, and after it


def run(setting: Setting, findings: Findings) -> None:
    """Check random numbers, averaging rules, aggregations."""
    check_random_numbers(setting, findings)
    check_averaging(setting, findings)
    check_aggregations(setting, findings)


def check_random_numbers(setting: Setting, findings: Findings) -> None:
    """The random streams on the device are those of the CPU: bits to the bit."""
    keys = randomness.keys(1, "check", [(i,) for i in range(5)])
    start = torch.arange(5)
    rows = []
    for name, sample, tolerance in (
        ("bits", lambda k: randomness.bits(k, 3, (999,)), 0.0),
        ("bits from an index on", lambda k: randomness.bits(k, 3, (9,), start.to(k.device)), 0.0),
        ("uniform", lambda k: randomness.uniform(k, 3, 999), 0.0),
        ("normal", lambda k: randomness.normal(k, 3, (999,)), 1e-6),
    ):
        expected, found = sample(keys), sample(keys.to(setting.device)).cpu()
        apart = float((found.double() - expected.double()).abs().max())
        equal = bool((found == expected).all()) if tolerance == 0 else apart <= tolerance
        result = findings.require(equal, f"random numbers: {name} differ by {apart:.3g}")
        rows.append((name, apart, result))
    findings.table(("random numbers", "largest difference", "result"), rows)


# --- Averaging rules ------------------------------------------------------------------------------


class DeviceRun(NamedTuple):
    """A rule on a device, and the x that it averages."""

    network: Network
    rule: algorithms.Averaging
    x: Tensor

    def advance(self) -> "DeviceRun":
        """Make STEPS steps."""
        for _ in range(STEPS):
            self.network.run(self.rule.step(self.x))
        return self

    def save(self, folder: Path) -> None:
        """Write a checkpoint, as the trainer does."""
        state = {"x": self.x, "rule": self.rule.state_dict(), "network": self.network.state_dict()}
        Checkpoints(folder, Processes()).save(STEPS, self.network.workers, state, {})


def started(case: GPUCase, device: torch.device, x: Tensor) -> DeviceRun:
    """A run from copies of x on a device."""
    network = cases.network(device)
    rule = algorithms.make(case.name, network, cases.layout(), **case.options)
    return DeviceRun(network, rule, x.clone().to(device))


def resumed(case: GPUCase, device: torch.device, folder: Path) -> DeviceRun:
    """A run from the checkpoint in a folder."""
    state = Checkpoints(folder, Processes()).load(range(cases.WORKERS))
    run = started(case, device, state["x"])
    run.rule.load_state_dict(map_tensors(lambda tensor: tensor.to(device), state["rule"]))
    run.network.load_state_dict(state["network"])
    return run


def check_averaging(setting: Setting, findings: Findings) -> None:
    """Each rule: equal on both devices, also after a checkpoint of the other one; the mean is kept;
    the copies of a worker's x that its neighbors keep are equal to the bit."""
    rows = []
    x = cases.values(seed=0)
    for number, case in enumerate(cases.averaging_cases(some=setting.quick)):
        folders = [setting.folder / f"{number}-{where}" for where in ("device", "cpu")]
        runs = [started(case, device, x).advance() for device in (setting.device, CPU)]
        for run, folder in zip(runs, folders, strict=True):
            run.save(folder)
            run.advance()
        on_device, on_cpu = (run.x for run in runs)
        apart = {
            "device": difference(on_device, on_cpu),
            "to CPU": difference(resumed(case, CPU, folders[0]).advance().x, on_device),
            "to device": difference(resumed(case, setting.device, folders[1]).advance().x, on_cpu),
        }
        mean = difference(on_device.double().mean(0) + 1, x.double().mean(0) + 1)
        wrong = [name for name, d in apart.items() if d.off > case.allowed]
        wrong += ["mean"] if mean.off else []
        wrong += [] if copies_agree(runs[0]) else ["copies"]
        shown = ", ".join(f"{name} {apart.get(name, mean)}" for name in wrong)
        result = findings.require(not wrong, f"{case.label}: {shown}")
        rows.append((case.label, *apart.values(), mean.largest, result))
    findings.text(
        f"Averaging rules after {2 * STEPS} steps of {cases.WORKERS} workers on a ring. "
        "*resumed*: the second half on the other device, from a checkpoint."
    )
    columns = ("rule", "device", "resumed on the CPU", "resumed on the device", "mean", "result")
    findings.table(columns, rows)


def copies_agree(run: DeviceRun) -> bool:
    """Whether all copies x̂_j of neighbors are equal to worker j's own, if the rule keeps any."""
    state = run.rule.state_dict()
    if not {"public", "publics"} <= {*state}:
        return True
    public, publics = state["public"], state["publics"]
    return bool((public[run.network.neighbors] == publics).all())


# --- Aggregations ---------------------------------------------------------------------------------


def check_aggregations(setting: Setting, findings: Findings) -> None:
    """Each aggregation: residuals and means are equal on both devices."""
    rows = []
    for case in cases.aggregation_cases():
        found, expected = (aggregated(case, device) for device in (setting.device, CPU))
        apart = {name: difference(found[name], expected[name]) for name in expected}
        wrong = [name for name, d in apart.items() if d.off > case.allowed]
        shown = ", ".join(f"{name} {apart[name]}" for name in wrong)
        result = findings.require(not wrong, f"{case.label}: {shown}")
        rows.append((case.label, *apart.values(), result))
    findings.text(f"Gradient aggregations after {2 * STEPS} steps.")
    findings.table(("aggregation", "residual", "sum of the means", "result"), rows)


def aggregated(case: GPUCase, device: torch.device) -> Mapping[str, Tensor]:
    """The residuals, and the sum of the means, after some random gradients."""
    network = cases.network(device)
    rule: Any = aggregation.make(case.name, network, cases.layout(), **case.options)
    residual = torch.zeros_like(cases.values(seed=0), device=device)
    mean, total = torch.zeros_like(residual), torch.zeros_like(residual)
    for step in range(2 * STEPS):
        rule.at_epoch(float(step))
        rule.at_learning_rate(0.1)
        residual += cases.values(seed=1 + step).to(device)
        network.run(rule.step(residual, mean))
        total += mean
    return {"residual": residual, "sum of the means": total}
