"""How fast do workers agree, and for how many bits? Gossip without learning.

Every algorithm is shown at the best setting of a grid, on several kinds of matrices. Random
matrices are the hardest to compress, matrices with a rapidly decaying spectrum the easiest, and
photographs lie in between.

References:
    Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from experiments.study import table
from powergossip import presets
from powergossip.runner.runner import Experiment, Results, Run
from powergossip.runs import figures, summaries

TITLES = {
    "random": "Random matrices, 100 × 100",
    "low-rank": "Matrices with singular values k⁻², 100 × 100",
    "lfw": "Photographs of faces, 25 × 25",
    "faces": "Photographs of faces (Olivetti), 64 × 64",
}
PRESETS = {"faces": "consensus/faces"}  # kind of data → its own preset
HIDDEN = (  # not in the figure, for clarity, but in the table
    "power_gossip_signs",
    "power_gossip_random_signs",
    "sign_deepsqueeze",
    "chebyshev",
    "finite_time",
)

# The algorithms of the paper, and some that take little time. Singular value decompositions take a
# third of the total time and have a separate run.
ALGORITHMS = (
    (
        "uncompressed",
        "power_gossip",
        "power_gossip_random",
        "power_gossip_signs",
        "power_gossip_random_signs",
        "sign_choco",
        "topk_choco",
        "sign_deepsqueeze",
        "topk_deepsqueeze",
        "moniqua",
        "chebyshev",
        "finite_time",
    ),
    ("svd_choco",),
)


def experiment(title: str, kinds: Sequence[str]) -> Experiment:
    """An experiment on several kinds of data."""
    runs = {
        (kind, part): Run(
            "gossip_run",
            {
                **presets.values(PRESETS.get(kind, "consensus")),
                "data_type": kind,
                "algorithm": list(part),
            },
            {"data": kind, "algorithm": part[0] + (" …" if len(part) > 1 else "")},
        )
        for part in ALGORITHMS
        for kind in kinds
    }

    def report(results: Results, folder: Path) -> str:
        import pandas as pd

        first, *others = (f"{kind}.svg" for kind in kinds)
        parts = [f"![error by step and bits, {TITLES[kinds[0]]}]({first})"]
        for kind in kinds:
            rows = pd.concat([results(runs[kind, part]) for part in ALGORITHMS], ignore_index=True)
            shown = rows[~rows["algorithm"].isin(HIDDEN)]
            figures.consensus_figure(shown, folder / f"{kind}.svg")
            header, *lines = summaries.consensus_table(rows)
            header = [
                f"sent {to}" if name == "sent" else name for to, name in pairwise(["", *header])
            ]
            parts += [
                f"## {TITLES[kind]}",
                f"Errors are relative to the start, {summaries.error_at_start(rows):.6g}.",
                table(folder / f"{kind}.csv", [header, *lines]),
            ]
        if others:
            parts.append(f"`report` draws the others, too: {', '.join(others)}.")
        return "\n\n".join(parts)

    return Experiment(title, [lambda results: list(runs.values())], report)
