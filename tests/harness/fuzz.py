"""Random scenarios: deaths, joins, delays, losses, and a resume at a random step.

    python -m tests.harness.fuzz --seconds 600         new seeds, for that long
    python -m tests.harness.fuzz --seeds 0:100         these seeds
    python -m tests.harness.fuzz --drivers processes   real processes only, not the virtual clock,
                                                       nor machines that meet with a ticket
    python -m tests.harness.fuzz --case FILE           a case again

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
from itertools import count
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


def _cases(given: argparse.Namespace) -> Iterator[tuple[int, str]]:
    for seed in given.seeds or count(int(time.time())):
        for driver in given.drivers:
            yield seed, driver


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, help="how long, without --seeds 60")
    parser.add_argument("--seeds", type=_seeds, help="A:B, those from A to B − 1")
    parser.add_argument("--case", type=Path, help="a file of a case")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of cases with a fault")
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=list(DRIVERS))
    given = parser.parse_args()
    try:
        failed = _repeated(given.case) if given.case is not None else _drawn(given)
    finally:
        launch.end_fork_server()
    sys.exit(failed)


def _repeated(file: Path) -> bool:
    found, text = outcome(read(file))
    print(text or found)
    return text is not None


def _drawn(given: argparse.Namespace) -> bool:
    """Run cases of new or given seeds, of all drivers in turn. Returns whether there is a fault."""
    if given.seeds is None and given.seconds is None:
        given.seconds = 60.0
    start, outcomes = time.monotonic(), Counter[str]()
    for seed, driver in _cases(given):
        if given.seconds is not None and time.monotonic() - start > given.seconds:
            break
        case = draw(seed, driver)
        found, text = outcome(case)
        outcomes[f"{driver}: {found}"] += 1
        if text is not None:
            file = given.folder / f"{driver}-{seed}.yaml"
            case.write(file)
            print(f"{text}python -m tests.harness.fuzz --case {file}\n", flush=True)
    listed = ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))
    print(f"{outcomes.total()} cases in {time.monotonic() - start:.0f} s: {listed}")
    return any(name.endswith("fault") for name in outcomes)


if __name__ == "__main__":
    main()
