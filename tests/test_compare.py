"""Laws of tables and figures of several runs: grouping by configuration, means over seeds, columns
for what differs, and errors of input."""

import json
import math
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import train
from powergossip.errors import BadInput
from powergossip.runs import compare, page
from powergossip.runs.compare.groups import WITHOUT_EFFECT
from powergossip.runs.metrics import FILE, MetricsLog
from powergossip.training.resuming import FREE_TO_CHANGE

CONFIG = {"task": "Digits", "num_epochs": 3, "n_workers": 2, "seed": 1, "optimizer": "power-gossip"}
ACCURACIES = (0.5, 0.75, 0.625)


def write_run(
    folder: Path,
    accuracies: Sequence[float] = ACCURACIES,
    bits: int = 8_000_000,
    name: str = "accuracy",
    progress: float | None = None,
    info: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run of train.py: worker 0 as good as the mean model, worker 1 worse by a tenth."""
    folder.mkdir(parents=True)
    values = {**CONFIG, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    done = len(accuracies) / values["num_epochs"] if progress is None else progress
    (folder / "info.json").write_text(json.dumps({"state.progress": done, **(info or {})}))
    log = MetricsLog(folder / FILE, fresh=True)
    for epoch, value in enumerate(accuracies, 1):
        numbers = {"epoch": epoch, "bits": bits * epoch, "messages": epoch, "seconds": 2.0 * epoch}

        def row(name: str, value: float, numbers: dict[str, Any] = numbers, **tags: Any) -> None:
            log.write(name, {"value": value, **numbers}, tags)

        for worker in range(2):
            row(name, value - 0.1 * worker, split="test", worker=worker)
        row(name, value, split="test_avg")
        row(name, 0.99, split="train")
        row("cross_entropy", 1 / epoch + 0.5, split="test", worker=0)
        row("cross_entropy", 1 / epoch, split="test_avg")
        row("cross_entropy", 2 / epoch, split="valid_avg")
        row("consensus_distance", 10.0**-epoch, type="params_only")
        row("consensus_distance", 5.0, type="full_state_vector")
        row("phase_seconds", 1.0, phase="data")
        row("phase_seconds", 2.0, phase="gradient")
    log.close()
    return folder


def write_sweep(folder: Path, seed: int = 42) -> Path:
    """A run of gossip_run.py: one algorithm, and one with two settings."""
    folder.mkdir(parents=True)
    config = {"n_workers": 4, "seed": seed, "algorithm": "all", "diffusion_rate": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "info.json").write_text(json.dumps({"state.progress": 1.0}))
    log = MetricsLog(folder / FILE, fresh=True)
    for errors, tags in (
        ([8.0, 4.0, 2.0], {"algorithm": "plain"}),
        ([8.0, 1.0, 6.0], {"algorithm": "signs", "diffusion_rate": "0.5"}),
        ([8.0, 7.0, 7.0], {"algorithm": "signs", "diffusion_rate": "1.0"}),
    ):
        for step, error in enumerate(errors):
            numbers = {"epoch": step, "bits": 800 * step, "messages": step, "seconds": 0.1 * step}
            log.write("error", {"value": error, **numbers}, tags)
    log.close()
    return folder


def compared(*folders: Path, **options: Any) -> list[compare.Section]:
    return compare.sections([run for folder in folders for run in compare.read(folder)], **options)


def columns(section: compare.Section) -> dict[str, list[str]]:
    return {header: list(cells) for header, *cells in zip(*section.table(), strict=True)}


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
    assert [len(s.groups) for s in compared(*folders, by_seed=True)] == [3]


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
        ({"larger": False}, "test accuracy (%)", {"best": "50.00", "worst worker": "62.50"}),
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
    assert ("worst worker" in found) == ("worst worker" in cells or "larger" in options)


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


# --- Incomplete runs ------------------------------------------------------------------------------


def test_runs_that_have_not_ended_show_their_state(tmp_path: Path) -> None:
    """Beside complete runs of the same configuration they are not part of the mean."""
    folders = [
        write_run(tmp_path / "a1", seed=1),
        write_run(tmp_path / "a2", (0.1,), seed=2),
        write_run(tmp_path / "b", (0.25, 0.125), info={"state.ending": "Diverged"}, topology="x"),
    ]
    noted: list[str] = []
    (section,) = compared(*folders, warn=noted.append)
    cells = columns(section)
    assert cells["final"] == ["62.50", "12.50"]
    assert cells["runs"] == ["1", "1"]
    assert cells["state"] == [
        "1 of 2 complete, epoch 1 of 3",
        "diverged after epoch 2 of 3",
    ]
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
    page.document([section], "")


def test_a_run_without_info_or_configuration_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "info.json").unlink()
    (folder / "config.yaml").unlink()
    (section,) = compared(folder)
    assert columns(section)["final"] == ["62.50"]
    assert columns(section)["state"] == ["epoch 3"]


# --- Folders --------------------------------------------------------------------------------------


def test_patterns_find_runs_as_a_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a1", "a2", "b"):
        write_run(tmp_path / name)
    (tmp_path / "a-empty").mkdir()
    monkeypatch.chdir(tmp_path)
    noted: list[str] = []
    found = compare.folders(["a*"], noted.append)
    assert ([*map(str, found)], noted) == (["a1", "a2"], [])
    assert compare.folders(["a1", "a2", "a-empty"], noted.append) == found
    assert ["a-empty" in note for note in noted] == [True]
    assert compare.folders(["a1", "./a1", "a?", str(tmp_path / "a2")]) == found


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the runs a and b, one without rows, an empty folder and a file."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optimizer="dpsgd")
    write_run(tmp_path / "without-rows", ())
    write_run(tmp_path / "damaged")
    (tmp_path / "damaged" / "info.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "folder"),
        ("a nowhere", "nowhere"),
        ("empty", "empty"),
        ("x*", r"x\*"),
        ("without-rows", "rows"),
        ("damaged", "info.json"),
        ("a --metric wishes", "--metric=wishes"),
        ("a --split valid", "--split=valid"),
        ("a --split tests", "--split"),
        ("a --metric phase_seconds", "phase_seconds"),
        ("a --speed", "--speed"),
        ("a --format docx --output x", "--format=docx"),
        ("a --format html", "--output"),
        ("a --format svg --output x.md", "markdown"),
        ("a --output a", "--output=a"),
        ("a --output file", "--output=file"),
        ("a --output file/x.md", "file/x.md"),
        ("a --output x.jpg", "--output=x.jpg"),
    ],
)
def test_bad_input_is_a_sentence_and_writes_nothing(runs: Path, arguments: str, named: str) -> None:
    before = sorted(runs.rglob("*"))
    with pytest.raises(BadInput, match=named) as caught:
        compare.main(arguments.split())
    assert "\n" not in str(caught.value)
    assert sorted(runs.rglob("*")) == before


def test_a_run_without_rows_is_left_out_with_a_note(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(["a", "without-rows", "empty"])
    shown = capsys.readouterr()
    assert shown.err.count("note: ") == 2
    assert "without-rows" not in shown.out
    assert "62.50" in shown.out


# --- Files ----------------------------------------------------------------------------------------


def test_a_folder_gets_a_table_a_figure_and_a_page(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    compare.main(["a", "b", "--output", "new/folder"])
    written = sorted(path.name for path in (runs / "new/folder").iterdir())
    assert written == ["compared.html", "compared.md", "compared.svg"]
    shown = capsys.readouterr().out
    assert all(f"new/folder/{name}" in shown for name in written)
    table = (runs / "new/folder/compared.md").read_text()
    assert "](compared.svg)" in table
    for line in compared(Path("a"), Path("b"))[0].table():
        assert f"| {' | '.join(line)} |" in table
        assert all(cell in shown for cell in line)


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.svg", "x.PNG", "x.pdf"])
def test_the_suffix_of_a_file_is_its_format(runs: Path, name: str) -> None:
    compare.main(["a", "b", "--output", f"new/{name}"])
    content = (runs / "new" / name).read_bytes()
    begins = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert content.startswith(begins.get(Path(name).suffix.lower(), b"Test accuracy"))


def test_figures_of_several_metrics_have_a_file_each(runs: Path) -> None:
    write_sweep(runs / "sweep")
    compare.main(["a", "sweep", "--output", "new", "--format", "png,markdown"])
    names = ["compared-accuracy.png", "compared-error.png", "compared.md"]
    assert sorted(path.name for path in (runs / "new").iterdir()) == names
    linked = re.findall(r"\]\((.*?)\)", (runs / "new/compared.md").read_text())
    assert linked == names[:2]


def test_markdown_for_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["a", "--format", "markdown"])
    assert "| a | 62.50 |" in capsys.readouterr().out


def test_a_wide_table_becomes_two(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", optimizer="dpsgd"))
    whole, narrow = compare.text(found), compare.text(found, width=40)
    assert whole.count(str(tmp_path / "a")) == 1
    assert narrow.count(str(tmp_path / "a")) == 2
    assert "dpsgd" in narrow


def test_the_figure_has_a_line_and_a_band_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    found = compared(
        write_run(tmp_path / "a1", (0.1, 0.2), num_epochs=2),
        write_run(tmp_path / "a2", (0.3, 0.4), num_epochs=2, seed=2),
        write_run(tmp_path / "b", (0.5, 0.6), num_epochs=2, optimizer="dpsgd", bits=800_000_000),
    )
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    compare.write(found, tmp_path / "x.svg", "svg")
    by_epoch, by_size, by_time = drawn[0].axes
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["power-gossip", "dpsgd"]
    for axes, x in ((by_epoch, [1, 2]), (by_size, [1, 2]), (by_time, [2, 4])):
        first, second = axes.get_lines()
        np.testing.assert_allclose(np.asarray(first.get_xdata(), float), x)
        np.testing.assert_allclose(np.asarray(first.get_ydata(), float), [20, 30])
        np.testing.assert_allclose(np.asarray(second.get_ydata(), float), [50, 60])
        (band,) = axes.collections
        low, high = 20 - 10 * math.sqrt(2), 30 + 10 * math.sqrt(2)
        box = band.get_paths()[0].get_extents()
        np.testing.assert_allclose([box.y0, box.y1], [low, high])
    assert (by_epoch.get_xscale(), by_size.get_xscale()) == ("linear", "log")
    assert by_epoch.get_yscale() == "linear"


# --- The page -------------------------------------------------------------------------------------


class Parts(HTMLParser):
    """The parts of a page as a browser parses it: tags, attributes and the text of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def plots(document: str) -> list[tuple[Any, Any]]:
    """The data and layout that are passed to Plotly."""
    found = re.findall(r'Plotly\.newPlot\("\w+", (\[.*\]), (\{.*\}),\n', document)
    return [(json.loads(data), json.loads(layout)) for data, layout in found]


def test_the_page_has_the_table_and_the_curves_of_the_figure(tmp_path: Path) -> None:
    found = compared(
        write_run(tmp_path / "a1", (0.1, 0.2), num_epochs=2),
        write_run(tmp_path / "a2", (0.3, 0.4), num_epochs=2, seed=2),
        write_run(tmp_path / "b", (0.5, 0.6), num_epochs=2, optimizer="dpsgd", bits=0),
        write_sweep(tmp_path / "sweep"),
    )
    text = page.document(found, "")
    parts = Parts()
    parts.feed(text)
    for section in found:
        for line in section.table():
            assert set(line) <= set(parts.cells)
    (data, layout), (_, of_sweep) = plots(text)
    lines = [trace for trace in data if "hovertemplate" in trace]
    assert len(data) == len(lines) + 2 * 3  # the edges of a band in three panels
    by_epoch = [trace for trace in lines if trace["xaxis"] == "x"]
    assert [trace["name"] for trace in by_epoch] == ["power-gossip", "dpsgd"]
    np.testing.assert_allclose(by_epoch[0]["y"], [20, 30])
    by_size = [trace for trace in lines if trace["xaxis"] == "x2"]
    assert [trace["x"] for trace in by_size] == [[1, 2], []]
    assert [trace["showlegend"] for trace in lines] == [True] * 2 + [False] * 4
    assert layout["yaxis"]["type"] == "linear"
    assert {layout[f"yaxis{i}"]["matches"] for i in (2, 3)} == {"y"}
    assert of_sweep["xaxis"]["title"]["text"] == "step"


def test_the_page_asks_no_server_and_runs_no_text_of_a_configuration(tmp_path: Path) -> None:
    """Texts of configurations and names of folders are shown as they are."""
    bad = '</script><img src="http://example.org/x.png">&lt;"\''
    found = compared(
        write_run(tmp_path / "a<b>", topology=bad), write_run(tmp_path / "b", topology="ring")
    )
    text = page.document(found, "")
    parts = Parts()
    parts.feed(text)
    assert {tag for tag, _, _ in parts.attributes if tag in ("img", "link", "iframe")} == set()
    assert [key for _, key, _ in parts.attributes if key in ("src", "href", "srcset")] == []
    (policy,) = [value for _, key, value in parts.attributes
                 if key == "content" and value.startswith("default-src")]  # fmt: skip
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    scripts = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert [script for script in scripts if "<" in script] == []
    assert bad in parts.cells
    assert len(plots(text)) == 1


def test_without_plotly_a_page_is_bad_input(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    for arguments in (["--output", "x.html"], ["--output", "x", "--format", "html"]):
        with pytest.raises(BadInput, match=r"html.*pip install plotly"):
            compare.main(["a", *arguments])
        assert not (runs / arguments[1]).exists()
    compare.main(["a", "--output", "x"])
    assert "plotly" in capsys.readouterr().err
    assert sorted(path.name for path in (runs / "x").iterdir()) == ["compared.md", "compared.svg"]


# --- Facts ----------------------------------------------------------------------------------------


def test_keys_that_may_change_on_resume_make_no_difference() -> None:
    """Apart from those that a run is compared by: its length, and what its time depends on."""
    compared_by = {"num_epochs", "device", "cuda_aware", "data_processes", "distributed_backend"}
    assert set(FREE_TO_CHANGE) - compared_by <= WITHOUT_EFFECT
    assert set(train.config) >= WITHOUT_EFFECT
