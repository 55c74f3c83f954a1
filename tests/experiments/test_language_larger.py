"""Cases and report of the experiment on what closes the gap to all-reduce."""

import csv
from pathlib import Path

import pandas as pd

from experiments import language_larger
from experiments.language import ALL_REDUCE, DATA, POWER
from experiments.language_larger import CHOSEN, DILOCO, LARGER, NONE, SLOW
from experiments.study import SEEDS
from powergossip.runner.runner import Run

VALUE = {ALL_REDUCE: 2.0, DILOCO: 2.2, POWER: 2.5}


def made_up(run: Run) -> pd.DataFrame:
    corrected = run.values.get("learning_options", {}).get("gradient_correction", False)
    value = VALUE[run.labels["method"]] + (0.1 if corrected else 0)
    bits = 8e6 if run.labels["method"] == ALL_REDUCE else 8e5
    rows = [("test_avg", value, 0), ("test", value + 0.05, 0)]
    table = [("bits_per_byte", *row, 1, bits) for row in rows]
    columns = ["name", "split", "value", "worker", "epoch", "bits"]
    return pd.DataFrame(table, columns=columns)


def test_variants_compare_with_their_own_all_reduce_and_corrections_have_all_seeds() -> None:
    (stage,) = language_larger.experiment().stages
    runs = stage(made_up)
    assert len(runs) == len(LARGER) * len(CHOSEN) + len(DATA) * 2 * 2 * len(SEEDS)
    of_variants = [run for run in runs if "of" in run.labels]
    assert {run.labels["method"] for run in of_variants} == set(CHOSEN)
    assert {run.values["seed"] for run in of_variants} == {SEEDS[0]}
    rates = {
        run.values["learning_options"].get("correction_rate")
        for run in runs
        if run.labels.get("correction") == SLOW
    }
    assert rates == {0.1}


def test_the_report(tmp_path: Path) -> None:
    language_larger.experiment().report(made_up, tmp_path)

    def cells(name: str) -> list[list[str]]:
        return list(csv.reader((tmp_path / f"{name}.csv").open()))

    for number in range(1, len(LARGER) + 1):
        (line,) = (line for line in cells(f"larger-{number}") if line[0] == POWER)
        assert [*line[1:4], line[-1]] == ["2.500", "2.550", "25.0", "10.0"]
    for correction, value in ((NONE, "2.200"), (SLOW, "2.300")):
        start = [next(iter(DATA)), DILOCO, correction, f"{value} ± 0.000"]
        assert any(line[:4] == start for line in cells("corrections"))
