"""Bad input of each program: one sentence, exit code 2, and no file changes.

bad_input.txt has what a user types, and words of the sentence. Many rows of train.py are also tried
in two processes, where a driver tries them one after the other under one mpirun.
"""

import json
import re
import runpy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gossip_run
import train
from powergossip import compare, prediction
from tests.harness import launch
from tests.harness.compared_runs import write_run
from tests.harness.helpers import files_below

Row = tuple[str, ...]


def read_table() -> dict[str, list[Row]]:
    """The rows of bad_input.txt below each of its titles."""
    tables: dict[str, list[Row]] = {}
    for line in Path(__file__).with_name("bad_input.txt").read_text().splitlines():
        if line.startswith("["):
            rows = tables.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            typed, _, words = line.partition("  ")
            found = filter(None, words.strip().split(" | "))
            rows.append(("" if typed == "-" else typed, *found))
    return tables


TABLES = read_table()
ANYWHERE = "train.py, in one and in two"
IN_ANY = [row for title in TABLES if title.startswith(ANYWHERE) for row in TABLES[title]]
IN_TWO = TABLES["train.py, in two processes"]
DEEP = ("topology_options=" + 600 * "[", "topology_options=[", "levels")
TINY = ["n_workers=4", "task_architecture=MLP", "num_epochs=1", "log_verbosity=0"]
# Contents of a file given by --config.
OF_FILES: list[Row] = [
    ("", "empty", "key: value"),
    ("# nothing\n", "empty"),
    ("- 1\n- 2\n", "list", "key: value"),
    ("seed: 1\ntopology: [ring\nnum_epochs: 3\n", "line 3", "YAML"),
    ("seed: 1\n\tnum_epochs: 3\n", "line 2", "YAML"),
    ("seed: 1\nn_workrs: 4\n", "line 2", "n_workrs", "did you mean n_workers?"),
    ("# why\n\nseed: 1.5\n", "line 3", "seed=1.5:"),
    ("seed: 1\nnum_epochs: 2\nseed: 3\n", "line 3", '"seed"', "line 1"),
    ("topology_options:\n  degree: 4\n  degree: 5\n", "line 3", '"degree"', "line 2"),
    ("topology_options: {a: 1, a: 2}\n", "line 1", '"a"'),
    ("seed: 1\n---\nseed: 2\n", "line 2", "YAML"),
    ("seed: 1\nlearning_rate.x: 3\n", "line 2", "learning_rate.x", "did you mean"),
    ("5: 1\n", '"5"'),
    ("\x00\xff", "not"),
    ("topology_options: &a {b: *a}", "line 1", "topology_options"),
]
QUICK = ["--workers", "8", "--model", "30x20,20", "--no-measure", "--compute", "1ms"]


def run_experiments() -> None:
    runpy.run_module("experiments", run_name="__main__")


# Programs, with arguments before those of a row.
PROGRAMS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "train.py": (train.command, TINY),
    "gossip_run.py": (gossip_run.command, ["n_workers=8"]),
    "compare": (compare.command, []),
    "predict": (prediction.command, QUICK),
    "experiments": (run_experiments, []),
}
IN_ONE = [
    (title.partition(",")[0], row)
    for title, rows in TABLES.items()
    for row in rows
    if row not in IN_TWO
]


def write_files(folder: Path) -> None:
    """The files that rows name."""
    for name in ("data", "empty"):
        (folder / name).mkdir()
    write_run(folder / "a")
    write_run(folder / "run")
    write_run(folder / "without-rows", ())
    write_run(folder / "damaged")
    for name, text in (
        ("damaged/info.json", "{"),
        ("file", "a file"),
        ("mine.yaml", "optimizer_theta: 0.5\n"),
        ("old/config.yaml", "seed: 3\nnum_epoch: 9\n"),
        ("disconnected.txt", "0 1\n2 3\n"),
        ("triangle.txt", "0 1\n1 2\n2 0\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of these files, which no test changes."""
    folder = tmp_path_factory.mktemp("written")
    write_files(folder)
    return folder


def lacks(line: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in line]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name} {row[0][:70]}")
        for name, row in [*IN_ONE, ("train.py", DEEP)]
    ],
)
def test_bad_input_is_one_sentence_and_changes_no_file(
    name: str, row: Row, written: Path, rejection: Callable[..., str]
) -> None:
    program, first = PROGRAMS[name]
    arguments, *words = row
    said = rejection(program, *first, *shlex.split(arguments), folder=written)
    assert lacks(said, words) == []


@pytest.mark.parametrize("row", OF_FILES, ids=lambda row: row[0][:30])
def test_bad_files_of_keys_are_named(
    row: Row, tmp_path: Path, rejection: Callable[..., str]
) -> None:
    content, *words = row
    (tmp_path / "some.yaml").write_bytes(content.encode("latin1"))
    line = rejection(train.command, "--config", "some.yaml")
    assert lacks(line, ["some.yaml", *words]) == []


# --- Under mpirun ---

# Then one good run, with hooks: bad input leaves nothing behind, and hooks are process 0's.
TRY_ALL = """
import json
from omegaconf import OmegaConf
import train
from powergossip import errors, network
from powergossip.training import recorder

messages, rank = [], network.processes().rank
for arguments in json.load(open("bad_input.json")):
    train.config, train.output_dir = OmegaConf.structured(train.Config), None
    try:
        train.main([*TINY, *arguments])
        messages.append("accepted")
    except errors.BadInput as error:
        messages.append(f"error: {error}")
    except BaseException as error:
        messages.append(f"{type(error).__name__}: {error}")
json.dump(messages, open(f"messages-{rank}.json", "w"))

calls = []
train.log_metric = lambda *arguments: calls.append("metric")
train.log_info = lambda *arguments: calls.append("info")
train.log_runtime = lambda *arguments: calls.append("runtime")
recorder.report = lambda *_: calls.append("report")
train.config, train.output_dir = OmegaConf.structured(train.Config), "good"
train.main(TINY)
json.dump(sorted(set(calls)), open(f"calls-{rank}.json", "w"))
"""


@pytest.mark.parametrize(
    "stride", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["a_few", "all"]
)
def test_bad_input_is_rejected_in_all_processes_with_one_sentence(
    stride: int, tmp_path: Path
) -> None:
    """A run after it works, and calls hooks on process 0 only."""
    rows = IN_ANY[::stride] + IN_TWO
    write_files(tmp_path)
    (tmp_path / "bad_input.json").write_text(json.dumps([shlex.split(row[0]) for row in rows]))
    (tmp_path / "driver.py").write_text(TRY_ALL.replace("TINY", repr(TINY)))
    before = files_below(tmp_path)
    ended = launch.python("driver.py", processes=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    after = files_below(tmp_path)
    messages, calls = (
        [json.loads(after.pop(f"{kind}-{rank}.json") or "") for rank in range(2)]
        for kind in ("messages", "calls")
    )
    assert calls == [["info", "metric", "report", "runtime"], []]
    assert {name: content for name, content in after.items() if "good" not in name} == before
    for (arguments, *words), *lines in zip(rows, *messages, strict=True):
        assert lines[0] == lines[1], arguments
        assert re.fullmatch("error: .*", lines[0]), arguments
        assert lacks(lines[0], words) == [], arguments


def of_program(text: str) -> str:
    """The output of the program, without that of mpirun when a process exits with an error."""
    text = re.sub(r"-{70,}\n(prterun|mpirun).*?-{70,}\n", "", text, flags=re.DOTALL)
    return re.sub(r"^\[.*PMIX ERROR: .*\n?", "", text, flags=re.MULTILINE).strip()


DRIVER = "import train\ntrain.config.topology='rign'\ntrain.main()"


def test_bad_input_of_a_driver_under_mpirun_is_printed_once_with_exit_code_2(
    tmp_path: Path,
) -> None:
    """It does not catch BadInput."""
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = launch.python("driver.py", processes=2, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch("error: .*rign.*ring.*", of_program(ended.stderr))
    assert [file.name for file in tmp_path.iterdir()] == ["driver.py"]


def test_processes_with_different_commands_end_with_one_sentence(tmp_path: Path) -> None:
    """Also for a key that changes the transport."""
    first = [str(launch.ROOT / "train.py"), "num_epochs=2"]
    second = [":", "-np", "1", *launch.stand_in(), *first, "distributed_backend=gloo"]
    ended = launch.python(*first, *second, processes=1, cwd=tmp_path)
    assert ended.returncode == 2
    key = "distributed_backend"
    sentence = f"error: {key}=auto in process 0 and {key}=gloo in process 1: .*same command.*"
    assert re.fullmatch(sentence, of_program(ended.stderr)), ended.stderr
    assert list(tmp_path.iterdir()) == []
