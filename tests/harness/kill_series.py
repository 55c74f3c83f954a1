"""Digits with eight processes of which some are killed or stopped, against undisturbed runs.

    python -m tests.harness.kill_series --seeds 0:50           missing runs, then the table
    python -m tests.harness.kill_series --seeds 0:0            the table only
    python -m tests.harness.kill_series --cases 'kill 1' …     these cases only

A run has 10 epochs of 12 steps. Processes are killed by SIGKILL up to 30 ms after a random step of
theirs, or at other moments. Undisturbed runs have as many workers as survive, the same number of
steps, and all data. In some cases an exception takes the place of SIGKILL. A run is kept as
FOLDER/CASE/SEED.json, so that the series can be continued.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from powergossip.events import event_log
from powergossip.events.event_log import Entry
from powergossip.formatting import markdown
from powergossip.network.resilient.links import LOST
from powergossip.randomness import generator
from powergossip.runs import metrics
from tests.harness import launch

EPOCHS, STEPS = 10, 12
LONGEST = 240  # seconds of a run, or else it hangs
NEAR = 2.0  # seconds before and after a death in which steps are counted
SLOWER = 0.075  # seconds by which steps are longer where a process is stopped


@dataclass(frozen=True)
class Series:
    """Runs of one kind. reference: the case with as many workers as survive."""

    processes: int = 8
    kills: int = 0
    end: str = "SIGKILL"  # signal of failing.py
    stop: float = 0.0  # seconds
    data_of_lost: str = "left"
    reference: str | None = None
    at: Sequence[tuple[str, int]] = ()  # points of failing.py and counts, by seed in turn

    @property
    def code(self) -> int:
        """The exit code."""
        return LOST if self.kills else 0


# Other moments than after a step: the start, evaluations, checkpoints, the last step, the end.
MOMENTS = [
    *(("load", 1), ("made", 0), ("evaluate", 1), ("evaluate", EPOCHS)),
    *(("save", 1), ("publish", 2), ("row", 30), ("step", EPOCHS * STEPS - 1), ("end", 1)),
    ("figure", 1),
]
CASES = {
    "8 workers": Series(),
    "7 workers": Series(processes=7),
    "6 workers": Series(processes=6),
    "4 workers": Series(processes=4),
    "kill 1": Series(kills=1, reference="7 workers"),
    "kill 2": Series(kills=2, reference="6 workers"),
    "error 1 of 2": Series(processes=2, kills=1, end="ERROR"),
    "error 4": Series(kills=4, end="ERROR", reference="4 workers"),
    "kill 1, redistributed": Series(kills=1, data_of_lost="redistributed", reference="7 workers"),
    "kill 2, redistributed": Series(kills=2, data_of_lost="redistributed", reference="6 workers"),
    "kill 1, other moments": Series(kills=1, reference="7 workers", at=MOMENTS),
    "stop 10 s": Series(stop=10.0),
}
FEWER = {"8 workers": 10, "stop 10 s": 10}  # seeds at most


def plan_of(series: Series, seed: int) -> dict[str, Any]:
    """The processes that are killed or stopped, for tests/harness/failing.py."""
    random = generator(seed, "kill series", series.kills)
    victims = random.permutation(series.processes).tolist()
    if series.stop:
        event = {"process": victims[0], "point": "step", "count": 20, "signal": "SIGSTOP"}
        pace = {str(process): SLOWER for process in range(series.processes)}
        return {"events": [event | {"seconds": series.stop}], "pace": pace, "report": False}
    if series.at:
        # Of those points that only one process reaches, and not at the start, it is process 0.
        point, count = series.at[seed % len(series.at)]
        victim = 0 if point in ("publish", "row", "figure") else victims[victims[0] == 0]
        event = {"process": victim, "point": point, "count": count, "signal": "SIGKILL"}
        return {"events": [event], "report": False}
    events = [
        {
            "process": victim,
            "point": "step",
            "count": int(random.integers(1, EPOCHS * STEPS - 1)),
            "after": round(float(random.uniform(0.001, 0.03)), 4) * (series.end == "SIGKILL"),
            "signal": series.end,
        }
        for victim in victims[: series.kills]
    ]
    return {"events": events, "report": False}


def run(series: Series, seed: int) -> dict[str, Any]:
    """Start a run. Returns what is measured."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        plan = plan_of(series, seed) | {"log": str(Path(temporary) / "log")}
        values = {
            "on_worker_loss": "continue",
            "n_workers": series.processes,
            "seed": seed,
            "num_epochs": EPOCHS,
            "max_steps_per_epoch": STEPS,
            "data_of_lost": series.data_of_lost,
            "record_order": True,
        }
        if series.stop:  # evaluations wait for a stopped process: one epoch of the same length
            values |= {"num_epochs": 1, "max_steps_per_epoch": 170, "batch_size": 1}
        words = [f"{key}={value}" for key, value in values.items()]
        began = time.monotonic()
        try:
            ended = launch.python(
                "tests/harness/failing.py",
                json.dumps(plan),
                folder,
                *words,
                processes=series.processes,
                options=("--with-ft", "ulfm"),
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            return {"hang": True, "plan": plan}
        found: dict[str, Any] = {
            "hang": False,
            "plan": plan,
            "code": ended.returncode,
            "wall": time.monotonic() - began,
            "load": os.getloadavg()[0],
        }
        if ended.returncode != series.code:
            return found | {"text": (ended.stdout + ended.stderr)[-4000:]}
        return found | measured(series, plan, folder, _rows(ended.stdout))


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def measured(
    series: Series, plan: dict[str, Any], folder: Path, ends: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The accuracy, the time lost for each death, and the rows that are there."""
    rows = metrics.load(folder)
    tested = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
    epochs = 1 if series.stop else EPOCHS
    workers = rows[rows["name"] == "workers"]
    entries = event_log.read(folder / "order.jsonl")
    killed = [event["process"] for event in plan["events"] if event["signal"] != "SIGSTOP"]
    found: dict[str, Any] = {
        "accuracy": float(tested["value"].iloc[-1]),
        "survivors": sorted(row["process"] for row in ends),
        "rows complete": tested["epoch"].tolist() == list(range(1, epochs + 1))
        and workers["epoch"].tolist() == list(range(1, epochs + 1)),
        "overshoot": max(row["overshoot"] for row in ends),
        "deaths": [death(entries, victim, series.processes, killed) for victim in killed],
    }
    if series.stop:
        found["stop"] = stop(entries, plan["events"][0]["process"], series)
    return found


def finished(entries: Iterable[Entry], worker: int) -> list[float]:
    """The times at which a worker has taken its steps."""
    return [e.time for e in entries if e.kind == "finish" and e.worker == worker]


def death(
    entries: Sequence[Entry], victim: int, n: int, killed: Sequence[int]
) -> dict[str, Any] | None:
    """The time that the neighbors of a worker on a ring lose by its death, in seconds.

    lost  # the longest time between two steps that ends after the last event of the victim, less
          # the median time between steps
    before, after  # steps per second of the neighbors
    """
    last = max((e.time for e in entries if e.worker == victim and e.kind != "die"), default=None)
    if last is None:
        return None
    lost, rates = 0.0, {"before": 0.0, "after": 0.0}
    neighbors = {(victim - 1) % n, (victim + 1) % n} - set(killed)
    for worker in sorted(neighbors):
        times = finished(entries, worker)
        gaps = [b - a for a, b in pairwise(times)]
        around = [gap for gap, end in zip(gaps, times[1:], strict=True) if 0 < end - last < 5]
        if around:
            lost = max(lost, max(around) - statistics.median(gaps))
        before = [t for t in times if last - NEAR < t < last]
        after = [t for t in times if last < t < last + NEAR]
        rates["before"] += rate(before) / len(neighbors)
        rates["after"] += rate(after) / len(neighbors)
    return {"lost": lost, **rates, "neighbors": len(neighbors)}


def rate(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else math.nan


def stop(entries: Sequence[Entry], victim: int, series: Series) -> dict[str, Any]:
    """The longest time between two steps of another worker while one is stopped, in seconds."""
    own = finished(entries, victim)
    gaps = [b - a for a, b in pairwise(own)]
    longest = max(gaps)
    begin = own[gaps.index(longest)]
    end, others, steps = begin + longest, 0.0, []
    for worker in range(series.processes):
        times = finished(entries, worker)
        if worker == victim:
            continue
        # Time between steps that lies within the stop, with the first one after it began.
        inside = [t for t in times if t <= end]
        pairs = pairwise(inside)
        others = max([others, *(b - a for a, b in pairs if b > begin)])
        steps.append(sum(begin < t < end for t in times))
    return {
        "stopped": longest,
        "longest": others,
        "steps meanwhile": min(steps),
        "taken": [len(finished(entries, worker)) for worker in range(series.processes)],
    }


# --- The table ---


def kept(folder: Path, case: str) -> dict[int, dict[str, Any]]:
    """The runs of a case that are there, by seed."""
    files = (folder / case.replace(" ", "-").replace(",", "")).glob("*.json")
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(files)}


def table(folder: Path) -> str:
    """All cases."""
    lines = []
    means: dict[str, float] = {}
    for case, series in CASES.items():
        runs = kept(folder, case)
        if not runs:
            continue
        good = [run for run in runs.values() if not run["hang"] and run["code"] == series.code]
        accuracies = [100 * run["accuracy"] for run in good]
        means[case] = statistics.fmean(accuracies) if accuracies else math.nan
        reference = means.get(series.reference or "", math.nan)
        deaths = [d for run in good for d in run["deaths"] if d is not None]
        lost = [d["lost"] for d in deaths if d["neighbors"]]
        ratios = [d["after"] / d["before"] for d in deaths if d["after"] > 0 and d["before"] > 0]
        incomplete = sum(not run["rows complete"] for run in good)
        lines.append(
            [
                case,
                str(len(runs)),
                str(sum(run["hang"] for run in runs.values())),
                str(sum(run.get("code", series.code) != series.code for run in runs.values())),
                str(incomplete),
                f"{means[case]:.2f}",
                f"{statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else "",
                f"{min(accuracies):.2f}",
                _number(means[case] - reference, "+.2f"),
                _number(min(accuracies) - reference, "+.2f"),
                f"{statistics.median(lost):.2f}" if lost else "",
                f"{max(lost):.2f}" if lost else "",
                f"{statistics.median(ratios):.2f}" if ratios else "",
            ]
        )
    head = ["case", "runs", "hang", "wrong code", "rows missing", "accuracy", "s.d.", "least"]
    head += ["mean − reference", "least − reference", "lost, median s", "lost, most s", "rate"]
    text = markdown(head, lines)
    stopped = list(kept(folder, "stop 10 s").values())
    stops = [run["stop"] for run in stopped if "stop" in run]
    if stops:
        text += (
            f"\n\nStopped for {statistics.median(s['stopped'] for s in stops):.1f} s: the others "
            f"took {min(s['steps meanwhile'] for s in stops)} steps or more meanwhile, at most "
            f"{max(s['longest'] for s in stops):.3f} s apart. A deadline was exceeded by at most "
            f"{1000 * max(run.get('overshoot', 0) for run in stopped):.1f} ms. "
            f"{sum(len(set(s['taken'])) == 1 for s in stops)} of {len(stops)} caught up."
        )
    return text


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=_seeds, default=range(50), help="A:B, without B")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("output/kill-series"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins later")
    given = parser.parse_args()
    began = time.monotonic()
    try:
        for seed in given.seeds:
            for case in given.cases:
                name = case.replace(" ", "-").replace(",", "")
                file = given.folder / name / f"{seed}.json"
                few = seed >= FEWER.get(case, seed + 1)
                if file.exists() or few or time.monotonic() - began > given.seconds:
                    continue
                found = run(CASES[case], seed)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found))
                short = {k: v for k, v in found.items() if k not in ("plan", "text")}
                print(case, seed, json.dumps(short), file=sys.stderr, flush=True)
    finally:
        launch.end_fork_server()
    text = table(given.folder)
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
