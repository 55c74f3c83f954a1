"""Children of connected processes: workers of a data loader, of an executor, other programs."""

import json
from pathlib import Path

import pytest

from powergossip import launcher
from tests.harness import launch

# The page on training loops has processes() at the top of a program: children execute it again.
CHILDREN = """
import json, multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from powergossip.network import processes

def early():
    try:
        return f"a child is process {processes().rank}"
    except ValueError as error:
        return str(error)

before = ""
if __name__ == "__main__" and "OMPI_COMM_WORLD_SIZE" in os.environ:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        before = pool.submit(early).result()
who = processes()

def seen():
    mine = processes()
    try:
        mine.gather(None)
        return "has communicated"
    except ValueError as error:
        return mine.rank, mine.size, mine.local_rank, mine.local_size, str(error)

if __name__ == "__main__":
    rows = {}
    for method in sys.argv[1:]:
        if method == "subprocess":
            program = "import json, children; print(json.dumps(children.seen()))"
            rows[method] = json.loads(subprocess.check_output([sys.executable, "-c", program]))
            continue
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows[method] = pool.submit(seen).result()
    everywhere = who.gather(rows)
    if who.rank == 0:
        print(json.dumps([before, everywhere]))
"""


@pytest.mark.parametrize(
    ("launcher", "methods"),
    [
        ("mpirun", ("spawn",)),
        pytest.param("mpirun", ("forkserver", "subprocess"), marks=pytest.mark.slow),
        pytest.param("torchrun", ("spawn", "forkserver", "subprocess"), marks=pytest.mark.slow),
    ],
)
def test_children_have_the_rank_and_cannot_communicate(
    launcher: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    ended = launch.python(
        tmp_path / "children.py",
        *methods,
        processes=2,
        launcher=launcher,
        cwd=tmp_path,
        variables={"PYTHONPATH": f"{launch.ROOT}:{tmp_path}"},
    )
    assert ended.returncode == 0, ended.stderr
    before, everywhere = json.loads(ended.stdout)
    if launcher == "mpirun":  # a child of a process that has not connected
        assert "call it before in the parent" in before
    for rank, rows in enumerate(everywhere):
        assert set(rows) == set(methods)
        for *place, sentence in rows.values():
            assert place == [rank, 2, rank, 2]
            assert f"a child of process {rank}" in sentence


def test_a_program_of_another_launch_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERGOSSIP_CONNECTED", "")  # restored after the test
    launcher.mark_connected(1, 2, 1, 2)
    assert launcher.place_of_parent() is None
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert launcher.place_of_parent() == [1, 2, 1, 2]
    monkeypatch.setenv("PMIX_NAMESPACE", "another")
    assert launcher.place_of_parent() is None


FINALIZED = """
from mpi4py import MPI
import torch
from powergossip.optimizers import GossipOptimizer

weight = torch.nn.Parameter(torch.zeros(4, 4))
optimizer = GossipOptimizer(torch.optim.SGD([weight], lr=0.1), "power-gossip")
weight.sum().backward()
optimizer.step()
MPI.Finalize()
print("the end", flush=True)
"""


def test_a_program_may_finalize_mpi(tmp_path: Path) -> None:
    (tmp_path / "finalized.py").write_text(FINALIZED)
    ended = launch.python("finalized.py", processes=2, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "the end\n" * 2
