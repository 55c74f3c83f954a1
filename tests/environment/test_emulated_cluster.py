"""emulated_cluster.py with real namespaces and a real mpirun, where these are available.

Token buckets limit the links. At a rate this slow, the load of the machine matters little.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from environment import emulated_cluster
from powergossip.errors import BadInput
from tests.harness.helpers import executable
from tests.harness.launch import ROOT

EMULATOR = ROOT / "environment" / "emulated_cluster.py"
RATE = 20_000_000  # bits per second
PARTS = """set -e
    ip netns add probe-$$
    trap 'ip netns delete probe-$$' EXIT
    ip -n probe-$$ link add switch type bridge
    ip -n probe-$$ link add one type veth peer name other
    tc -n probe-$$ qdisc add dev one root tbf rate 1mbit burst 3028 limit 100000"""

Cluster = subprocess.Popen[str]


@pytest.fixture(scope="session")
def _possible() -> None:
    """Skips the test where no cluster can be emulated; it tries each part of one."""
    try:
        emulated_cluster.check_machine("sh")
    except BadInput as reason:
        pytest.skip(str(reason))
    probe = subprocess.run(["sh", "-c", PARTS], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no cluster can be emulated here: {probe.stderr.strip()}")


needs_namespaces = pytest.mark.usefixtures("_possible")


def start(*command: str, hosts: int = 2, rate: str = "none", **variables: str) -> Cluster:
    return subprocess.Popen(
        [sys.executable, EMULATOR, "--hosts", str(hosts), "--rate", rate, "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(cluster: Cluster) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    output, errors = cluster.communicate(timeout=120)
    return cluster.returncode, output, errors


def rows_of(*clusters: Cluster) -> list[Any]:
    """The rows that process 0 of each prints."""
    ended = [end(cluster) for cluster in clusters]
    assert [(code, errors) for code, _, errors in ended] == [(0, "")] * len(clusters)
    return [json.loads(output) for _, output, _ in ended]


def program(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import json, os, pathlib, time\nfrom mpi4py import MPI\n{text}"


# Process 0 prints for each message and host the counted bytes, those that its link has carried, and
# its namespace.
COUNTED = """
import torch, topologies
from powergossip.network import Gather, Mean, Network, ToAll, processes
who = processes()
network = Network(topologies.make("ring", who.size))
carried = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
def conversation(message):
    yield message
messages = Gather([torch.ones(100_000 * (1 + who.rank))]), *(
    kind(torch.ones(1, 500_000)) for kind in (ToAll, Mean)
)
rows = []
for message in messages:
    network.run(conversation(message))  # whatever there is to set up
    who.gather(None)
    before, counted = int(carried.read_text()), int(network.bits[0])
    network.run(conversation(message))
    time.sleep(0.5)
    counted, sent = (int(network.bits[0]) - counted) / 8, int(carried.read_text()) - before
    rows.append(who.gather((counted, sent, os.stat("/proc/self/ns/net").st_ino)))
if who.rank == 0:
    print(json.dumps(rows), flush=True)
"""


@needs_namespaces
def test_counted_bits_are_those_that_a_link_carries() -> None:
    """But for headers, 4.6 %, and TCP's acknowledgments of what arrives. Two clusters at once have
    hosts of their own."""
    clusters = [start(*program(COUNTED), hosts=hosts) for hosts in (4, 2)]
    found = [rows for of_cluster in rows_of(*clusters) for rows in of_cluster]
    for rows in found:
        everything = sum(counted for counted, _, _ in rows)
        for counted, carried, _ in rows:
            assert counted < carried < 1.1 * counted + 0.03 * everything
        assert sum(carried for _, carried, _ in rows) < 1.1 * everything
    homes = {home for rows in found for _, _, home in rows}
    assert len(homes | {os.stat("/proc/self/ns/net").st_ino}) == 4 + 2 + 1


# Process 0 sends 1 MB to each of two others, then they to it; it prints both in bits per second.
TRANSFERS = """
comm = MPI.COMM_WORLD
buffers = [bytearray(1_000_000), bytearray(1_000_000)]
def rate(source):
    comm.Barrier()
    start = time.perf_counter()
    act = comm.Isend if source else comm.Irecv
    others = [1, 2] if comm.rank == 0 else [0]
    MPI.Request.Waitall([act(b, other) for b, other in zip(buffers, others)])
    comm.Barrier()
    return 2 * 8 * 1_000_000 / (time.perf_counter() - start)
rates = [(rate(comm.rank == 0), rate(comm.rank != 0)) for _ in range(2)]
if comm.rank == 0:
    print(json.dumps(rates))
"""


@needs_namespaces
def test_a_link_carries_its_rate_each_way() -> None:
    """A host's own link limits what it sends to all, and what it receives from all."""

    def reaches(rate: str, least: float, most: float) -> bool:
        (rows,) = rows_of(start(*program(TRANSFERS), hosts=3, rate=rate))
        best = [max(rates) for rates in zip(*rows, strict=True)]  # sent, received
        assert max(best) < most
        return min(best) > least

    # A busy machine is slower at times, never faster.
    assert any(reaches("20mbit", 0.75 * RATE, 1.05 * RATE) for _ in range(5))
    assert any(reaches("none", 5 * RATE, math.inf) for _ in range(5))


@needs_namespaces
def test_a_signal_ends_it_and_nothing_is_left(tmp_path: Path) -> None:
    def present() -> set[str]:
        return {*os.listdir("/run/netns"), *os.listdir("/sys/class/net")}

    before = present()
    # The end of the pipe of a process that is left would stay open.
    cluster = start("sh", "-c", "echo started; exec sleep 600", rate="10mbit")
    assert cluster.stdout is not None
    assert [cluster.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    assert present() == before
    cluster.send_signal(signal.SIGTERM)
    assert end(cluster)[:2] == (1, "")  # mpirun's
    assert end(start("sh", "-c", "exit 7"))[0] == 7
    executable(tmp_path / "tc", "echo 'Error: Specified qdisc kind is unknown.' >&2; exit 1")
    code, output, errors = end(start("true", rate="1mbit", PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert (code, output) == (2, "")
    assert errors.startswith('error: no cluster can be emulated here, tc says "Error: Specified q')
    assert errors.count("\n") == 1
    assert present() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "--hosts : use a whole number from 1"),
        ("--hosts 2 -- true", "--rate : use none, or 1kbit"),
        ("--hosts 2 --rate none --", "nothing to run; end with -- and a command"),
        ("--hosts 2 --rate none true", "true is unknown; --help lists the options"),
        *(
            (f"--hosts {hosts} --rate none -- true", f"--hosts {hosts}: use a whole number from 1")
            for hosts in ("0", "251", "-1", "2.5")
        ),
        *(
            (f"--hosts 2 --rate {rate} -- true", f"--rate {rate}: use none, or 1kbit to 100gbit")
            for rate in ("10", "10mbps", "0mbit", "101gbit")
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)):
        emulated_cluster.main(arguments.split())


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, "there is no ip on PATH; install it (Debian, Ubuntu: apt-get install iproute2)"),
        ({"ip": "", "tc": ""}, "there is no mpirun on PATH"),
        ({"ip": "", "tc": "", "mpirun": "echo 'mpirun (Open MPI) 4.1.4'"}, "Open MPI) 4"),
        ({"ip": "", "tc": "", "mpirun": "echo 'mpirun (Open MPI) 5.0.11'"}, 'no program "train"'),
    ],
)
def test_a_missing_tool_is_named(
    programs: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in programs.items():
        executable(tmp_path / name, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    for user, said in ((0, sentence), (1000, "only root")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(BadInput, match=re.escape(said)):
            emulated_cluster.check_machine("train")
