"""A run is carried out once, an incomplete run never counts, and a failed one stops no other."""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from omegaconf import OmegaConf

import gossip_run
import train
from experiments import (
    EXPERIMENTS,
    results,
    study,
    tuned_methods,
)
from experiments.compression_pays import EmulatedRun
from powergossip.errors import BadInput
from powergossip.network import Processes
from powergossip.runner import runner
from powergossip.runner.launchers import Launcher
from powergossip.runner.runner import Experiment, Folder, Results, Run, carry_out
from powergossip.runs import configuration, figures
from powergossip.training.config_checks import checked
from tests.harness import slurm
from tests.harness.helpers import wait_until
from tests.harness.launch import ROOT, python, stand_in

# Stands in for train.py: value, and what to do before writing it.
PROGRAM = """
import json, os, sys, time
given = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
folder = sys.argv[sys.argv.index("--output-dir") + 1]
os.makedirs(folder, exist_ok=True)
time.sleep(float(given.get("sleep", 0)))
end = time.monotonic() + 60
while "until" in given and not os.path.exists(given["until"]) and time.monotonic() < end:
    time.sleep(0.02)
if given.get("fail") and not os.path.exists(given["fail"]):
    sys.exit("error: not today")
if given.get("diverge"):
    sys.exit("\\nerror: diverged: worker 0's loss is nan at step 3")
with open(folder + "/metrics.jsonl", "w") as file:
    row = {"name": "value", "value": float(given["value"]), "epoch": 1}
    file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    return Folder("question", tmp_path / "output")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start from a process that has imported PyTorch, not anew."""
    monkeypatch.setattr(Run, "program", property(_forked))


def _forked(run: Run) -> list[str]:
    values = [f"{key}={runner.yaml_text(value)}" for key, value in run.values.items()]
    return [*stand_in(), str(ROOT / f"{run.entry}.py"), *values]


def asked(*runs: Run) -> Experiment:
    return Experiment("a question", [lambda results: list(runs)], lambda results, path: "answer")


def cells(folder: Path, name: str = "table") -> list[list[str]]:
    """A table of a report, the header first."""
    return list(csv.reader((folder / f"{name}.csv").open()))


def words(svg: str) -> list[str | None]:
    """The texts of a picture."""
    return [found.text for found in ElementTree.fromstring(svg).findall(".//{*}text")]


def starts(folder: Folder, run: Run) -> int:
    """How often a run was started."""
    log = folder.of(run) / "log.txt"
    return log.read_text().count("$ ") if log.exists() else 0


def value(folder: Folder, run: Run) -> float:
    return float(folder.results(run)["value"].iloc[0])


def test_every_run_once(folder: Folder) -> None:
    runs = [Run("train", {"value": i}) for i in range(3)]
    twin = replace(runs[0], labels={"other": "label"})
    assert [folder.state(run) for run in runs] == ["new"] * 3
    assert carry_out(asked(*runs, twin), folder, 2) == []
    assert carry_out(asked(*runs, twin, Run("train", {"value": 7})), folder, 2) == []
    assert [value(folder, run) for run in [*runs, twin]] == [0, 1, 2, 0]
    assert [starts(folder, run) for run in runs] == [1, 1, 1]
    assert folder.state(twin) == "done"
    found = folder.provenance(asked(*runs, twin, Run("train", {"value": 7})))
    assert re.search(r"4 runs, \d+\.\d minutes in total, Python 3", found)
    assert (folder.of(runs[0]) / "run.json").exists()


def test_damaged_rows_are_named_and_the_others_used(folder: Folder) -> None:
    run = Run("train", {"value": 4})
    assert carry_out(asked(run), folder, 1) == []
    file = folder.of(run) / "metrics.jsonl"
    file.write_text(f'{{"name": "va\n{file.read_text()}')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 1 is not a row; left out"):
        assert value(folder, run) == 4


def test_a_report_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page, its tables and its picture, in place of those published before."""
    monkeypatch.setattr(results, "PUBLISHED", tmp_path)
    made, published = tmp_path / "output", tmp_path / "question"
    for folder in (made, published):
        folder.mkdir()
    (published / "old.csv").write_text("old")
    found = study.table(
        made / "table.csv", [["name", "size"], ["a, b", "5 kbit"], ["c", "0.1 Mbit"]]
    )
    (made / "report.md").write_text(f"new ![a figure](figure.svg)\n\n{found}\n")
    figures.curves({"": {"line": ([1, 2], [3.25, 4])}}, made / "figure.svg", "x", "lines")
    (made / "other.svg").write_text("not on the page")
    results.publish("question", made)
    assert sorted(p.name for p in published.iterdir()) == ["figure.svg", "report.md", "table.csv"]
    text = (published / "report.md").read_text()
    assert (published / "table.csv").read_text() == 'name,size (Mbit)\n"a, b",0.005\nc,0.1\n'
    assert results.with_tables(text, published).split() == [
        *("new", "![a", "figure](figure.svg)"),
        *("name", "size", "(Mbit)", "a,", "b", "0.005", "c", "0.1"),
    ]
    small, large = ((folder / "figure.svg").read_text() for folder in (published, made))
    assert len(small) < 0.7 * len(large)
    assert "line" in words(small)
    assert words(small) == words(large)


def test_the_identity_of_a_run_is_everything_that_determines_its_result() -> None:
    run = Run("train", {"a": 1, "b": [1, {"c": 2}]}, {"label": 1})
    assert run.identity == Run("train", {"b": [1, {"c": 2}], "a": 1}).identity
    others = [
        Run("gossip_run", run.values),
        Run("train", {**run.values, "a": 2}),
        Run("train", {**run.values, "a": "1"}),
        Run("train", run.values, processes=2),
        EmulatedRun("train", run.values, rate="10mbit"),
        EmulatedRun("train", run.values, rate="none"),
    ]
    assert len({run.identity, *(other.identity for other in others)}) == 7


def test_values_arrive_unchanged_in_the_entry_point() -> None:
    """From the command to the configuration."""
    values = {
        "task_options": {"normalization": "group", "x": 1},
        "lr_schedule_milestones": [[1.5, 0.1]],
        "learning_rate": 1e-12,
        "gradient_clipping": None,
        "overlapping": False,
        "data_dir": "/some where/else",
    }
    command = Run("train", values).command
    config = OmegaConf.structured(train.Config)
    train.configuration.read_command_line(config, command[2:], "")
    assert {key: config[key] for key in values} == values


def test_a_failed_run_stops_no_other_and_is_repeated(folder: Folder, tmp_path: Path) -> None:
    bad = Run("train", {"value": 1, "fail": str(tmp_path / "flag")})
    good = Run("train", {"value": 2})
    assert carry_out(asked(bad, good), folder, 1) == [bad]
    assert (folder.state(bad), folder.state(good)) == ("failed", "done")
    assert "not today" in (folder.of(bad) / "log.txt").read_text()
    with pytest.raises(ValueError, match="is failed, see"):
        folder.results(bad)
    (tmp_path / "flag").touch()
    assert carry_out(asked(bad, good), folder, 1) == []
    assert (starts(folder, bad), starts(folder, good)) == (2, 1)
    assert not (folder.of(bad) / "failed.json").exists()


def test_missing_data_are_a_sentence_before_the_first_run(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DATA", raising=False)
    for more, said in (
        ({}, r"cifar-10-python\.tar\.gz from https://"),
        ({"data_dir": str(tmp_path)}, f"data_dir={tmp_path}: use a folder"),
    ):
        run = Run("train", {"task": "Cifar", "download": False, **more})
        with pytest.raises(BadInput, match=said):
            carry_out(asked(run), folder, 1)
        assert not folder.of(run).exists()


def test_a_failed_run_shows_its_sentence(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the block that mpirun prints after it."""
    (tmp_path / "train.py").write_text(
        f"raise SystemExit('error: not today\\n{'-' * 74}\\nx\\n---')"
    )
    carry_out(asked(Run("train", {})), folder, 1)
    assert capsys.readouterr().out.endswith("log.txt: error: not today\n")


@pytest.mark.parametrize("independent", [False, True])
def test_a_failed_run_stops_the_next_stage_unless_that_goes_on_without_it(
    independent: bool, folder: Folder, tmp_path: Path
) -> None:
    bad = Run("train", {"value": 1, "fail": str(tmp_path / "flag")})
    good, later = Run("train", {"value": 2}), Run("train", {"value": 3})
    stages: list[Any] = [lambda _: [bad, good], lambda _: [later]]
    experiment = Experiment("", stages, lambda *_: "", independent=independent)
    assert carry_out(experiment, folder, 1) == [bad]
    assert folder.state(later) == ("done" if independent else "new")


def test_divergence_is_a_result(folder: Folder) -> None:
    run = Run("train", {"value": 1, "diverge": 1})
    assert carry_out(asked(run), folder, 1) == []
    assert folder.state(run) == "done"


def test_a_stage_gets_the_results_of_earlier_stages(folder: Folder) -> None:
    first = [Run("train", {"value": i}) for i in (3, 9, 5)]

    def second(results: Results) -> list[Run]:
        best = max(first, key=lambda run: results(run)["value"].iloc[0])
        return [Run("train", {**best.values, "seed": 1})]

    experiment = Experiment("", [lambda results: first, second], lambda results, path: "")
    assert len(list(folder.runs(experiment))) == 1
    assert carry_out(experiment, folder, 2) == []
    stages = list(folder.runs(experiment))
    assert stages[1][0].values == {"value": 9, "seed": 1}
    assert folder.state(stages[1][0]) == "done"


def test_runs_take_cores_in_their_order_and_no_more_than_there_are(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that wants many cores would wait until nobody else wants any."""
    runs = [Run("train", {"value": i}, processes=2) for i in range(8)]
    order, running, most = [], [], []

    def observed(run: Run, path: Path, launcher: Launcher) -> bool:
        order.append(run.values["value"])
        running.append(run)
        time.sleep(0.02)
        most.append(len(running))
        running.remove(run)
        path.mkdir(parents=True)
        return True

    monkeypatch.setattr(runner, "carry_out_one", observed)
    for cores in (2, 5):
        carry_out(asked(*runs), folder, cores, "process")
        assert order == list(range(8)) if cores == 2 else sorted(order) == list(range(8))
        assert max(most) == cores // 2
        order.clear()
        most.clear()
        shutil.rmtree(folder.path)


CTRL_C = """
import os, signal, sys
from pathlib import Path
from powergossip.runner import runner
from powergossip.runner.runner import Experiment, Folder, Run, carry_out

def ended(run, path, launcher):
    begun.append(run.values["value"])
    path.mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGINT)
    return True

begun, runner.carry_out_one, folder = [], ended, Folder("question", Path(sys.argv[1]))
Run.check = lambda run, launcher: None
for first in range(0, 500, 5):
    runs = [Run("train", {"value": first + i}) for i in range(5)]
    try:
        carry_out(Experiment("a question", [lambda results: runs], None), folder, 1, "process")
    except KeyboardInterrupt:
        continue
print("begun:", *begun)
"""


def test_no_run_begins_after_ctrl_c(tmp_path: Path) -> None:
    """Even if another one ends at that moment. It is a race, hence the repetitions."""
    begun = python("-c", CTRL_C, tmp_path, fresh=True).stdout.partition("begun: ")[2]
    assert begun.split() == [str(first) for first in range(0, 500, 5)]


def test_an_experiment_of_slurm_jobs(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on after one has failed."""
    flag = str(tmp_path / "flag")
    runs = [Run("train", {"value": i}) for i in range(3)]
    bad = Run("train", {"value": 9, "fail": flag})
    question = asked(bad, *runs)
    monkeypatch.setenv("PATH", slurm.path(tmp_path / "bin"))
    assert carry_out(question, folder, 64, "slurm") == [bad]
    Path(flag).touch()
    assert carry_out(question, folder, 64, "slurm") == []
    assert [value(folder, run) for run in runs] == [0, 1, 2]
    assert [starts(folder, run) for run in [bad, *runs]] == [2, 1, 1, 1]


def test_emulated_links_require_the_launcher_mpirun(folder: Folder) -> None:
    run = EmulatedRun("train", {"value": 1}, processes=2, rate="10mbit")
    with pytest.raises(BadInput, match="--launcher=process: use mpirun"):
        carry_out(asked(run), folder, 2, "process")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(BadInput, match=r"no ip on|only root"):
            carry_out(asked(run), folder, 2)
    assert folder.state(run) == "new"
    assert "mpirun" not in run.command
    assert run.command[:2] == ["env", "OMPI_MCA_btl_tcp_flags=send"]
    assert [run.cores(n) for n in (1, 2, 16)] == [1, 2, 16]
    assert [Run("train", {}, processes=4).cores(n) for n in (2, 16)] == [2, 4]


DRIVER = """
import sys
from pathlib import Path
from powergossip.runner import runner
from powergossip.runner.runner import Experiment, Folder, Run, carry_out
root, cores, processes = sys.argv[1:]
runner.ROOT = Path(root)
runs = [
    Run("train", {"value": i, "until": f"{root}/{i}"}, processes=int(processes))
    for i in range(3)
]
folder = Folder("question", runner.ROOT / "output")
with folder.claimed():
    carry_out(
        Experiment("", [lambda results: runs], lambda results, path: ""),
        folder,
        int(cores),
        "process",
    )
"""


@dataclass(frozen=True)
class Driver:
    process: subprocess.Popen[str]
    runs: list[Run]
    again: Callable[[], subprocess.CompletedProcess[str]]


@contextmanager
def driver(folder: Folder, cores: int = 1, processes: int = 1) -> Iterator[Driver]:
    """A runner of three runs, the second of which is under way, and lasts until `_resumes`."""
    program = folder.path.parents[1] / "driver.py"
    program.write_text(DRIVER)
    arguments = [str(program), str(program.parent), str(cores), str(processes)]
    runs = [
        Run("train", {"value": i, "until": f"{program.parent}/{i}"}, processes=processes)
        for i in range(3)
    ]
    for i in (0, 2):
        (program.parent / str(i)).touch()
    with subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_until(lambda: folder.state(runs[1]) == "begun" and starts(folder, runs[1]) == 1)
            yield Driver(process, runs, lambda: python(*arguments))
        finally:
            process.kill()


def test_a_killed_runner_can_resume(folder: Folder) -> None:
    """Nothing is done twice, and nothing half done counts."""
    with driver(folder) as program:
        again = program.again()
        os.killpg(program.process.pid, signal.SIGKILL)
    assert again.returncode != 0
    assert "is in use by another runner; wait for it" in again.stderr
    assert [folder.state(run) for run in program.runs] == ["done", "begun", "new"]
    _resumes(folder, program)


@pytest.mark.parametrize(
    ("processes", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (1, signal.SIGTERM)]
)
def test_an_interrupted_runner_can_resume(folder: Folder, processes: int, number: int) -> None:
    """Ctrl-C or SIGTERM: running jobs end, and those that wait, for their turn or for cores, never
    start."""
    with driver(folder, cores=processes, processes=processes) as program:
        if number == signal.SIGINT:
            os.killpg(program.process.pid, number)  # as a terminal does
        else:
            program.process.send_signal(number)
        output, _ = program.process.communicate(timeout=30)
    assert "run again to resume" in output
    assert "min left" not in output.splitlines()[-1]
    assert [folder.state(run) for run in program.runs] == ["done", "begun", "new"]
    assert program.process.returncode != 0
    _resumes(folder, program)


def _resumes(folder: Folder, program: Driver) -> None:
    (folder.path.parents[1] / "1").touch()
    ended = program.again()
    assert ended.returncode == 0, ended.stderr
    assert [folder.state(run) for run in program.runs] == ["done"] * 3
    assert [starts(folder, run) for run in program.runs] == [1, 2, 1]


# --- What is there --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configurations_are_accepted(name: str) -> None:
    """By the entry point, before anything runs."""
    (first, *_) = Folder(name, Path("/nowhere")).runs(EXPERIMENTS[name])
    # One for each combination of everything but numbers, which take long to try one by one.
    different = {
        str({k: type(v) if isinstance(v, int | float) else v for k, v in run.values.items()}): run
        for run in first
    }
    for run in different.values():
        assert (runner.ROOT / f"{run.entry}.py").exists()
        module = {"gossip_run": gossip_run}.get(run.entry, train)
        config = OmegaConf.structured(module.Config)
        keys = run.command[run.command.index(str(runner.ROOT / f"{run.entry}.py")) + 1 :]
        explicit = configuration.read_command_line(config, keys, "").explicit
        processes = Processes()
        processes.size = run.processes
        processes.transport = "mpi" if run.processes > 1 else processes.transport
        if module is train:
            checked(config, processes, explicit)
        else:
            gossip_run.checked(config, processes)
    assert len({run.identity for run in first}) == len(first)


@pytest.mark.usefixtures("forked")
def test_learning_from_the_first_run_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs, on Digits."""
    methods = {m: tuned_methods.METHODS[m] for m in ("D-PSGD", "CHOCO, sign")}
    monkeypatch.setattr(tuned_methods, "DIFFUSION_RATES", (0.5, 1e6))
    monkeypatch.setattr(study, "SEEDS", (1, 2))
    values = {**tuned_methods.COMMON, "task_architecture": "MLP", "num_epochs": 2, "n_workers": 4}
    values["lr_schedule_milestones"] = [[1, 0.1]]
    experiment = tuned_methods.experiment("how well", values, rates=(0.1,), methods=methods)
    folder = Folder("digits", tmp_path)
    assert carry_out(experiment, folder, 2) == []
    for run in list(folder.runs(experiment))[2]:
        assert run.values["optimizer_diffusion_rate"] == 0.5  # the other diverges
        assert run.values["num_epochs"] == 2
    text = experiment.report(folder.results, tmp_path)
    assert text.startswith("Mean ± standard deviation of 2 seeds")
    (line,) = (line for line in cells(tmp_path) if line[0] == "D-PSGD")
    mean, deviation = map(float, line[1].split("±"))
    finals = [folder.results(run) for run in list(folder.runs(experiment))[2][:2]]
    accuracies = [
        100 * r[(r["name"] == "accuracy") & (r["split"] == "test_avg")]["value"].iloc[-1]
        for r in finals
    ]
    assert mean == pytest.approx(sum(accuracies) / 2, abs=0.006)
    assert deviation == pytest.approx(pd.Series(accuracies).std(), abs=0.006)
    assert line[4] == "1.0"
    assert "CHOCO, sign" in (tmp_path / "figure.svg").read_text()


def test_listing_imports_no_heavy_library() -> None:
    """The command line starts without PyTorch and pandas, which take seconds to import."""
    heavy = "{'torch', 'pandas', 'matplotlib'}"
    found = python("-c", f"import experiments.__main__, sys; print({heavy} & set(sys.modules))")
    assert found.stdout == "set()\n", found.stderr


def test_the_command_line() -> None:
    listed = python("-m", "experiments", "list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in EXPERIMENTS)
    states = python("-m", "experiments", "status")
    assert states.returncode == 0, states.stderr
    assert [line.split()[0] for line in states.stdout.splitlines()] == list(EXPERIMENTS)
    dry = python("-m", "experiments", "run", "consensus", "--dry-run")
    commands = [line[7:] for line in dry.stdout.splitlines()]
    assert [shlex.split(command) for command in commands] == [
        run.command for runs in Folder("consensus").runs(EXPERIMENTS["consensus"]) for run in runs
    ], "they can be pasted into a shell"
