"""Methods and stages of the experiments on data that differ between workers."""

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import different_data, tuned_methods
from experiments.different_data import ALL_REDUCE, MORE, PLAIN, RATES
from experiments.study import RELAY, SEEDS, TUNING_SEED, Case, Outcome
from powergossip import algorithms, topologies
from powergossip.algorithms.learning import check
from powergossip.network import Network
from powergossip.parameters import Layout
from powergossip.runner.runner import Folder, Run, carry_out


@pytest.mark.parametrize("case", MORE, ids=", ".join)
def test_methods_are_accepted_pairs(case: Case) -> None:
    values = MORE[case]
    network = Network(topologies.make(values.get("topology", "ring"), 8))
    options = {
        key.removeprefix("optimizer_"): value
        for key, value in values.items()
        if key.startswith("optimizer_")
    }
    averaging = algorithms.make(values["optimizer"], network, Layout([(2, 2)]), **options)
    check(case[1], network, values["optimizer"], averaging)


def made_up(run: Run) -> pd.DataFrame:
    """Rows in which the third learning rate is best at first, and the second one in the end. The
    first one diverges. Test data disagree."""
    rate = run.values["learning_rate"]
    good = 0.9 - abs(rate - RATES[2 if run.values["num_epochs"] == 2 else 1])
    rows = [] if rate == RATES[0] else [("valid_avg", good), ("test_avg", 1 - good)]
    columns = ["name", "split", "value", "epoch", "bits"]
    return pd.DataFrame([["accuracy", *row, 1, 100.0] for row in rows], columns=columns)


@pytest.mark.long
def test_the_best_learning_rate_goes_on_without_a_look_at_test_data() -> None:
    values = tuned_methods.FASHION_MNIST | {"reshuffle_data": False, "use_decentralized_data": True}
    experiment = different_data.experiment("which", values, MORE)
    tuning, longer, final = (stage(made_up) for stage in experiment.stages)
    assert len(tuning) == len(MORE) * len(RATES)
    assert {run.values["num_epochs"] for run in tuning} == {2}
    assert len(longer) == len(MORE) * 2
    assert {run.values["learning_rate"] for run in longer} == {RATES[1], RATES[2]}
    assert {run.values["num_epochs"] for run in longer} == {5}
    assert {run.values["validation_ratio"] for run in tuning + longer} == {0.1}
    assert {run.values["seed"] for run in tuning + longer} == {TUNING_SEED}
    assert not any(run.values["evaluate_test_data"] for run in tuning + longer)
    assert len(final) == len(MORE) * len(SEEDS)
    assert {run.values["learning_rate"] for run in final} == {RATES[1]}
    assert {run.values["num_epochs"] for run in final} == {5}
    assert TUNING_SEED not in {run.values["seed"] for run in final}
    assert not any("validation_ratio" in run.values for run in final)
    for run in tuning + longer + final:
        assert run.values["lr_schedule"] == "cosine"
        assert "lr_schedule_milestones" not in run.values


@pytest.mark.slow
def test_different_data_from_the_first_run_to_the_table(tmp_path: Path) -> None:
    """Real runs, on Digits."""
    power, chain = ("PowerGossip, 8 iterations", "quasi-global-momentum"), ("chain", RELAY)
    values: dict[str, Any] = {**tuned_methods.COMMON, "task_architecture": "MLP", "num_epochs": 4}
    values |= {"n_workers": 4, "reshuffle_data": False, "use_decentralized_data": True}
    values |= {"batch_size": 16}
    methods = {case: MORE[case] for case in (ALL_REDUCE, PLAIN, power, chain)}
    experiment = different_data.experiment(
        "which rule", values, methods, rates=(0.02, 1e30), tuning_epochs=1, seeds=(1,)
    )
    folder = Folder("different", tmp_path)
    assert carry_out(experiment, folder, 2) == []
    stages = list(folder.runs(experiment))
    assert [len(stage) for stage in stages] == [8, 4, 4]
    assert all(run.values["learning_rate"] < 1 for run in stages[2])
    experiment.report(folder.results, tmp_path)
    lines = csv.reader((tmp_path / "table.csv").open())
    table = {(line[0], line[1]): line for line in [*lines][1:]}
    assert list(table) == list(methods)
    for line in table.values():
        mean, worst = (float(cell.split()[0]) for cell in line[2:4])
        assert 10 < worst <= mean + 5
    # Neighbors of a worker: 2 on a ring, and 1.5 in the mean on a chain of 4. All-reduce: 2 · 3/4.
    less = [table[case][6] for case in (ALL_REDUCE, PLAIN, chain)]
    assert less == ["1.3", "1.0", "1.3"]
    assert float(table[power][6]) > 1.5
    assert (tmp_path / "figure.svg").exists()


@pytest.mark.parametrize("topology", ["chain", "binary-tree", "double-binary-tree"])
def test_bits_of_relays_are_the_mean_of_all_workers(topology: str) -> None:
    """Rows have those of worker 0. A worker sends as much as it has edges in the trees."""
    trees = topologies.make(topology, 8).trees or ()
    edges = [sum(worker in edge for tree in trees for edge in tree) for worker in range(8)]
    run = Run("train", {"learning": RELAY, "topology": topology, "n_workers": 8}, {})
    rows = pd.DataFrame({"bits": [0, 100 * edges[0]]})
    assert Outcome([run], [rows]).bits == pytest.approx(100 * sum(edges) / 8)
    assert len(set(edges)) > 1
