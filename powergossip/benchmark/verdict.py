"""The answer of a comparison in sentences."""

import math
from collections import Counter
from collections.abc import Sequence

from powergossip.benchmark.comparison import Line, pair
from powergossip.formatting import counted, ordinal, short
from powergossip.runs import figures

BASELINE = "power-gossip"
SIMILAR = 2  # factor of the bytes of peers
UNITS = {  # of values and of differences
    "accuracy": ("{} %", "points"),
    "bits_per_byte": ("{} bits per byte", "bits per byte"),
    "error": ("an error of 10^{}", "powers of ten"),
}
BEST = f"the best other one within {SIMILAR} × of its bytes"


def peers(own: Line, found: Sequence[Line]) -> list[Line]:
    """`own` and the entries with as many megabytes, with a merge, up to a factor. Best first."""
    factor = SIMILAR
    return [
        line
        for line in found
        if line is own or own.cost <= factor * line.cost <= factor**2 * own.cost
    ]


def rivals(own: Line, found: Sequence[Line]) -> list[Line]:
    """The best peer, the peers before and after `own`, and the baseline, without `own`."""
    near = peers(own, found)
    at = near.index(own)
    chosen = [near[0], *near[max(0, at - 1) : at + 2]]
    chosen += [line for line in found if line.name == BASELINE]
    return [line for i, line in enumerate(chosen) if line is not own and line not in chosen[:i]]


def opponent(own: Line, found: Sequence[Line]) -> Line | None:
    """The baseline. For the baseline itself, and where there is none, the best other peer."""
    others = [line for line in found if line.name == BASELINE] + peers(own, found)
    return next((line for line in others if line.name != own.name), None)


def of_tasks(compared: Sequence[tuple[Line, Sequence[Line]]]) -> str:
    """The sentence of an entry on several tasks: (its line, all lines of the task)."""
    name = compared[0][0].name
    first = sum(
        own.name in figures.front({line.name: (line.cost, line.quality) for line in found})
        for own, found in compared
    )
    against = [(own, opponent(own, found)) for own, found in compared]
    verdicts = Counter(pair(own, other).verdict for own, other in against if other)
    beside = BASELINE if name != BASELINE else BEST
    return (
        f"{name}: on the front, where no entry is better for as few bytes, in {first} of "
        f"{counted(len(compared), 'task')}; beside {beside} better in {verdicts['better']}, worse "
        f"in {verdicts['worse']}, without a clear difference in {verdicts['noise']}"
    )


def of_task(own: Line, found: Sequence[Line]) -> str:
    """The sentence of an entry on a task: its measure, ranks, and a difference."""
    measure, near, other = own.task.measure, peers(own, found), opponent(own, found)
    reached = f"{own.diverged} of {counted(len(own.found['runs']), 'run')} diverged"
    if not own.diverged:
        mean = sum(own.last("mean")) / len(own.runs)
        reached = UNITS[measure.name][0].format(measure.shown(mean))
    megabytes = f", for {short(own.cost)} MB" if own.runs else ""
    parts = [f"{own.task.name}: {reached}, {_rank(own, found)}{megabytes}"]
    if len(near) > 1:
        parts.append(f"among entries within {SIMILAR} × of its bytes {_rank(own, near)}")
    if other:
        parts.append(_beside(own, other))
    return "; ".join(parts)


def _rank(own: Line, found: Sequence[Line]) -> str:
    first = 1 + sum(line.quality > own.quality for line in found)
    last = sum(line.quality >= own.quality for line in found)
    shared = f" to {ordinal(last)}" if last > first and not own.diverged else ""
    return f"{ordinal(first)}{shared} of {len(found)}"


def _beside(own: Line, other: Line) -> str:
    """How an entry differs from another one."""
    of, measure = pair(own, other), own.task.measure
    if own.runs and own.last("mean") == other.last("mean"):
        return f"equal to {other.name}, for {own.cost / other.cost:.3g} × its MB"
    if math.isnan(of.difference):  # runs diverged, or have other seeds
        how = "not comparable with" if of.verdict == "noise" else f"{of.verdict} than"
        return f"{how} {other.name}"
    margin = f"± {measure.shown(of.margin)} {UNITS[measure.name][1]}"
    if of.verdict == "noise":
        by = measure.shown(of.difference, "+")
        return f"no clear difference to {other.name} ({by} {margin})"
    return f"{of.verdict} than {other.name} by {measure.shown(abs(of.difference))} {margin}"


def setting(own: Line) -> str:
    """The chosen setting beside the values that were tried, and whether it is at their edge."""
    chosen, tried = own.found["setting"], [tried["setting"] for tried in own.found["tried"]]
    parts, at_edge = [], False
    for key in dict.fromkeys(key for of in (chosen, *tried) for key in of):
        value, values = chosen.get(key), []
        for of in tried:
            values += [of.get(key)] if of.get(key) not in values else []
        if len(values) < 2:
            continue
        numbers = sorted(v for v in values if isinstance(v, int | float))
        is_edge = len(numbers) > 1 and value in (numbers[0], numbers[-1])
        at_edge |= is_edge
        where = f", the {'smallest' if value == numbers[0] else 'largest'}" if is_edge else ""
        default = "default" if value is None else value
        shown = ", ".join("default" if v is None else str(v) for v in values)
        parts.append(f"{key}={default} of {shown}{where}")
    if not parts:
        return "the only setting that was tried"
    return "; ".join(parts) + "; at the edge of the grid, so that others may be better" * at_edge
