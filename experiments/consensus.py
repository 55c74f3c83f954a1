"""How fast do workers agree, and for how many bits? Gossip without learning.

Every algorithm at its best setting of a grid, on several kinds of matrices: random ones, which are
the hardest to compress; ones of a fast falling spectrum; photographs, between the two.

Source: Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.presets import preset
from experiments.runner import Experiment, Results, Run
from powergossip.runs import figures, tables

TITLES = {
    "random": "Random matrices, 100 × 100",
    "low-rank": "Matrices with singular values k⁻², 100 × 100",
    "lfw": "Photographs of faces, 25 × 25",
    "faces": "Photographs of faces (Olivetti), 64 × 64",
}
HIDDEN = (  # from the figure, for clarity; the table has them all
    "power_gossip_signs",
    "power_gossip_random_signs",
    "sign_deepsqueeze",
    "chebyshev",
    "finite_time",
)

# The paper's, and what costs next to nothing. A third of the time goes into singular value
# decompositions, so these are a run of their own.
PAPERS = (
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
OTHERS = ("power_gossip", "randomk_choco", "qsgd_choco", "fp_choco")


def experiment(
    title: str,
    changes: Mapping[str, Mapping[str, Any]],
    algorithms: Sequence[tuple[str, ...]] = PAPERS,
) -> Experiment:
    """changes: {kind of data: what its runs have besides the published settings}.
    algorithms: those of each run; what takes longest first."""
    runs = {
        (kind, part): Run(
            "gossip_run",
            {**preset("consensus"), "data_type": kind, "algorithm": list(part), **values},
            {"data": kind, "algorithm": part[0] + (" …" if len(part) > 1 else "")},
        )
        for part in algorithms
        for kind, values in changes.items()
    }

    def report(results: Results, folder: Path) -> str:
        import pandas as pd

        parts = [f"{title[0].upper()}{title[1:]}"]
        for kind in changes:
            rows = pd.concat([results(runs[kind, part]) for part in algorithms], ignore_index=True)
            name = f"{kind}.svg"
            figures.consensus_figure(rows[~rows["algorithm"].isin(HIDDEN)], folder / name)
            table = _markdown(tables.consensus_table(rows))
            parts.append(f"### {TITLES[kind]}\n\n{table}\n\n![error by step and bits]({name})")
        return "\n\n".join(parts) + "\n"

    return Experiment(title, [lambda results: list(runs.values())], report)


def _markdown(table: list[list[str]]) -> str:
    header, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])
