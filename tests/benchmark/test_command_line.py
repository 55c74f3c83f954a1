"""The program powergossip-benchmark: its command line, files of entries, and accepted settings."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from powergossip.algorithms import AVERAGING
from powergossip.benchmark import campaign, command_line, entries, page, program, submissions
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


def saved(
    folder: str | Path,
    name: str,
    *means: float,
    tasks: Sequence[str] = ("text_same",),
    tier: str = QUICK,
) -> Path:
    """A file with results of some tasks."""
    found = result(*means, tried=[{"setting": {}, "score": 0.5}])
    entry = entries.Entry(name, "", {})
    return submissions.save(entry, tier, dict.fromkeys(tasks, found), Path(folder))[0]


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "a",
        f"./{OUTPUT}/a.json",
        "link.json",
        "elsewhere/b.json",
        "b --folder elsewhere",
        "HERE/elsewhere/b.json --folder elsewhere",
        "elsewhere/b.json --folder HERE/elsewhere",
    ],
)
def test_a_file_is_no_repetition_of_itself(
    arguments: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the spelling of its path. Without --folder, it needs none."""
    Path("link.json").symlink_to(saved(OUTPUT, "a", 0.5, 0.6, 0.7))
    saved("elsewhere", "b", 0.5, 0.6, 0.7)
    command_line.main(["check", *arguments.replace("HERE", str(here)).split()])
    said = capsys.readouterr().out
    assert "is valid: 1 of 9 tasks in quick" in said
    assert "agree" not in said


def test_a_file_is_compared_with_the_repetition_of_its_entry(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with a file of its own name."""
    saved("first", "a", 0.5, 0.6, 0.7, tasks=("text_same", "text_topics")).rename("mine.json")
    saved("again", "mine", 0.5, 0.6, 0.7)
    saved("again", "a", 0.5, 0.6, 0.7)
    command_line.main(["check", "mine.json", "--folder", "again"])
    assert capsys.readouterr().out.endswith("\n1 of them agree with again/a.json\n")
    saved("again", "a", 0.1, 0.2, 0.3)
    with pytest.raises(BadInput, match="worse than its repetition"):
        command_line.main(["check", "mine.json", "--folder", "again"])
    with pytest.raises(BadInput, match="there is no repetition"):
        command_line.main(["check", "mine.json", "--folder", "third"])


def test_a_check_needs_the_quick_tier(here: Path) -> None:
    path = saved("first", "a", 0.5, 0.6, 0.7, tier=FULL)
    with pytest.raises(BadInput, match="the tier quick is missing"):
        command_line.main(["check", str(path)])


def test_a_name_without_results_in_the_folder_is_an_entry_of_the_library(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line.main(["check", "signsgd"])
    assert "signsgd.json is valid" in capsys.readouterr().out


# --- show -----------------------------------------------------------------------------------------


def test_a_path_is_shown_in_place_of_other_results_of_its_entry(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "OF_LIBRARY", here)
    saved(str(OUTPUT), "a", 0.5, 0.5, 0.5)
    other = saved("elsewhere", "a", 0.25, 0.25, 0.25)
    for asked, means in (("a", "0.500"), (str(other), "0.250")):
        command_line.main(["show", asked])
        row, *_ = [r for r in capsys.readouterr().out.splitlines() if r.split()[:1] == ["a"]]
        assert row.split()[1:3] == ["←", means]


def test_a_copy_under_another_name_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it does not replace the results of its entry."""
    monkeypatch.setattr(submissions, "OF_LIBRARY", here)
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


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("both.json", ["text_same"]),
        ("both.json --tier full", ["consensus_random"]),
        ("quick/d-psgd.json --tier full", list(TASKS)),
        ("both.json --task text_topics", ["text_topics"]),
    ],
)
def test_a_repetition_has_the_tasks_of_its_file(
    arguments: str, names: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the tier, or all if it has none, and those that are named."""
    saved("quick", "d-psgd", 0.5)
    saved("both", "d-psgd", 0.5)
    saved("both", "d-psgd", 0.5, tasks=["consensus_random"], tier=FULL).rename("both.json")
    asked: list[list[str]] = []

    def stop(entry: object, method: object, tier: str, names: list[str], *rest: object) -> None:
        asked.append(names)
        raise BadInput("asked")

    monkeypatch.setattr(campaign, "Campaign", stop)
    with pytest.raises(BadInput, match="asked"):
        command_line.main(["run", *arguments.split()])
    assert asked == [names]


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
    of_library = submissions.read(submissions.OF_LIBRARY / "d-psgd.json")["tiers"][QUICK]
    own = of_library["text_same"]
    for run in own["runs"]:
        run["evaluations"][-1]["mean"] = 2.345
    submissions.save(entries.find("d-psgd"), QUICK, {"text_same": own}, OUTPUT)
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
        program.check(TASKS[task], QUICK, {"optimizer": "dpsgd", **values})


def test_an_averaging_rule_changes_x_for_a_learning_rule_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(Half):
        def step(self, x: Tensor) -> Any:
            x = (yield ToAll(x)).mean(1)

    monkeypatch.setitem(AVERAGING, "mine", Mine)
    setting = {"optimizer": "mine", "learning": "quasi-global-momentum"}
    with pytest.raises(BadInput, match="mine does not change x"):
        program.check(TASKS["text_same"], QUICK, setting)
