"""Messages between workers and the survivors' operations: without a loss under this mpirun, and in
programs of their own whose processes end and stop.
"""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from powergossip import ulfm
from powergossip.network.resilient import messages
from powergossip.network.resilient.worker_messages import LOST, Links
from tests.harness import internet, launch

ULFM = ("--with-ft", "ulfm")


def exchanged(links: Links, elements: int, messages: int) -> None:
    """Every worker sends to all, all at once, and everything arrives once and in order."""
    n = len(links.homes)
    for k in range(messages):
        for i in links.workers:
            for j in range(n):
                if j != i:
                    links.send(i, j, k, np.full(elements, (i + k) % 256, dtype=np.uint8))
    counters = {(i, j): 0 for j in links.workers for i in range(n) if i != j}
    while min(counters.values(), default=messages) < messages:
        links.wait(1.0)
        for i, j, k, payload in links.poll():
            assert counters[i, j] == k
            assert payload.dtype == torch.uint8
            assert torch.equal(payload, torch.full((elements,), (i + k) % 256, dtype=torch.uint8))
            counters[i, j] += 1
    assert set(counters.values()) <= {messages}
    links.group.barrier()  # before messages of a next call


def check_messages_and_operations(medium: Any) -> None:
    """Two workers of each process, and the collective operations of `Processes`."""
    size = medium.size
    links = Links(medium, [process for process in range(size) for _ in range(2)])
    survivors, rank = links.group, links.group.rank
    assert links.workers == [2 * links.process, 2 * links.process + 1]
    for elements in (0, 100, 1_000_000):
        exchanged(links, elements, messages=3)
    found = survivors.gather({"rank": rank, "of": np.arange(2)})
    assert [value["rank"] for value in found] == survivors.members == [*range(size)]
    assert survivors.sum(np.array([1.0, rank])).tolist() == [size, size * (size - 1) / 2]
    assert survivors.start_max(np.array([-rank, rank]))().tolist() == [0, size - 1]
    assert survivors.broadcast(f"of {rank}") == "of 0"
    array = np.full(3, rank)
    survivors.broadcast_array(array)
    assert array.tolist() == [0, 0, 0]
    links.note(b"progress")
    survivors.barrier()
    notes = {source: note.numpy().tobytes() for source, note in links.notes()}
    assert notes == dict.fromkeys(set(range(size)) - {links.process}, b"progress")
    assert links.alive == set(links.homes)
    assert links.lost() == set()
    links.finish()


@pytest.mark.parallel([1, 2, 4])
def test_messages_of_any_length_arrive_once_and_in_order() -> None:
    check_messages_and_operations(MPI.COMM_WORLD)


@pytest.mark.parallel([2, 4])
def test_machines_with_a_ticket_have_the_same_messages_and_operations() -> None:
    check_messages_and_operations(internet.under_mpi())


@pytest.mark.parallel(2)
def test_messages_longer_than_those_of_mpi_are_sent_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "LONGEST", 1000)
    links = Links(MPI.COMM_WORLD, [0, 1])
    for elements in (968, 969, 12_345):
        exchanged(links, elements, messages=2)
    links.finish()


@pytest.mark.parallel(2)
def test_payloads_keep_their_bits_and_belong_to_the_receiver() -> None:
    """Sent to a worker of the other process, and to one of this process."""
    links = Links(MPI.COMM_WORLD, [0, 1, 0, 1])
    values = torch.tensor([[1.5, -0.0], [float("inf"), 1e-40]])
    for j in (1 - links.process, links.process + 2):
        links.send(links.process, j, 0, values)
    values.zero_()
    arrived: list[Any] = []
    while len(arrived) < 2:
        links.wait(10)
        arrived += links.poll()
    for _, _, _, payload in arrived:
        received = payload.view(torch.float32).reshape(2, 2)
        assert received.tolist() == torch.tensor([[1.5, -0.0], [float("inf"), 1e-40]]).tolist()
        received.zero_()
    links.finish()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "single process"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "flag"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_mpi_ft_enable": "1"}, None),
    ],
)
def test_launchers_without_ulfm_are_rejected(
    variables: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ulfm.enabled() == (named is None)
    if named is None:
        ulfm.require("key=value")
    else:
        with pytest.raises(ValueError, match=f"key=value: .*--with-ft ulfm.*{named}"):
            ulfm.require("key=value")


def surviving(*arguments: Any, code: int = 0, size: int = 4) -> tuple[list[dict[str, Any]], str]:
    ended = launch.python(
        "tests/harness/surviving.py", *arguments, processes=size, options=ULFM, timeout=70
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    # Open MPI's event loop may warn of a socket of a process that was killed.
    errors = re.sub(r"^\[warn\] Epoll .*\n", "", ended.stderr, flags=re.MULTILINE)
    rows = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return [json.loads(row) for row in rows], errors


# 24: processes 0 and 1 end, with messages of 3 MB
KILLS = [
    pytest.param(seed, hosts, marks=() if (seed, hosts) == (24, 1) else pytest.mark.slow)
    for seed in range(1, 31)
    for hosts in ((1 + seed % 3, 0) if seed in (3, 9, 15, 27) else (1 + seed % 3,))
]


@pytest.mark.parametrize(("seed", "hosts"), KILLS)
def test_survivors_of_kills_at_random_times_agree_and_go_on(seed: int, hosts: int) -> None:
    """hosts=0: machines that meet with a ticket."""
    rows, errors = surviving("kills", seed, hosts, code=LOST)
    assert errors == "" or hosts == 0
    expected = rows[0]["expected"]
    assert sorted(row["process"] for row in rows) == expected
    for row in rows:
        assert row["members"] == expected
        assert expected[row["rank"]] == row["process"]
        assert row["sizes"] == rows[0]["sizes"], "agreed"
        assert all(sizes == row["sizes"][0] for sizes in row["sizes"]), "agreed at every call"
        assert max(row["detected"].values()) < (5 if hosts else 15)


@pytest.mark.parametrize("hosts", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 0))])
def test_a_process_that_is_busy_for_longer_than_worker_timeout_is_not_lost(hosts: int) -> None:
    """Nor on another host: a heartbeat speaks for it, or one of its host."""
    rows, errors = surviving("busy", 1.5, hosts)
    assert errors == "" or hosts == 0
    assert [row["members"] for row in rows] == 4 * [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("seconds", "hosts"),
    [
        (1.5, 4),
        *(pytest.param(s, h, marks=pytest.mark.slow) for s, h in ((1.5, 1), (0, 2), (1.5, 0))),
    ],
)
def test_a_process_that_is_stopped_for_too_long_is_lost_and_ends(
    seconds: float, hosts: int
) -> None:
    rows, errors = surviving("stop", seconds, hosts, code=LOST)
    assert sorted(row["process"] for row in rows) == [0, 2, 3]
    assert all(row["members"] == [0, 2, 3] for row in rows)
    assert errors.count("worker_timeout=0.6") == (1 if seconds else 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_one_side_goes_on_where_the_network_fails(size: int) -> None:
    """Half of the processes are on each side. mpirun does not end the one that goes on."""
    rows, errors = surviving("split", 0.5, 2, code=LOST, size=size)
    side = list(range(0, size, 2))
    assert sorted(row["process"] for row in rows) == side
    assert all(row["members"] == side for row in rows)
    assert errors.count(str(side)) == len(side)
