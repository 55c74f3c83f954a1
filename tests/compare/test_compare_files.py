"""Folders and files of powergossip-compare: bad input, tables and figures."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from powergossip import compare
from powergossip.errors import BadInput
from tests.harness import launch
from tests.harness.compared_runs import compared, write_run, write_sweep

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
    """The current folder, with the runs a and b, and others that lack something."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "no-state", "no-values", "keyless"):
        write_run(tmp_path / name)
    write_run(tmp_path / "b", optimizer="dpsgd")
    write_run(tmp_path / "rowless", ())
    (tmp_path / "no-state" / "info.json").write_text("{")
    (tmp_path / "no-values" / "config.yaml").write_text("{")
    (tmp_path / "keyless" / "config.yaml").unlink()
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ("rowless", "rowless has no rows; left out"),
        ("empty", "empty is no run; left out"),
        ("no-state", "no-state/info.json is damaged"),
        ("no-values", "no-values/config.yaml is damaged"),
        ("keyless", "keyless has no config.yaml; its keys are unknown"),
    ],
)
def test_a_run_that_lacks_something_has_a_note(
    given: str, note: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is left out, but for one without its configuration. Alone, it is an error."""
    compare.main(["a", given])
    shown = capsys.readouterr()
    assert f"note: {note}" in shown.err
    assert "62.50" in shown.out
    assert (given in shown.out) == (given == "keyless")
    if given != "keyless":
        for alone in ([given], [given, "no-state"]):
            with pytest.raises(BadInput):
                compare.main(alone)


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_folder_gets_a_table_and_a_figure(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["a", "b", "--output", "new/folder"])
    written = sorted(path.name for path in (runs / "new/folder").iterdir())
    assert written == ["compared.md", "compared.svg"]
    shown = capsys.readouterr().out
    assert all(f"new/folder/{name}" in shown for name in written)
    table = (runs / "new/folder/compared.md").read_text()
    assert "](compared.svg)" in table
    for line in compared(Path("a"), Path("b"))[0].table():
        assert f"| {' | '.join(line)} |" in table
        assert all(cell in shown for cell in line)


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.PNG", "x.pdf"])
def test_the_suffix_of_a_file_is_its_format(runs: Path, name: str) -> None:
    compare.main(["a", "b", "--output", f"new/{name}"])
    content = (runs / "new" / name).read_bytes()
    assert content.startswith({"x.PNG": b"\x89PNG", "x.pdf": b"%PDF"}[name])


@pytest.mark.long
def test_figures_of_several_metrics_have_a_file_each(runs: Path) -> None:
    write_sweep(runs / "sweep")
    compare.main(["a", "sweep", "--output", "new"])
    names = ["compared-accuracy.svg", "compared-error.svg", "compared.md"]
    assert sorted(path.name for path in (runs / "new").iterdir()) == names
    linked = re.findall(r"\]\((.*?)\)", (runs / "new/compared.md").read_text())
    assert linked == names[:2]


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
    compare.write(found, tmp_path / "x.svg")
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


def test_names_are_neither_html_nor_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, topology=name) for name in ("a<b>\x1b[31m", "c")]
    compare.main([*map(str, runs), "--output", str(tmp_path / "a.md")])
    for text in (capsys.readouterr().out, (tmp_path / "a.md").read_text()):
        assert "\x1b" not in text
        assert "x1b[31m" in text
    assert "<b>" not in (tmp_path / "a.md").read_text()


def test_the_program_needs_no_torch(runs: Path) -> None:
    """It only reads files: importing torch takes seconds."""
    heavy = "{'torch', 'mpi4py', 'omegaconf', 'matplotlib'} & {*sys.modules}"
    program = f"import sys; from powergossip import compare; compare.main(['a']); print({heavy})"
    ended = launch.python("-c", program, cwd=runs)
    assert ended.stdout.splitlines()[-1] == "set()", ended.stderr
