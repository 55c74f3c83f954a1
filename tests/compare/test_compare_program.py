"""powergossip-compare as a program."""

from pathlib import Path

from tests.harness import launch
from tests.harness.compared_runs import write_run


def test_the_program_needs_no_torch(tmp_path: Path) -> None:
    """It only reads files: importing torch takes seconds."""
    write_run(tmp_path / "a")
    program = (
        "import sys\n"
        "from powergossip import compare\n"
        "compare.main(['a'])\n"
        "print(sorted({'torch', 'mpi4py', 'omegaconf', 'matplotlib'} & set(sys.modules)))\n"
    )
    ended = launch.python("-c", program, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
