"""Random scenarios: deaths, joins, delays, losses, and a resume at a random step.

    python -m tests.harness.fuzz --seconds 600    new ones, for that long
    python -m tests.harness.fuzz --case FILE      a case again

A case with a fault is written to a file, which repeats it. The exit code is then 1.
"""

import argparse
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import fuzz_machines, fuzz_processes, fuzz_virtual, launch
from tests.harness.fuzz_cases import Case, draw, read

# A driver runs a case and returns its outcome in a word. An exception is a fault.
DRIVERS: dict[str, Callable[[Case], str]] = {
    "virtual": fuzz_virtual.run,
    "processes": fuzz_processes.run,
    "machines": fuzz_machines.run,
}
# Seconds of a case, or else it hangs. Real processes have limits of their own.
LONGEST = {"virtual": 60, "processes": 3600, "machines": 3600}
FOLDER = Path("output/fuzz")


def outcome(case: Case) -> tuple[str, str | None]:
    """The outcome of a case in words, and the traceback of one that fails."""
    try:
        with _limited(LONGEST[case.driver]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DRIVERS[case.driver](case), None
    except Exception:
        return "fault", traceback.format_exc()


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def carried_out(seed: int, driver: str) -> str:
    """The outcome of a new case. One with a fault is written to a file and printed."""
    case = draw(seed, driver)
    found, text = outcome(case)
    if text is not None:
        file = FOLDER / f"{driver}-{seed}.yaml"
        case.write(file)
        print(f"{text}python -m tests.harness.fuzz --case {file}\n", flush=True)
    return f"{driver}: {found}"


def main() -> None:
    """Run the case of the command line, or new ones, of all drivers in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--case", type=Path, help="a file of a case")
    given = parser.parse_args()
    start, outcomes = time.monotonic(), Counter[str]()
    try:
        if given.case is not None:
            found, text = outcome(read(given.case))
            print(text or found)
            sys.exit(text is not None)
        seed = int(time.time())
        while time.monotonic() - start < given.seconds:
            outcomes.update(carried_out(seed, driver) for driver in DRIVERS)
            seed += 1
    finally:
        launch.end_fork_server()
    listed = ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))
    print(f"{outcomes.total()} cases in {time.monotonic() - start:.0f} s: {listed}")
    sys.exit(any(name.endswith("fault") for name in outcomes))


if __name__ == "__main__":
    main()
