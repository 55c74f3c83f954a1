"""Stages of the experiment on language models."""

import pandas as pd
import pytest

from experiments import language
from experiments.language import ALWAYS, DATA, FINAL, METHODS, OTHERS, RATES, VARIANTS
from experiments.study import SEEDS, TUNING_SEED
from powergossip.runner.runner import Run

BEST = RATES[1]


def made_up(run: Run) -> pd.DataFrame:
    """Rows in which later methods are better, the second rate is best, and test data disagree."""
    rate, method = run.values["learning_rate"], list(METHODS).index(run.labels["method"])
    value = 3 - 0.01 * method + (0 if rate == BEST else 0.5)
    rows = [("valid_avg", value, 0), ("test_avg", 5 - value, 0), ("test", 6 - value, 0)]
    table = [("bits_per_byte", *row, epoch, 8e6 * epoch) for row in rows for epoch in (1, 2)]
    columns = ["name", "split", "value", "worker", "epoch", "bits"]
    return pd.DataFrame(table, columns=columns)


@pytest.mark.long
def test_the_best_go_on_with_their_rates_without_a_look_at_test_data() -> None:
    first, second = (stage(made_up) for stage in language.experiment().stages)
    assert len(first) == len(DATA) * len(METHODS) * len(RATES)
    for run in first:
        assert run.values["seed"] == TUNING_SEED
        assert run.values["validation_ratio"] == 0.1
        assert not run.values["evaluate_test_data"]
    again = {run.identity for run in first}
    final = [run for run in second if run.identity not in again]
    assert {run.values["learning_rate"] for run in final} == {BEST}
    assert not any("validation_ratio" in run.values for run in final)
    best = [method for method in METHODS if method not in ALWAYS][-OTHERS:]
    for data in DATA:
        of_seeds = {
            (run.labels["method"], run.values["seed"])
            for run in final
            if (run.labels["data"], run.labels["of"]) == (data, FINAL)
        }
        assert of_seeds == {(m, seed) for m in (*ALWAYS, *best) for seed in SEEDS}
    for variant, (chosen, further) in VARIANTS.items():
        of_variant = [run for run in final if run.labels["of"] == variant]
        assert [run.labels["method"] for run in of_variant] == [*chosen]
        assert all(run.values.items() >= further.items() for run in of_variant)
