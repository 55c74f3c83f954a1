"""A case of the fuzz harness on machines that meet with a ticket, and the invariants of its run.

Machines are killed and stopped at points of the run (tests/harness/failing.py). Killed ones may
return with the name of the run. Then:

- All programs end, with an exit code that docs/internet.md names, a sentence where it is not 0, and
  no traceback.
- With on_worker_loss=continue, machines that did not fail are there at the end, unless half of the
  machines failed. They have the rows of every evaluated epoch once, and the same.
- The last checkpoint of each machine is whole.
"""

import json
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from powergossip.errors import Dropped
from powergossip.network.resilient.worker_messages import LOST
from powergossip.runs import metrics
from tests.harness.fuzz_cases import Case, require
from tests.harness.fuzz_processes import check_checkpoint, longest
from tests.harness.launch import ROOT
from tests.harness.machines import Machine

_PROGRAM = ROOT / "tests" / "harness" / "failing.py"


def run(case: Case) -> str:
    """Run a case. Returns its outcome: complete, or without machines. Raises Fault."""
    with tempfile.TemporaryDirectory() as temporary:
        running: list[Machine] = []
        try:
            return _run(case, Path(temporary), running)
        except Exception:
            for machine in running:
                print(f"--- {machine.home.name}\n{machine.output}")
            raise
        finally:
            for machine in running:
                machine.close()


def _run(case: Case, base: Path, running: list[Machine]) -> str:
    words = [f"{key}={json.dumps(value)}" for key, value in case.train.items()]
    events = {event["process"]: event for event in case.plan["events"]}
    survives = case.train["on_worker_loss"] == "continue"
    limit = longest(60.0 + sum(event.get("seconds", 0) for event in events.values()))

    def start(number: int, ticket: str, *more: str, **plan: Any) -> Machine:
        plan = {**case.plan, "process": number, "log": str(base / "log"), "dump": limit - 10} | plan
        home = base / str(number)
        first = [json.dumps(plan), str(home / "run")]
        return Machine(home, *first, *words, f"ticket={ticket}", *more, program=_PROGRAM)

    running.append(start(0, "new"))
    ticket = running[0].ticket()
    running += [start(number, ticket) for number in range(1, case.processes)]
    names = {number: machine for number, machine in enumerate(running)}
    codes: dict[int, int] = {}
    for number, event in events.items():
        if survives and "back" in event:
            codes[number] = names[number].end(limit)
            if codes[number] == -signal.SIGKILL:
                time.sleep(event["back"])
                del codes[number]
                names[number] = start(number, names[number].name, "resume=auto", events=[])
                running.append(names[number])
    codes |= {n: machine.end(limit) for n, machine in names.items() if n not in codes}
    happened = {
        int(file.name.rpartition("-")[2]) for file in base.glob("log-*") if "{" in file.read_text()
    }
    killed = {n for n in happened if events[n]["signal"] == "SIGKILL"}
    for number, machine in names.items():
        _check(machine, codes[number], number in happened)
        check_checkpoint(machine.folder, has_own_parts=True)
    whole = [n for n in names if n not in happened]
    if killed and not survives:
        at_end = any(events[n]["point"] == "end" for n in killed)
        require(at_end or all(codes.values()), f"a failure ends all machines: {codes}")
        return "ended"
    if 2 * len(whole) > case.processes or not (killed or survives):
        allowed = {0, LOST} if happened and survives else {0}
        require({codes[n] for n in whole} <= allowed, f"exit codes {codes}, {happened} failed")
    rows = [_rows(names[n]) for n in whole if codes[n] in (0, LOST)]
    for found in rows:
        require([epoch for _, epoch, _ in found] == case.due, f"rows of {case.due}: {found}")
        require(found == rows[0], f"the same rows on all machines: {rows}")
    returned = sum(codes[n] in (0, LOST) for n in happened if "back" in events[n])
    return f"complete, {len(whole)} of {case.processes} whole, {returned} returned"


def _check(machine: Machine, code: int, failed: bool) -> None:
    """Check the exit code and the sentences of a machine."""
    text = machine.output
    require("Traceback" not in text, "no traceback")
    if code == -signal.SIGKILL:
        require(failed, "only a failed machine is killed")
    elif code == LOST:
        require("complete with" in text, "a sentence")
    elif code:
        alone = code == 2 and "no connection to" in text  # came back after the end
        require(alone or code in (1, Dropped.exit_code), f"exit code {code} is one of a loss")
        require(bool(re.search("^error: ", text, re.MULTILINE)), "a sentence")


def _rows(machine: Machine) -> list[tuple[str, int, float]]:
    rows = metrics.load(machine.folder)
    means = rows[(rows["name"] == "accuracy") & (rows["split"] == "test_avg")]
    return [(str(r["name"]), int(r["epoch"]), float(r["value"])) for _, r in means.iterrows()]
