"""Random scenarios: deaths, stops, joins, delays, losses, and a resume at a random step.

    python -m tests.fuzz --seconds 600     new seeds, for that long
    python -m tests.fuzz --seeds 0:100     these seeds
    python -m tests.fuzz --case FILE       a case again

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

from tests import fuzz_virtual
from tests.fuzz_cases import Case, draw, read

# A driver runs a case and returns its outcome in a word. An exception is a fault.
DRIVERS: dict[str, Callable[[Case], str]] = {"virtual": fuzz_virtual.run}
LONGEST = 60  # seconds of a case, or else it hangs
FOLDER = Path("output/fuzz")


def outcome(case: Case) -> tuple[str, str | None]:
    """The outcome of a case in words, and the traceback of one that fails."""
    try:
        with _limited(LONGEST), warnings.catch_warnings():
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
    given = parser.parse_args()
    if given.case is not None:
        found, text = outcome(read(given.case))
        print(text or found)
        sys.exit(text is not None)
    if given.seeds is None and given.seconds is None:
        given.seconds = 60.0
    start, outcomes = time.monotonic(), Counter[str]()
    first = int(time.time())
    for seed in given.seeds or count(first):
        if given.seconds is not None and time.monotonic() - start > given.seconds:
            break
        case = draw(seed)
        found, text = outcome(case)
        outcomes[found] += 1
        if text is not None:
            file = given.folder / f"{seed}.yaml"
            case.write(file)
            print(f"{text}python -m tests.fuzz --case {file}\n", flush=True)
    listed = ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))
    print(f"{outcomes.total()} seeds in {time.monotonic() - start:.0f} s: {listed}")
    sys.exit(outcomes["fault"] > 0)


if __name__ == "__main__":
    main()
