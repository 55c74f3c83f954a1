"""The program powergossip-benchmark: its command line, files of entries, and accepted settings."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from powergossip.benchmark import command_line, entries, entry_runs, page, results
from powergossip.benchmark.tasks import FULL, QUICK, TASKS, Values
from powergossip.errors import BadInput
from powergossip.runner import runner
from tests.harness import launch
from tests.harness.benchmarking import written

OUTPUT = command_line.OUTPUT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user, in which the program is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- new ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", command_line.KINDS)
def test_a_new_file_is_accepted_as_it_is_and_replaces_none(kind: str, here: Path) -> None:
    command_line.main(["new", "my_method.py", "--kind", kind])
    entry = entries.find("my_method.py")
    tasks = ["consensus_random", "fashion_mnist_same", "text_same"]
    assert command_line.accepting(entry, tasks, QUICK) == tasks
    with pytest.raises(BadInput, match="exists; use another name"):
        command_line.main(["new", "my_method.py"])
    assert Path("my_method.py").read_text() == entry.source


def test_the_page_shows_the_new_file() -> None:
    page = (launch.ROOT / "docs" / "benchmark.md").read_text()
    assert (command_line.TEMPLATES / "averaging.py").read_text() in page


# --- run ------------------------------------------------------------------------------------------


def test_a_task_that_rejects_a_setting_is_left_out(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so is one without settings. If no task is left, the reason is an error."""
    some = [{"optimizer": "half"}, {"optimizer": "half", "learning_rate": -0.1}]
    written(here, {"fashion_mnist": some[:1], "text_same": some})
    began: list[str] = []

    def carry_out(experiment: Any, *_: object) -> list[object]:
        began.extend(run.values["task"] for run in experiment.stages[0](None))
        return []

    monkeypatch.setattr(runner, "carry_out", carry_out)
    command_line.main(["run", "mine.py"])
    assert began == [name for name in TASKS if name.startswith("fashion") and "late" not in name]
    late, text, random = (
        ["--task", of] for of in ("fashion_mnist_late", "text_same", "consensus_random")
    )
    command_line.main(["run", "mine.py", *random, *late, "--task", "fashion_mnist_sorted"])
    left_out = re.findall("left out: (.*?)[:;]", capsys.readouterr().out)
    assert left_out == [
        *("fashion_mnist_late", "text_same"),
        *("mine has no settings of consensus_random", "fashion_mnist_late"),
    ]
    for task, sentence in (
        (late, "use dpsgd, power-gossip, choco with a scenario"),
        (text, r"learning_rate=-0\.1: use"),
        (random, "mine has no settings of consensus_random"),
    ):
        with pytest.raises(BadInput, match=sentence):
            command_line.main(["run", "mine.py", *task])


def test_a_setting_that_a_tier_does_not_try_is_not_checked() -> None:
    good = [{"optimizer": "dpsgd", "optimizer_diffusion_rate": 0.1 * i} for i in range(1, 6)]
    wrong = {"optimizer": "dpsgd", "optimizer_nothing": 1}
    entry = entries.Entry("a", "", {"text_same": [*good, wrong]})
    assert command_line.accepting(entry, ["text_same"], QUICK) == ["text_same"]
    with pytest.raises(BadInput, match="nothing"):
        command_line.accepting(entry, ["text_same"], FULL)


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
    ],
    ids=["byte order mark", "import", "dataclass"],
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
