"""Laws of tables and figures of several runs: grouping by configuration, means over seeds, columns
for what differs, and errors of input."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from powergossip import compare
from powergossip.compare.groups import WITHOUT_EFFECT
from powergossip.runs.metrics import FILE
from powergossip.training.resuming import FREE_TO_CHANGE
from tests.harness.compared_runs import columns, compared, write_run, write_sweep

# --- Table ----------------------------------------------------------------------------------------


def test_a_line_has_the_end_and_the_best_epoch_of_a_run(tmp_path: Path) -> None:
    (section,) = compared(write_run(tmp_path / "a"))
    assert columns(section) == {
        "run": [str(tmp_path / "a")],
        "final": ["62.50"],
        "worst worker": ["52.50"],
        "best": ["75.00"],
        "its worst worker": ["65.00"],
        "MB sent": ["3.000"],
        "seconds": ["6.000"],
    }
    assert section.metric == compare.Metric("accuracy", "test", larger=True)


def test_seeds_are_a_mean_and_a_standard_deviation(tmp_path: Path) -> None:
    """The values 0.5, 0.6 and 0.7 give 60 ± 10 %. The best epochs may differ."""
    folders = [
        write_run(tmp_path / "1", (0.9, 0.5, 0.5), seed=1),
        write_run(tmp_path / "2", (0.1, 0.8, 0.6), seed=2),
        write_run(tmp_path / "3", (0.1, 0.2, 0.7), seed=3),
    ]
    (section,) = compared(*folders)
    (group,) = section.groups
    cells = columns(section)
    assert (cells["final"], cells["worst worker"]) == (["60.00 ± 10.00"], ["50.00 ± 10.00"])
    assert (cells["best"], cells["runs"]) == (["80.00 ± 10.00"], ["3"])
    assert cells["run"] == [f"{folders[0]} +2"]
    band = group.band()
    np.testing.assert_allclose(band["mean"], [110 / 3, 50, 60])
    np.testing.assert_allclose(band["deviation"], [46.188, 30, 10], rtol=1e-4)


def test_keys_that_differ_are_columns(tmp_path: Path) -> None:
    """Seeds, keys without effect and options that only one method has are none."""
    gossip: dict[str, Any] = {"optimizer_num_iterations": 2, "topology": "ring", "data_dir": "/a"}
    (section,) = compared(
        write_run(tmp_path / "a", **gossip, optimizer_rank=1, log_verbosity=0),
        write_run(tmp_path / "b", **gossip, optimizer_rank=1, seed=2, trackers=["wandb"]),
        write_run(tmp_path / "c", **gossip, optimizer_rank=2, device="cuda:0"),
        write_run(tmp_path / "d", **gossip, optimizer_rank=2, seed=2, device="cuda:1"),
        write_run(tmp_path / "e", optimizer="dpsgd", topology="ring", data_dir="/b"),
    )
    assert section.keys == ["optimizer", "optimizer_rank", "device"]
    cells = columns(section)
    assert cells["optimizer"] == ["power-gossip", "power-gossip", "dpsgd"]
    assert cells["optimizer_rank"] == ["1", "2", ""]
    assert cells["device"] == ["", "cuda", ""]
    assert cells["runs"] == ["2", "2", "1"]
    labels = section.labels()
    assert labels[0] == "power-gossip, rank 1"
    assert len(set(labels)) == 3


def test_mappings_and_lists_differ_too(tmp_path: Path) -> None:
    (section,) = compared(
        write_run(tmp_path / "a", task_options={"normalization": "group"}, lr_schedule=[[1, 0.1]]),
        write_run(tmp_path / "b", task_options={}, lr_schedule=[[2, 0.1]]),
    )
    cells = columns(section)
    assert cells["task_options"] == ["{normalization: group}", "{}"]
    assert cells["lr_schedule"] == ["[[1, 0.1]]", "[[2, 0.1]]"]


@pytest.mark.parametrize(
    ("options", "label", "cells"),
    [
        (
            {"metric": "cross_entropy"},
            "test cross entropy",
            {"final": "0.3333", "worst worker": "0.8333", "best": "0.3333"},
        ),
        (
            {"metric": "cross_entropy", "split": "valid"},
            "validation cross entropy",
            {"final": "0.6667", "best": "0.6667"},
        ),
        ({"split": "train"}, "training accuracy (%)", {"final": "99.00", "best": "99.00"}),
        ({"metric": "consensus_distance"}, "consensus distance", {"best": "0.001000"}),
    ],
)
def test_a_metric_and_a_split_can_be_chosen(
    tmp_path: Path, options: dict[str, Any], label: str, cells: dict[str, str]
) -> None:
    (section,) = compared(write_run(tmp_path / "a"), **options)
    assert section.metric.label == label
    found = {header: cell for header, (cell,) in columns(section).items()}
    assert found.items() >= cells.items()
    assert ("worst worker" in found) == ("worst worker" in cells)


def test_without_a_mean_model_the_mean_over_workers_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    lines = (folder / FILE).read_text().splitlines()
    (folder / FILE).write_text("".join(f"{s}\n" for s in lines if '"test_avg"' not in s))
    (section,) = compared(folder)
    cells = columns(section)
    assert (cells["final"], cells["worst worker"]) == (["57.50"], ["52.50"])
    assert "mean model" not in section.note()
    assert "mean model" in compared(folder, write_run(tmp_path / "b"))[0].note()


def test_the_metric_of_a_task_is_the_one_recorded(tmp_path: Path) -> None:
    own = {"metric": {"name": "f1_error", "larger_is_better": True}}
    (section,) = compared(write_run(tmp_path / "a", name="f1_error", info=own))
    assert section.metric == compare.Metric("f1_error", "test", larger=True)
    assert columns(section)["best"] == ["0.7500"]
    for name in ("f1_error", "mse", "RMSE", "val_mae"):
        (section,) = compared(write_run(tmp_path / name, name=name), metric=name)
        assert columns(section)["best"] == ["0.5000"]
    (section,) = compared(write_run(tmp_path / "b", name="certainty"), metric="certainty")
    assert columns(section)["best"] == ["0.7500"]


def test_runs_with_different_metrics_have_tables_of_their_own(tmp_path: Path) -> None:
    digits = write_run(tmp_path / "digits")
    language = write_run(tmp_path / "lstm", (90.0, 50.0, 60.0), name="perplexity", task="LSTM")
    sweep = write_sweep(tmp_path / "sweep")
    found = compared(digits, language, sweep)
    assert [section.metric.name for section in found] == ["accuracy", "perplexity", "error"]
    assert [section.metric.larger for section in found] == [True, False, False]
    assert columns(found[1])["best"] == ["50.00"]
    noted: list[str] = []
    (section,) = compared(digits, language, metric="perplexity", warn=noted.append)
    assert section.groups[0].runs[0].name == str(language)
    assert [str(digits) in note for note in noted] == [True]


def test_of_consensus_each_algorithm_is_a_run_at_its_best_setting(tmp_path: Path) -> None:
    (section,) = compared(write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", seed=7))
    cells = columns(section)
    assert cells["algorithm"] == ["plain", "signs"]
    assert cells["final"] == ["0.2500 ± 0.0000", "0.7500 ± 0.0000"]
    assert cells["best"] == ["0.2500 ± 0.0000", "0.1250 ± 0.0000"]
    assert section.metric.step == "step"
    assert section.labels() == ["plain", "signs"]


def test_the_machines_of_a_run_are_one_run(tmp_path: Path) -> None:
    """With a ticket, each has its folder. Another seed under the same ticket is another run."""
    folders = [
        write_run(tmp_path / name, info={"run": "run-a"}, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    noted: list[str] = []
    (section,) = compared(*folders, warn=noted.append)
    assert columns(section)["runs"] == ["2"]
    assert noted == [f"{folders[1]} is another machine of the run in {folders[0]}; left out"]


# --- Incomplete runs ------------------------------------------------------------------------------


def test_runs_that_have_not_ended_show_their_state(tmp_path: Path) -> None:
    """Beside complete runs of the same configuration they are not part of the mean."""
    folders = [
        write_run(tmp_path / "a1", seed=1),
        write_run(tmp_path / "a2", (0.1,), seed=2),
        write_run(tmp_path / "b", (0.25, 0.125), info={"state.ending": "Diverged"}, topology="x"),
        write_run(tmp_path / "c", (), info={"state.ending": "Diverged"}, topology="y"),
    ]
    noted: list[str] = []
    (section,) = compared(*folders, warn=noted.append)
    cells = columns(section)
    assert cells["final"] == ["62.50", "diverged", "diverged"]
    assert cells["best"] == ["75.00", "25.00", ""]
    assert cells["runs"] == ["1", "1", "1"]
    assert cells["state"] == [
        "1 of 2 complete, epoch 1 of 3",
        "diverged after epoch 2 of 3",
        "diverged after epoch 0 of 3",
    ]
    names = [str(folder) for folder in folders[2:]]
    assert list(section.bands())[1:] == [f"{name} (diverged)" for name in names]
    assert [str(folders[1]) in note for note in noted] == [True]


def test_a_curve_of_seeds_has_the_epochs_that_all_have(tmp_path: Path) -> None:
    (section,) = compared(
        write_run(tmp_path / "a", (0.1, 0.2), seed=1), write_run(tmp_path / "b", (0.3,), seed=2)
    )
    assert section.groups[0].band()["epoch"].tolist() == [1]


def test_a_metric_that_overflows_is_infinite(tmp_path: Path) -> None:
    (section,) = compared(write_run(tmp_path / "a", (2.0, 1.0, math.inf), name="perplexity"))
    cells = columns(section)
    assert (cells["final"], cells["best"]) == (["infinite"], ["1.000"])


def test_the_labels_of_a_figure_are_of_one_kind(tmp_path: Path) -> None:
    """The names of all runs, if what differs is too long for one of them."""
    for topology, kept in [("x", True), ("long " * 20, False)]:
        folder = tmp_path / topology[:4]
        runs = [write_run(folder / of, topology=of) for of in ("z", topology)]
        (section,) = compared(*runs)
        assert section.labels() == (["z", "x"] if kept else [str(run) for run in runs])


def test_a_default_rate_is_the_one_in_effect(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / str(rate), info={"diffusion_rate": rate}, optimizer_diffusion_rate=None
        )
        for rate in (0.0117187, 0.5)
    ]
    (section,) = compared(*runs)
    assert columns(section)["optimizer_diffusion_rate"] == ["0.01172", "0.5"]


# --- Facts ----------------------------------------------------------------------------------------


def test_keys_that_may_change_on_resume_make_no_difference() -> None:
    """Apart from those that a run is compared by: its length, and what its time depends on."""
    compared_by = {"num_epochs", "device", "cuda_aware", "data_processes", "distributed_backend"}
    assert set(FREE_TO_CHANGE) - compared_by <= WITHOUT_EFFECT
    assert set(train.config) >= WITHOUT_EFFECT
