"""Every command of the documentation works from a shell: in pages, docstrings and comments.

A program is started as from the root of a fresh clone, without PYTHONPATH, with the arguments of
all its commands, and ends when it has read them (tests/harness/dry_run.py).
"""

import functools
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from experiments import EXPERIMENTS
from tests.harness import launch
from tests.harness.examples import EXAMPLES

Words = list[str]

# Programs that do not start here, and the reason.
ELSEWHERE = {
    "pip": "changes the environment",
    "--host": "needs other hosts",
    "mine.py": "the reader's own",
    "guard.py": "copied into the folder of an experiment, which starts it",
    "docs.drawings": "has no arguments, and draws",
    "tests/harness/dry_run.py": "started here",
    "tests/harness/failing.py": "started by a test, with a plan",
    "tests/harness/forks.py": "started by every test that starts a program",
    "tests/harness/surviving.py": "started by a test, and processes of it die",
    "tests.harness.laws": "has no arguments, and computes for minutes",
}

# --- Collection -----------------------------------------------------------------------------------

# Written by programs, or commands of the past.
NOT_TEXTS = re.compile(r"docs/results/|RESULTS\.md|CHANGELOG\.md")
# At the beginning of a file or a block. Syntax trees of all files would take seconds.
DOCSTRING = re.compile(r'(?:\A|:)\s*r?"""(.*?)"""', re.DOTALL)
# A line or inline code is a command if it begins like this, and otherwise prose.
BEGINS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:"
    r"(?:python|bash|torchrun) (?:-\S+ \S|\S+\.(?:py|sh)\b)|mpirun -|sbatch (?:-|\S+\.sbatch)"
    r"|make [a-z-]+(?=$|  | [A-Z]+=)|pip install |powergossip-[a-z-]+ (?:-|\S*/)"
    r"|source |export [A-Z])"
)


def texts(name: str) -> list[str]:
    """The parts of a file that are documentation: all of a page, docstrings, comments."""
    path = launch.ROOT / name
    if path.suffix == ".md":
        return [path.read_text()]
    if path.suffix == ".py":
        return DOCSTRING.findall(path.read_text())
    if path.suffix in ("", ".sh", ".sbatch", ".def", ".yaml", ".toml"):
        return ["\n".join(re.findall(r"^ *#(.*)$", path.read_text(), re.MULTILINE))]
    return []


def commands(text: str) -> Iterator[str]:
    """The commands of a text: all lines of bash blocks, other lines and inline code by BEGINS."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    blocks = r"^( *)```(\w*).*?\n(.*?)^\1```$"
    for _, language, block in re.findall(blocks, text, re.MULTILINE | re.DOTALL):
        if language == "bash":
            yield from filter(None, map(str.strip, block.splitlines()))
    prose = re.sub(blocks, "", text, flags=re.MULTILINE | re.DOTALL)
    found = [*prose.splitlines(), *re.findall(r"`([^`\n]+)`", prose)]
    yield from (line.strip() for line in found if BEGINS.match(line.strip()))


def words_of(command: str) -> Words:
    """The words of a command, without variables before it and dots or a description behind it."""
    words = shlex.split(re.split(r" {2,}| (?:…|\.\.\.)(?= {2}|$)", command)[0], comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return words


@functools.cache
def collected() -> dict[str, list[Words]]:
    """The commands of each file."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=launch.ROOT, text=True).splitlines()
    return {
        name: [words_of(command) for text in texts(name) for command in commands(text)]
        for name in names
        if not NOT_TEXTS.match(name) and (launch.ROOT / name).is_file()
    }


# --- Parts of a command ---------------------------------------------------------------------------

# Kind (script, module, function, bash, make, mpirun, torchrun), program, arguments
Part = tuple[str, str, Words]

# An argument that a reader replaces. The program is then asked for help.
PLACEHOLDER = re.compile(r"^\[|^key=value$|^N$|^[a-z]\.yaml$")
SCRIPTS = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def parts(words: Words) -> Iterator[Part]:
    """The programs of a command: launchers, and what they start. Raises ValueError."""
    head, *rest = words
    if head in ("mpirun", "torchrun"):
        starts = [i for i, w in enumerate(rest) if re.search(r"\.py$|^python$", w)]
        first = starts[0] if starts else len(rest)
        yield head, head, rest[:first]
        inner = rest[first:]
        yield from parts(["python", *inner] if head == "torchrun" else inner or ["python"])
    elif head == "python" and rest[:1] == ["-m"]:
        yield "module", rest[1], rest[2:]
    elif head == "python" and rest and rest[0] != "-c":
        end = rest.index("--") + 2 if "--" in rest else None
        yield "script", rest[0], rest[1:end]
        if end is not None:
            yield from parts(rest[end - 1 :])
    elif head == "sbatch":
        places = [i for i, word in enumerate(rest) if word.endswith(".sbatch")]
        if not places:  # options alone, in a sentence
            return
        (place,) = places
        yield "bash", rest[place], []
        yield "script", "train.py", rest[place + 1 :]
    elif head in ("bash", "make", "pip"):
        yield head, rest[0], rest[1:]
    elif head in SCRIPTS:
        yield "function", SCRIPTS[head], rest
    elif head not in ("python", "source", "export"):
        raise ValueError(f"{' '.join(words)}: a command without a test")


@functools.cache
def started(*kinds: str) -> dict[tuple[str, str], list[Words]]:
    """The arguments of each program of these kinds, each once."""
    found: dict[tuple[str, str], list[Words]] = {}
    for listed in collected().values():
        for kind, program, arguments in (part for words in listed for part in parts(words)):
            if kind in kinds and program not in ELSEWHERE:
                of_program = found.setdefault((kind, program), [])
                if arguments not in of_program:
                    of_program.append(arguments)
    return found


# --- Tests ----------------------------------------------------------------------------------------


def test_commands_are_found_in_every_kind_of_file() -> None:
    """Their number in each kind, at least. Reasons are for commands that exist."""
    for suffix, least in ((".md", 100), (".py", 80), (".yaml", 8), (".sbatch", 2), ("", 4)):
        names = [name for name in collected() if Path(name).suffix == suffix]
        assert sum(len(collected()[name]) for name in names) >= least, suffix
    every = {word for listed in collected().values() for words in listed for word in words}
    assert ELSEWHERE.keys() <= every


@pytest.mark.parametrize(("kind", "program"), started("script", "module", "function"))
def test_programs_read_their_arguments(kind: str, program: str, tmp_path: Path) -> None:
    """From a shell, without PYTHONPATH."""
    if kind == "module" and not (launch.ROOT / program.split(".")[0]).exists():
        assert importlib.util.find_spec(program)  # another project's
        return
    example = EXAMPLES.get(Path(program).name)
    if example and example.needs and importlib.util.find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed (make trainers)")
    given = [
        ["--help"] if not words or any(map(PLACEHOLDER.search, words)) else words
        for words in started(kind)[kind, program]
    ]
    ended = launch.python(
        launch.ROOT / "tests" / "harness" / "dry_run.py",
        kind,
        launch.ROOT / program if kind == "script" else program,
        json.dumps(given),
        cwd=launch.ROOT if kind == "module" else tmp_path,
        variables={"PYTHONPATH": ""},
    )
    assert ended.returncode == 0, ended.stderr


def test_experiments_exist() -> None:
    for command, *rest in started("module")["module", "experiments"]:
        assert command in ("list", "run", "status", "report")
        assert rest[:1] in ([], ["NAME"], ["[NAME]"]) or rest[0] in EXPERIMENTS


def test_files_of_pytest_exist() -> None:
    for words in started("module")["module", "pytest"]:
        assert all((launch.ROOT / word).exists() for word in words if word.endswith(".py"))


def test_options_of_launchers_exist() -> None:
    given = started("mpirun")["mpirun", "mpirun"]
    for options in {tuple(words[2:] if words[0] == "-np" else words) for words in given}:
        if options and "--host" not in options:
            ended = subprocess.run(["mpirun", "-np", "1", *options, "true"], capture_output=True)
            assert ended.returncode == 0, (options, ended.stderr)
    for words in started("torchrun")["torchrun", "torchrun"]:
        parse_args([re.sub("^[A-Z]+$", "2", word) for word in words] + ["train.py"])


def test_targets_of_make_exist() -> None:
    for (_, target), commands in started("make").items():
        for words in commands:
            made = ["make", "--dry-run", target, *words]
            ended = subprocess.run(made, cwd=launch.ROOT, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr


def test_extras_exist() -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    named = [w for c in collected().values() for words in c for w in words if w[:2] == ".["]
    assert {name[2:-1] for name in named} <= project["optional-dependencies"].keys()
    assert named


@pytest.mark.parametrize("script", [script for _, script in started("bash")])
def test_scripts_of_bash_can_be_read(script: str) -> None:
    ended = subprocess.run(["bash", "-n", script], cwd=launch.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
