"""The runs of an entry on a task: tuning, or the chosen setting with the seeds of the comparison.

    python -m powergossip.benchmark.entry_runs method=FILE task=NAME tier=quick stage=tuning …

The experiment runner starts it. It writes result.json into its folder.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig

import train
from powergossip import __version__, algorithms, tasks, topologies
from powergossip import registry_options as options
from powergossip.algorithms import trials
from powergossip.algorithms.method import Method, import_rows
from powergossip.atomic_files import write_atomically
from powergossip.benchmark import data, entries
from powergossip.benchmark.tasks import FINAL, OPTION, RESULT, TASKS, BenchmarkTask, Values
from powergossip.errors import BadInput, Diverged
from powergossip.network import Network, Processes
from powergossip.network.collectives import all_reduce_cost
from powergossip.parameters import Layout, Parameters
from powergossip.runner.runner import circumstances
from powergossip.runs import configuration, metrics
from powergossip.state_trees import sha256
from powergossip.topologies import Topology
from powergossip.training.config_checks import checked, shared_keys
from powergossip.training.methods import check_method
from powergossip.user_functions import where

DIVERGED = 1e2  # times the error at the start
ROUNDING = 1e-10  # error, relative to the start, below which matrices agree

# Of runs that compare settings. They do not see the test data.
HELD_OUT: Values = {
    "validation_ratio": 0.1,
    "evaluate_workers": False,
    "evaluate_test_data": False,
    "evaluation_interval": 10**6,  # the last epoch only
}
QUIET: Values = {"log_verbosity": 0, "checkpoint_interval": 10**6}


def main(arguments: Sequence[str]) -> None:
    """Carry out the runs. Raises BadInput."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args(list(arguments))
    texts = {key: text for key, _, text in (key.partition("=") for key in given.keys)}
    request = {key: yaml.safe_load(text) for key, text in texts.items() if key != "method"}
    request["method"] = texts["method"]  # a path, not YAML
    entry, task = entries.find(request["method"]), TASKS[request["task"]]
    if entry.code != request["code"]:
        raise BadInput(f"{request['method']} has changed since its runs began; begin again")
    settings: list[Values] = request["settings"]
    seeds: list[int] = request["seeds"]
    for setting in settings:
        _import(setting)
    final, folder = request["stage"] == FINAL, given.output_dir
    values = task.values_of(request["tier"])
    runs = [
        one(task, values, setting, seed, final, folder / f"{i}-{seed}")
        for i, setting in enumerate(settings)
        for seed in seeds
    ]
    result: dict[str, Any] = {"runs": runs}
    if final:
        result["merge"] = _merge(task, values, runs)
        result["made"] = {"package": __version__, **circumstances()}
    write_atomically(folder / RESULT, json.dumps(result, indent=1) + "\n")


def check(task: BenchmarkTask, tier: str, setting: Values) -> None:
    """Raise BadInput for a setting that is rejected before any data are loaded."""
    values = task.values_of(tier)
    own = values | setting
    try:
        _import(setting)
        topology = _graph(own, 1)
        if task.is_consensus:
            options.find(algorithms.AVERAGING, "averaging rule", own["optimizer"])
            trials.try_averaging(own["optimizer"], topology, partial(_averaging, own))
        else:
            config = checked(_configuration({**own, **HELD_OUT}), Processes())
            check_method(config, Network(topology, Processes()))
    except (Exception, SystemExit) as error:
        line, text = where(error), str(error).partition("\n")[0]
        in_line = f" in {line}" if line else ""
        ours = isinstance(error, ValueError | TypeError) and not line  # BadInput is one
        how = "is rejected" if ours else f"fails{in_line}: {type(error).__name__}"
        raise BadInput(f"{task.name}: the setting {setting} {how}: {text}") from error


def _import(setting: Values) -> None:
    """Import the rows that a setting names package.module:name. Raises ValueError."""
    compressor = setting.get(f"{OPTION}compressor")
    import_rows(setting["optimizer"], setting.get("learning"), compressor)


def _averaging(own: Values, network: Network, layout: Layout) -> algorithms.Averaging:
    """The averaging rule of a setting, with the seed of the run where it has such an option."""
    name = own["optimizer"]
    given = {k.removeprefix(OPTION): v for k, v in own.items() if k.startswith(OPTION)}
    shared = {name: own[key] for name, key in shared_keys(name).items() if key in own}
    return Method.of(name, options=shared | given).averaging_rule(network, layout)


def _configuration(keys: Values) -> DictConfig:
    """The configuration of train.py with these values. Options of rows of the user come last."""
    config = configuration.structured(train.Config)
    for key in sorted(keys, key=lambda key: key not in config):
        config[key] = keys[key]
    return config


def one(
    task: BenchmarkTask, values: Values, setting: Values, seed: int, final: bool, folder: Path
) -> dict[str, Any]:
    """A run of a setting: its seed, evaluations, and whether it diverged."""
    file = folder / RESULT
    with suppress(OSError, ValueError):  # of a start that was killed later
        return dict(json.loads(file.read_text()))
    make = agree if task.is_consensus else learn
    with_names = {"setting": setting, "seed": seed}
    found = with_names | make(task, values, setting, seed, final, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(found) + "\n")
    return found


def learn(
    task: BenchmarkTask, values: Values, setting: Values, seed: int, final: bool, folder: Path
) -> dict[str, Any]:
    """Train. Evaluations are of test data in the end, of held-out training data before."""
    keys = {**values, **setting, "seed": seed, **QUIET, **({} if final else HELD_OUT)}
    diverged = False
    train.config = _configuration(keys)
    try:
        train.main(["resume=auto", "--output-dir", str(folder)])
    except Diverged:
        diverged = True
    rows = metrics.load(folder)
    split = "test" if final else "valid"
    mean = metrics.select_rows(rows, task.measure.name, split=f"{split}_avg")
    workers = metrics.select_rows(rows, task.measure.name, split=split)
    by_epoch = workers.groupby("epoch")["value"]
    worst = by_epoch.min() if task.measure.larger_is_better else by_epoch.max()
    facts = json.loads((folder / "info.json").read_text())
    steps, busiest = facts["steps_per_epoch"], _busiest(folder)
    evaluations = [
        {
            "step": round(row["epoch"] * steps),
            "mean": row["value"],
            "worst": float(worst.get(row["epoch"], math.nan)),
            "MB": busiest * row["bits"] / 8e6,
            "messages": int(row["messages"]),
            "seconds": row["seconds"],
        }
        for row in mean.to_dict("records")
    ]
    hashed = facts.get("data") or facts.get("tokens_sha256", "")
    return {"diverged": diverged, "evaluations": evaluations, "data": hashed}


def agree(
    task: BenchmarkTask, values: Values, setting: Values, seed: int, final: bool, folder: Path
) -> dict[str, Any]:
    """Average matrices, until they agree but for rounding. The measure is log₁₀ of the mean squared
    error, relative to the start."""
    own = values | setting | {"seed": seed}
    start = data.matrices(values, seed)
    network = Network(_graph(own, seed), Processes())
    rule = _averaging(own, network, Layout([(values["size"], values["size"])]))
    x = start.flatten(1).clone()
    mean = x.double().mean(0)

    def errors() -> torch.Tensor:
        return (x - mean).square().sum(1)

    at_start = errors().mean().item()
    zeros: dict[str, float] = dict.fromkeys(("step", "mean", "worst", "MB", "messages"), 0)
    evaluations, diverged = [zeros], False
    for step in range(1, values["steps"] + 1):
        network.run(rule.step(x))
        if step not in measured(values["steps"]):
            continue
        error = errors() / at_start
        diverged = not error.mean().item() <= DIVERGED
        if diverged:
            break
        evaluations.append(
            {
                "step": step,
                "mean": math.log10(max(error.mean().item(), ROUNDING)),
                "worst": math.log10(max(error.max().item(), ROUNDING)),
                "MB": int(network.bits.max()) / 8e6,
                "messages": int(network.messages.max()),
            }
        )
        if error.max().item() <= ROUNDING:
            break
    return {
        "diverged": diverged,
        "evaluations": evaluations,
        "data": sha256(data.matrices(values, 0)),
    }


def _graph(setting: Mapping[str, Any], seed: int) -> Topology:
    """The graph of a setting with the values of its task."""
    options = setting.get("topology_options", {})
    return topologies.make(setting["topology"], setting["n_workers"], seed=seed, options=options)


def _merge(task: BenchmarkTask, values: Values, runs: Sequence[Mapping[str, Any]]) -> float:
    """Megabytes of a worker in an all-reduce that gives all workers the mean model.

    0 if all models agree at the end of the runs.
    """
    last = [run["evaluations"][-1] for run in runs if run["evaluations"]]
    if task.is_consensus or all(at["worst"] == at["mean"] for at in last):
        return 0.0
    built = tasks.make(
        values["task"],
        n_workers=values["n_workers"],
        batch_size=values["batch_size"],
        seed=1,
        task_options=values["task_options"],
    )
    size = Parameters([built.model(values["task_architecture"], 1)]).layout.size
    return all_reduce_cost(values["n_workers"], 32 * size)[0] / 8e6


def _busiest(folder: Path) -> float:
    """The bits of the worker that has sent the most in a run, relative to worker 0's bits.

    1 for a run that diverged before its first checkpoint.
    """
    folders = list((folder / "checkpoints").glob("step-*"))
    if not folders:
        return 1.0
    (part,) = max(folders, key=lambda of: int(of.name[5:])).glob("part-*.pt")
    bits = torch.load(part, weights_only=True)["network"]["bits"]
    return float(bits.max() / bits[0]) if bits[0] else 1.0


@cache
def measured(steps: int) -> frozenset[int]:
    """The steps after which errors are measured: few per factor of ten, and the last one."""
    return frozenset(round(steps ** (i / 80)) for i in range(81))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
