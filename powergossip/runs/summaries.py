"""Tables of rows as plain text. See powergossip.runs.metrics for the rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from powergossip.formatting import plain, prefixed, without_empty_columns
from powergossip.runs.clock import data_fraction
from powergossip.runs.metrics import COLUMNS, last_rows, last_values

if TYPE_CHECKING:
    from pandas import DataFrame


def summary(rows: "DataFrame", time_is_virtual: bool = False, sender: int = 0) -> str:
    """Return the table at the end of a training run as plain text: accuracy, bits, time.

    Each line shows the last epoch that has its rows. A line without rows is omitted. Megabytes are
    10⁶ bytes.

    Args:
        time_is_virtual: True if the column seconds shows the virtual clock. Phases are in real
            seconds.
        sender: Worker of the column bits: the first one of the process that writes the rows.
    """
    lines: list[tuple[str, str]] = []

    def add(label: str, shown: str, name: str, **tags: str) -> bool:
        values = last_values(rows, name, **tags)
        if len(values):
            lines.append((label, format(values.iloc[-1], shown)))
        return len(values) > 0

    add("test accuracy, mean model", ".2%", "accuracy", split="test_avg")
    add("validation accuracy, mean model", ".2%", "accuracy", split="valid_avg")
    workers = last_values(rows, "accuracy", split="test")
    if len(workers) == 1:
        lines.append(("test accuracy, one worker", f"{workers.iloc[0]:.2%}"))
    elif len(workers):
        spread = f"{workers.mean():.2%} (worst {workers.min():.2%}, best {workers.max():.2%})"
        lines.append((f"test accuracy, mean of {len(workers)} workers", spread))
    if not add("test cross entropy, mean model", ".4f", "cross_entropy", split="test_avg"):
        entropy = last_values(rows, "cross_entropy", split="test")
        if len(entropy):
            lines.append(("test cross entropy, workers", f"{entropy.mean():.4f}"))
    add("validation cross entropy, mean model", ".4f", "cross_entropy", split="valid_avg")
    lines += _further_metrics(rows)
    add("consensus distance", ".3g", "consensus_distance", type="params_only")

    bits = rows["bits"].max()
    if bits >= 0:
        shown = f"{prefixed(bits, 'bit')} = {prefixed(bits / 8, 'B')}"
        lines.append((f"sent by worker {sender}", shown))
    plain = last_rows(rows, "uncompressed_gossip_bits")
    if len(plain) and plain["bits"].iloc[-1] > 0:
        ratio = plain["value"].iloc[-1] / plain["bits"].iloc[-1]
        lines.append(("", f"{ratio:.1f} times fewer bits than uncompressed gossip"))
    merge = merge_bits(rows)
    if merge > 0:
        lines.append(("", f"{prefixed(merge / 8, 'B')} more for a merge to the mean model"))
    if rows["messages"].max() >= 0:
        lines.append(("", f"{rows['messages'].max():,.0f} messages"))

    skipped = last_rows(rows, "skipped_blocks")
    if len(skipped):
        fraction = skipped["value"].iloc[-1] / skipped["instances"].iloc[-1]
        lines.append(("", f"{fraction:.2%} of the blocks of messages left out"))

    seconds = rows["seconds"].max()
    if seconds >= 0:
        lines.append(("virtual time" if time_is_virtual else "time", f"{seconds:.1f} s"))
    phases = last_rows(rows, "phase_seconds")
    if len(phases) and "phase" in phases:
        elapsed = phases.groupby("phase", sort=False)["value"].last().to_dict()
        whole = sum(elapsed.values())
        if time_is_virtual:
            lines.append(("time of its computation", f"{whole:.1f} s"))
        else:
            elapsed["other"] = max(0.0, seconds - whole)
            whole = seconds
        for phase, spent in elapsed.items():
            fraction = f" ({spent / whole:.0%})" if whole > 0 else ""
            step_fraction = f", {data_fraction(elapsed):.0%} of a step" if phase == "data" else ""
            lines.append((f"    {phase}", f"{spent:.1f} s{fraction}{step_fraction}"))

    if not lines:
        return "The run has no rows."
    last = rows["epoch"].max()
    title = [f"After {last:g} epoch{'' if last == 1 else 's'}"] if last >= 0 else []
    width = max(len(label) for label, _ in lines)
    return "\n".join([*title, *(f"  {label:<{width}}   {value}" for label, value in lines)])


def merge_bits(rows: "DataFrame") -> float:
    """Return the bits of a worker in a merge after the last epoch, 0 if the models agree."""
    found = last_values(rows, "merge_bits")
    return float(found.iloc[-1]) if len(found) else 0.0


def _further_metrics(rows: "DataFrame") -> list[tuple[str, str]]:
    """A line for each other metric of the mean model, and one of the workers."""
    lines: list[tuple[str, str]] = []
    if "split" not in rows:
        return lines
    shown = ("accuracy", "top5_accuracy", "cross_entropy")
    kinds = (("test", "test_avg", "test"), ("validation", "valid_avg", "valid"))
    for kind, mean_split, worker_split in kinds:
        for split, of in ((mean_split, "mean model"), (worker_split, "workers")):
            for name in rows["name"][rows["split"] == split].unique():
                if name not in shown:
                    values = last_values(rows, name, split=split)
                    text = f"{values.mean():.4g}"
                    if len(values) > 1:
                        text += f" ({values.min():.4g} to {values.max():.4g})"
                    lines.append((f"{kind} {name}, {of}", text))
    return lines


def consensus_summary(rows: "DataFrame") -> str:
    """Return the table at the end of gossip_run.py as plain text, see `consensus_table`.

    Raises:
        ValueError: If no rows are named error.
    """
    return "\n".join(
        [
            "Best setting of each algorithm. Errors are relative to the start, which is "
            f"{error_at_start(rows):.6g}",
            plain(consensus_table(rows)),
        ]
    )


def consensus_table(rows: "DataFrame") -> list[list[str]]:
    """Return each algorithm of gossip_run.py at its best setting, [line][cell], the header first.

    The best setting has the smallest final error. All errors are relative to the one at the start.
    "per step" are the bits that worker 0 sends in a step, in the mean. "to 1e-3" and "to 1e-6" are
    the steps, and the bits sent, of the first row with an error of at most that. Empty columns are
    left out.

    Raises:
        ValueError: If no rows are named error.
    """
    settings = by_setting(rows)
    header = ["algorithm", "diffusion rate", "theta", "per step", "to 1e-3", "sent", "to 1e-6"]
    table = [[*header, "sent", "final error", "diverged"]]
    for algorithm, best in best_settings(settings).items():
        tags = (best[key].iloc[0] for key in ("diffusion_rate", "theta"))
        line = [algorithm, *(f"{float(tag):.4g}" if tag else "" for tag in tags)]
        steps, bits = best.iloc[-1][["epoch", "bits"]]
        line.append(prefixed(bits / steps, "bit") if steps > 0 and bits > 0 else "")
        errors = best[best["name"] == "error"]
        relative = errors["value"] / (errors["value"].iloc[0] or 1.0)
        for target in (1e-3, 1e-6):
            reached = errors[relative <= target]
            if len(reached):
                steps, bits = reached.iloc[0][["epoch", "bits"]]
                line += [f"{steps:.0f} steps", prefixed(bits, "bit")]
            else:
                line += ["never", ""]
        last = "diverged" if has_diverged(best) else f"{relative.iloc[-1]:.3g}"
        tried = [has_diverged(group) for (name, *_), group in settings.items() if name == algorithm]
        table.append([*line, last, f"{sum(tried)} of {len(tried)}"])
    return without_empty_columns(table)


def error_at_start(rows: "DataFrame") -> float:
    """Return the error of gossip_run.py at step 0. Raises ValueError without rows named error."""
    return float(max(group["value"].iloc[0] for group in by_setting(rows).values()))


def by_setting(rows: "DataFrame") -> "dict[tuple[str, ...], DataFrame]":
    """Return the rows of gossip_run.py by setting: (algorithm, diffusion_rate, theta) → rows,
    ordered by epoch.

    Raises:
        ValueError: If there are no such rows.
    """
    tags = ["algorithm", "diffusion_rate", "theta"]
    chosen = rows[rows["name"].isin(["error", "diverged"])].sort_values("epoch", kind="stable")
    chosen = chosen.reindex(columns=[*COLUMNS, *tags])
    chosen[tags] = chosen[tags].astype(object).where(chosen[tags].notna(), "")
    settings = {
        tuple(str(tag) for tag in key): group
        for key, group in chosen.groupby(tags, sort=False)
        if (group["name"] == "error").any()
    }
    if not settings:
        raise ValueError("there are no rows named error, as gossip_run.py writes them")
    return settings


def best_settings(settings: "Mapping[tuple[str, ...], DataFrame]") -> "dict[str, DataFrame]":
    """Return the rows of each algorithm's setting with the smallest final error.

    A setting that has diverged is worse than any other.
    """

    def rank(group: "DataFrame") -> tuple[bool, float]:
        return has_diverged(group), group["value"][group["name"] == "error"].iloc[-1]

    best: dict[str, DataFrame] = {}
    for (algorithm, *_), group in settings.items():
        if algorithm not in best or rank(group) < rank(best[algorithm]):
            best[algorithm] = group
    return best


def has_diverged(group: "DataFrame") -> bool:
    """Return whether the rows of a setting end with its divergence."""
    return bool((group["name"] == "diverged").any())
