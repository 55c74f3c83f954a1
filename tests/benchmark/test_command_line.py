"""The program powergossip-benchmark: its command line, files of entries, and accepted settings."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from powergossip.algorithms import AVERAGING
from powergossip.benchmark import command_line, entries, entry_runs, page, results
from powergossip.benchmark.tasks import FULL, QUICK, TASKS, Values
from powergossip.errors import BadInput
from powergossip.network import ToAll
from powergossip.runner import runner
from tests.harness import launch
from tests.harness.benchmarking import Half, result, written

OUTPUT = command_line.OUTPUT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user, in which the program is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(folder: str | Path, name: str, *means: float) -> Path:
    """A file with results of a task."""
    found = result(*means, tried=[{"setting": {}, "score": 0.5}])
    entry = entries.Entry(name, "", {})
    return results.save(entry, QUICK, {"text_same": found}, Path(folder))


# --- show -----------------------------------------------------------------------------------------


def test_a_copy_under_another_name_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it does not replace the results of its entry."""
    monkeypatch.setattr(results, "OF_LIBRARY", here)
    saved(str(OUTPUT), "a", 0.25, 0.25, 0.25).rename(OUTPUT / "b.json")
    saved(str(OUTPUT), "a", 0.5, 0.5, 0.5)
    command_line.main(["show", "a"])
    said = capsys.readouterr()
    assert "0.500" in said.out
    assert "b.json has results of a; use a.json as its name" in said.err


# --- new ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", command_line.KINDS)
def test_a_new_file_is_accepted_as_it_is_and_replaces_none(kind: str, here: Path) -> None:
    command_line.main(["new", "my_method.py", "--kind", kind])
    entry = entries.find("my_method.py")
    for task in ("consensus_random", "fashion_mnist_same", "text_same"):
        assert command_line.accepts(entry, TASKS[task], QUICK, alone=True)
    with pytest.raises(BadInput, match="exists; use another name"):
        command_line.main(["new", "my_method.py"])
    assert Path("my_method.py").read_text() == entry.source


def test_the_page_shows_the_new_file() -> None:
    page = (launch.ROOT / "docs" / "benchmark.md").read_text()
    assert (command_line.TEMPLATES / "averaging.py").read_text() in page


# --- run ------------------------------------------------------------------------------------------


def test_a_task_without_accepted_settings_is_left_out(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If its settings are those of a group, too. If it is the only one, the reason is an error."""
    written(here, {"fashion_mnist": [{"optimizer": "half"}]})
    began: list[object] = []

    def carry_out(*arguments: object) -> list[object]:
        began.append(arguments)
        return []

    monkeypatch.setattr(runner, "carry_out", carry_out)
    command_line.main(["run", "mine.py"])
    assert len(began) == 1
    assert re.findall("left out: (.*?):", capsys.readouterr().out) == ["fashion_mnist_late"]
    late = ["run", "mine.py", "--task", "fashion_mnist_late"]
    with pytest.raises(BadInput, match="use dpsgd, power-gossip, choco with a scenario"):
        command_line.main(late)
    command_line.main([*late, "--task", "consensus_random", "--task", "fashion_mnist_sorted"])
    assert len(began) == 2
    out = re.findall("left out: (.*?)[:;]", capsys.readouterr().out)
    assert out == ["mine has no settings of consensus_random", "fashion_mnist_late"]


def test_a_setting_that_a_tier_does_not_try_is_not_checked() -> None:
    good = [{"optimizer": "dpsgd", "optimizer_diffusion_rate": 0.1 * i} for i in range(1, 6)]
    wrong = {"optimizer": "dpsgd", "optimizer_nothing": 1}
    entry = entries.Entry("a", "", {"text_same": [*good, wrong]})
    assert command_line.accepts(entry, TASKS["text_same"], QUICK)
    with pytest.raises(BadInput, match="nothing"):
        command_line.accepts(entry, TASKS["text_same"], FULL)


# --- show -----------------------------------------------------------------------------------------


def test_own_results_replace_those_of_the_library_and_only_named_tasks_are_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(points: object, path: Path, *rest: object, **more: object) -> None:
        path.write_text("<svg></svg>")

    monkeypatch.setattr(page.figures, "scatter", drawn)
    of_library = results.read(results.OF_LIBRARY / "d-psgd.json")["tiers"][QUICK]
    own = of_library["text_same"]
    for run in own["runs"]:
        run["evaluations"][-1]["mean"] = 2.345
    results.save(entries.find("d-psgd"), QUICK, {"text_same": own}, OUTPUT)
    command_line.main(["show", "--task", "text_same", "--output", "page"])
    said = capsys.readouterr().out
    assert re.search(r"^ *d-psgd +2\.345 ± 0\.000", said, re.MULTILINE)
    assert re.findall(r"\((\w+)\), quick", said) == ["text_same"]
    names = {path.name for path in Path("page").iterdir()}
    figures = names - {"benchmark.md"}
    assert {name.partition("-")[0] for name in figures} == {"text_same"}


# --- Files of entries -----------------------------------------------------------------------------

OF_DATACLASS = """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Setting:
    optimizer: str
SETTINGS = [vars(Setting("dpsgd"))]
"""


@pytest.mark.parametrize(
    "source",
    [
        "\ufeffSETTINGS = [{'optimizer': 'dpsgd'}]",  # as Windows saves it
        "from settings_beside_it import SETTINGS",
        OF_DATACLASS,
        f"NAME = {'a' * 60!r}\nSETTINGS = [{{'optimizer': 'dpsgd'}}]",
    ],
    ids=["byte order mark", "import", "dataclass", "60 letters"],
)
def test_what_a_file_may_do(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "settings_beside_it.py").write_text("SETTINGS = [{'optimizer': 'dpsgd'}]")
    path = tmp_path / "mine.py"
    path.write_bytes(source.encode())
    assert entries.find(str(path)).settings["text_same"] == [{"optimizer": "dpsgd"}]


# --- What tasks accept ----------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["consensus_random", "text_same"])
@pytest.mark.parametrize("values", [{"topology": "rnig"}, {"topology_options": 3}])
def test_a_wrong_graph_is_rejected(task: str, values: Values) -> None:
    with pytest.raises(BadInput, match=r'is rejected|topology "rnig" is unknown'):
        entry_runs.check(TASKS[task], QUICK, {"optimizer": "dpsgd", **values})


def test_an_averaging_rule_changes_x_for_a_learning_rule_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Half):
        def step(self, x: Tensor) -> Any:
            x = (yield ToAll(x)).mean(1)

    monkeypatch.setitem(AVERAGING, "mine", Mine)
    setting = {"optimizer": "mine", "learning": "quasi-global-momentum"}
    with pytest.raises(BadInput, match="mine does not change x"):
        entry_runs.check(TASKS["text_same"], QUICK, setting)
