"""Folders and files of powergossip-compare: bad input, tables, figures and the page."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powergossip import compare
from powergossip.compare import page
from powergossip.errors import BadInput
from tests.harness.compared_runs import columns, compared, write_run, write_sweep

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


def test_a_run_without_rows_is_left_out_with_a_note(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(["a", "without-rows", "empty"])
    shown = capsys.readouterr()
    assert shown.err.count("note: ") == 2
    assert "without-rows" not in shown.out
    assert "62.50" in shown.out


@pytest.mark.parametrize("file", ["config.yaml", "info.json"])
def test_a_damaged_run_is_left_out_with_a_note(
    file: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "b" / file).write_text("{")
    compare.main(["a", "b"])
    shown = capsys.readouterr()
    assert f"note: b/{file} is damaged" in shown.err
    assert "62.50" in shown.out
    for chosen in (["b"], ["b", "damaged"]):
        with pytest.raises(BadInput):
            compare.main(chosen)


def test_a_run_without_configuration_is_compared_with_a_note(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without info.json, it has no state of its end."""
    (runs / "a" / "config.yaml").unlink()
    (runs / "a" / "info.json").unlink()
    compare.main(["a"])
    shown = capsys.readouterr()
    assert "note: a has no config.yaml" in shown.err
    assert "62.50" in shown.out
    assert columns(compared(Path("a"))[0])["state"] == ["epoch 3"]


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.txt", "x.PNG", "x.pdf"])
def test_the_suffix_of_a_file_is_its_format(runs: Path, name: str) -> None:
    compare.main(["a", "b", "--output", f"new/{name}"])
    content = (runs / "new" / name).read_bytes()
    begins = {".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert content.startswith(begins.get(Path(name).suffix.lower(), b"Test accuracy"))


@pytest.mark.long
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
    decoder = json.JSONDecoder()
    found = []
    for call in re.finditer(r'Plotly\.newPlot\(\s*"\w+",\s*', document):
        data, end = decoder.raw_decode(document, call.end())
        start = re.compile(r",\s*").match(document, end)
        assert start is not None
        found.append((data, decoder.raw_decode(document, start.end())[0]))
    return found


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
    scripts = re.findall("<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert [script for script in scripts if "<" in script] == []
    assert bad in parts.cells
    assert len(plots(text)) == 1


@pytest.mark.long
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


def test_names_are_neither_html_nor_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, topology=name) for name in ("a<b>\x1b[31m", "c")]
    compare.main([*map(str, runs), "--output", str(tmp_path / "a.md")])
    for text in (capsys.readouterr().out, (tmp_path / "a.md").read_text()):
        assert "\x1b" not in text
        assert "x1b[31m" in text
    assert "<b>" not in (tmp_path / "a.md").read_text()
