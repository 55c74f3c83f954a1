"""How fast do workers agree, and for how many bits? Gossip without learning.

Every algorithm at its best setting of a grid, on several kinds of matrices: random ones, which are
the hardest to compress; ones of a fast falling spectrum; photographs, between the two.

Source: Vogels, Karimireddy & Jaggi (2020), arXiv:2008.01425.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import metrics
from experiments.presets import preset
from experiments.runner import Experiment, Results, Run

TITLES = {
    "random": "Random matrices, 100 × 100",
    "low-rank": "Matrices with singular values k⁻², 100 × 100",
    "lfw": "Photographs of faces, 25 × 25",
    "faces": "Photographs of faces (Olivetti), 64 × 64",
}
SHOWN = (  # in the figure; the table has them all
    "uncompressed",
    "power_gossip",
    "power_gossip_random",
    "sign_choco",
    "topk_choco",
    "svd_choco",
    "topk_deepsqueeze",
    "moniqua",
)


def experiment(title: str, changes: Mapping[str, Mapping[str, Any]]) -> Experiment:
    """changes: {kind of data: what its run has besides the published settings}."""
    runs = {
        kind: Run(
            "gossip_run",
            {**preset("consensus", "all"), "data_type": kind, **values},
            {"data": kind},
        )
        for kind, values in changes.items()
    }

    def report(results: Results, folder: Path) -> str:
        parts = [f"{title[0].upper()}{title[1:]}"]
        for kind, run in runs.items():
            rows = results(run)
            name = f"{kind}.svg"
            metrics.consensus_figure(rows[rows["algorithm"].isin(SHOWN)], folder / name)
            table = _markdown(metrics.consensus_table(rows))
            parts.append(f"### {TITLES[kind]}\n\n{table}\n\n![error by step and bits]({name})")
        return "\n\n".join(parts) + "\n"

    return Experiment(title, [lambda results: list(runs.values())], report)


def _markdown(table: list[list[str]]) -> str:
    header, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])
