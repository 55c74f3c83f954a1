"""Numbers and tables as text."""

import math
from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 host`, `2 hosts`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def ordinal(number: int) -> str:
    """Return `1st`, `2nd`, `11th`."""
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def listed(indices: Sequence[int]) -> str:
    """Ascending indices as text: 0, 2-5."""
    texts, first = [], 0
    for k, index in enumerate(indices):
        if k + 1 == len(indices) or indices[k + 1] != index + 1:
            texts.append(f"{indices[first]}-{index}" if first < k else str(index))
            first = k + 1
    return ", ".join(texts)


def decimals(number: float, digits: int) -> int:
    """Return the number of decimals that show so many significant digits."""
    exponent = int(f"{number:.{digits - 1}e}".partition("e")[2])  # of the rounded number
    return max(0, digits - 1 - exponent)


def short(number: float) -> str:
    """Return a number with three digits, or more before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def prefixed(number: float, unit: str, prefixes: Sequence[str] = ("", "k", "M", "G", "T")) -> str:
    """Return a number with three digits and a prefix: `12.3 Mbit`."""
    for prefix in prefixes:
        if number < 999.5 or prefix == prefixes[-1]:
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}"


def spread(values: Sequence[float], places: int | None = None) -> str:
    """Return the mean ± the standard deviation of values, or a single value alone.

    Args:
        places: Number of decimals. None: four digits of the mean, and two of the deviation if it
            has more.
    """
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return "infinite" if math.isinf(mean) else "nan"
    several = len(values) > 1
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - several))
    if places is None and not 1e-3 <= abs(mean) < 1e6:
        return f"{mean:.3g} ± {deviation:.2g}" if several else f"{mean:.4g}"
    if places is None:
        places = max(decimals(mean, 4), decimals(deviation, 2) if deviation else 0)
        places = min(places, decimals(mean, 7))
    return f"{mean:.{places}f}" + (f" ± {deviation:.{places}f}" if several else "")


def without_empty_columns(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return a table, [line][cell] with the header first, without columns of empty cells."""
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*columns, strict=True)]


def visible(text: str) -> str:
    """Return a text with escapes in place of control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plain(table: Sequence[Sequence[str]], width: float = math.inf) -> str:
    """Return a table, [line][cell] with the header first, as indented plain text.

    The first column is aligned to the left, the others to the right. Columns beyond the width
    follow below, with the first column again.
    """
    table = [list(map(visible, line)) for line in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    blocks = [[0]]
    for i, own in enumerate(widths[1:], 1):
        if len(blocks[-1]) > 1 and sum(widths[k] + 3 for k in blocks[-1]) + own + 2 > width:
            blocks.append([0])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join(
            "  "
            + "   ".join(
                line[i].rjust(widths[i]) if i else line[i].ljust(widths[i]) for i in columns
            ).rstrip()
            for line in table
        )
        for columns in blocks
    )


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(visible(str(cell)) for cell in line)} |" for line in lines)
