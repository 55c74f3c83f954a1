"""Methods and stages of the experiments on data that differ between workers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import different_data, learning
from experiments.different_data import FINALISTS, METHODS, PLAIN, POWER, REFERENCES, RELAY
from experiments.runner import Folder, Run, carry_out
from powergossip import algorithms, topologies
from powergossip.algorithms.averaging import Averaging
from powergossip.algorithms.learning import accepting, check
from powergossip.network import Network
from powergossip.parameters import Layout


def averaging_of(values: dict[str, Any], network: Network) -> Averaging:
    options = {
        key.removeprefix("optimizer_"): value
        for key, value in values.items()
        if key.startswith("optimizer_")
    }
    return algorithms.make(values["optimizer"], network, Layout([(2, 2)]), **options)


def test_all_accepted_pairs_are_methods() -> None:
    ring = Network(topologies.make("ring", 8))
    for name in ("plain", POWER[1], "CHOCO, sign", "CHOCO, top 1 %"):
        values = different_data.AVERAGING[name].values
        accepted = accepting(ring, values["optimizer"], averaging_of(values, ring))
        methods = {m.learning for m in METHODS.values() if m.averaging == name}
        assert methods == {"dpsgd", *accepted}, name


def test_all_methods_are_accepted_pairs() -> None:
    for method in METHODS.values():
        values = method.values
        network = Network(topologies.make(values.get("topology", "ring"), 8))
        check(method.learning, network, values["optimizer"], averaging_of(values, network))


def test_settings_are_different_and_few() -> None:
    for method in METHODS.values():
        assert 4 <= len(method.settings) <= 8, method.name
        assert len({str(setting) for setting in method.settings}) == len(method.settings)


PROTOTYPES = [
    (f"{POWER[8]}, quasi-global-momentum", {"learning_rate": 0.02, "optimizer_diffusion_rate": 1}),
    (
        f"{POWER[11]}, quasi-global-momentum",
        {"learning_rate": 0.03, "optimizer_diffusion_rate": 1.308},
    ),
    (f"{POWER[16]}, quasi-global-momentum", {"learning_rate": 0.03}),
    ("plain, quasi-global-momentum", {}),
    ("plain, exact-diffusion", {}),
    ("plain, gradient-tracking", {"learning_rate": 0.02}),
    ("CHOCO, sign, gradient-tracking", {"learning_rate": 0.01}),
    (f"relay, binary-tree, {RELAY}", {}),
]


@pytest.mark.parametrize(("name", "values"), PROTOTYPES)
def test_settings_that_are_known_to_work_are_tried(name: str, values: dict[str, float]) -> None:
    wanted = values | {"momentum": 0.9}
    assert any(wanted.items() <= setting.items() for setting in METHODS[name].settings)


VALUES = learning.FASHION_MNIST | {"reshuffle_data": False, "use_decentralized_data": True}


def made_up(run: Run) -> pd.DataFrame:
    """Rows in which later methods are better, and a smaller learning rate in more epochs.

    One method diverges in its first epoch. Test data prefer everything else.
    """
    values = run.values
    name = f"{run.labels['averaging']}, {run.labels['learning']}"
    rate = values["learning_rate"] * (1 if values["num_epochs"] == 1 else -1)
    good = 0.1 + list(METHODS).index(name) / 100 + rate / 100
    rows = [] if name == "CHOCO, sign, beer" else [("valid_avg", good), ("test_avg", 1 - good)]
    bits = 100.0 if values["optimizer"] == "dpsgd" else 5.0
    columns = ["name", "split", "value", "epoch", "bits"]
    return pd.DataFrame([["accuracy", *row, 1, bits] for row in rows], columns=columns)


def test_the_best_settings_of_the_best_methods_go_on() -> None:
    few = [name for name, m in METHODS.items() if m.values["optimizer"] != "dpsgd"][:20]
    few = [name for name in few if name not in REFERENCES]
    many = [name for name in METHODS if METHODS[name].values["optimizer"] == "dpsgd"]
    many = [name for name in many if name not in REFERENCES]
    names = [name for name in METHODS if name in {*REFERENCES, *few, *many, "CHOCO, sign, beer"}]
    experiment = different_data.experiment("which", VALUES, names)
    screening, tuning, final = (stage(made_up) for stage in experiment.stages)

    def methods(runs: list[Run]) -> set[str]:
        return {f"{run.labels['averaging']}, {run.labels['learning']}" for run in runs}

    assert methods(screening) == set(names)
    assert {run.values["num_epochs"] for run in screening} == {1}
    assert {run.values["validation_ratio"] for run in screening + tuning} == {0.1}
    assert {run.values["seed"] for run in screening + tuning} == {learning.TUNING_SEED}
    half = FINALISTS // 2
    assert methods(tuning) == {*REFERENCES, *few[-half:], *many[-half:]}
    assert len(tuning) == 3 * len(methods(tuning))
    of_plain = [run.values["learning_rate"] for run in tuning if run.labels["averaging"] == "plain"]
    largest = sorted((s["learning_rate"] for s in METHODS[PLAIN].settings), reverse=True)[:3]
    assert of_plain[:3] == largest
    assert methods(final) == methods(tuning)
    assert len(final) == len(methods(final)) * len(learning.SEEDS)
    for run in screening + tuning + final:
        assert run.values["lr_schedule"] == "cosine"
        assert "lr_schedule_milestones" not in run.values
    assert {run.values["num_epochs"] for run in tuning + final} == {5}
    for run in final:
        assert "validation_ratio" not in run.values
        assert run.values["seed"] in learning.SEEDS
    (rate,) = {r.values["learning_rate"] for r in final if methods([r]) == {PLAIN}}
    assert rate == largest[2]


def test_few_methods_all_go_on_with_other_learning_rates() -> None:
    experiment = different_data.experiment(
        "which", VALUES, different_data.SOME, scale=50.0, screening_epochs=3
    )
    screening, tuning, _ = (stage(made_up) for stage in experiment.stages)
    assert {run.labels["averaging"] for run in tuning} == {
        METHODS[name].averaging for name in different_data.SOME
    }
    tried = {run.values["learning_rate"] for run in screening if run.labels["learning"] == RELAY}
    assert tried == {0.5, 1, 1.5, 2.5, 5, 10, 20}
    assert {run.values["num_epochs"] for run in screening} == {3}


@pytest.mark.slow
def test_different_data_from_the_first_run_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs, on Digits."""
    power = f"{POWER[8]}, quasi-global-momentum"
    names = (*REFERENCES, power, f"relay, chain, {RELAY}")
    few = {name: replace(METHODS[name], settings=METHODS[name].settings[:1]) for name in names}
    first = few[power].settings[0]
    diverging = {**first, "learning_rate": 1e30}
    few[power] = replace(few[power], settings=[diverging, first])
    monkeypatch.setattr(different_data, "METHODS", few)
    monkeypatch.setattr(different_data, "SEEDS", (1,))
    values = {**learning._COMMON, "task_architecture": "MLP", "num_epochs": 4, "n_workers": 4}
    values |= {"reshuffle_data": False, "use_decentralized_data": True, "batch_size": 16}
    experiment = different_data.experiment("which rule", values, names)
    folder = Folder("different", tmp_path)
    assert carry_out(experiment, folder, 2) == []
    stages = list(folder.runs(experiment))
    assert [len(stage) for stage in stages] == [5, 4, 4]
    assert all(run.values["learning_rate"] < 1 for run in stages[2])
    text = experiment.report(folder.results, tmp_path)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {f"{line[0]}, {line[1]}": line for line in lines[2:6]}
    assert list(table) == list(names)
    for line in table.values():
        mean, worst = (float(cell.split()[0]) for cell in line[2:4])
        assert 10 < worst <= mean + 5
    # Neighbors of a worker: 2 on a ring, and 1.5 in the mean on a chain of 4. All-reduce: 2 · 3/4.
    less = [table[name][6] for name in (names[0], names[1], names[3])]
    assert less == ["1.3×", "1.0×", "1.3×"]
    assert float(table[power][6].rstrip("×")) > 1.5
    assert lines[6][:1] == ["averaging"]
    assert (tmp_path / "figure.svg").exists()
