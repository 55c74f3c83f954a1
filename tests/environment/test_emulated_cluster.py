"""emulated_cluster.py with real namespaces and a real mpirun, where these are available.

Token buckets limit the links. At a rate this slow, the load of the machine matters little.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from environment import emulated_cluster
from tests.harness.helpers import executable
from tests.harness.launch import ROOT

EMULATOR = ROOT / "environment" / "emulated_cluster.py"
NAMESPACES = Path("/run/netns")
RATE = 20_000_000  # bits per second

Cluster = subprocess.Popen[str]
Start = Callable[..., Cluster]
Traces = Callable[[Cluster], list[str]]


@pytest.fixture(scope="session")
def _possible() -> None:
    """Skips the test where no cluster can be emulated; it tries each part of one."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    for tool in ("ip", "tc", "mpirun"):
        if not shutil.which(tool):
            pytest.skip(f"there is no {tool} on PATH")
    mpirun = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if not re.match(r"mpirun \(Open MPI\) ([5-9]|\d\d)", mpirun.stdout):
        pytest.skip("mpirun is not that of Open MPI 5 or newer")
    name = f"probe-{os.getpid()}"
    parts = f"""set -e
        ip netns add {name}
        trap 'ip netns delete {name}' EXIT
        ip -n {name} link add switch type bridge
        ip -n {name} link add one type veth peer name other
        tc -n {name} qdisc add dev one root tbf rate 1mbit burst 3028 limit 100000
        ip netns exec {name} true"""
    probe = subprocess.run(["sh", "-c", parts], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no cluster can be emulated here: {probe.stderr.strip()}")


@pytest.fixture
def start(_possible: None, tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster whose processes are known by their environment; see left_behind."""
    clusters: list[Cluster] = []

    def start(
        *command: str,
        hosts: int = 2,
        rate: str = "none",
        launcher: tuple[str, ...] = (),
        ignored: signal.Signals | None = None,
        late: str = "0",
        **variables: str,
    ) -> Cluster:
        def dispositions() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background has it ignored
            if ignored is not None:
                signal.signal(ignored, signal.SIG_IGN)

        emulator = [sys.executable, str(EMULATOR), "--hosts", str(hosts), "--rate", rate]
        emulator += ["--latency", late]
        cluster = subprocess.Popen(
            [*launcher, *emulator, "--", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "STARTED_BY": str(tmp_path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dispositions,
        )
        clusters.append(cluster)
        return cluster

    yield start
    for cluster in clusters:
        if cluster.poll() is None:
            cluster.terminate()
            cluster.communicate(timeout=90)


@pytest.fixture
def left_behind(tmp_path: Path) -> Traces:
    """Lists namespaces of the cluster, links made since, and processes of the test's clusters."""
    links = set(os.listdir("/sys/class/net"))

    def left_behind(cluster: Cluster) -> list[str]:
        found = [*namespaces(cluster), *(set(os.listdir("/sys/class/net")) - links)]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"STARTED_BY={tmp_path}\0".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
            except OSError:  # it has ended
                continue
        return found

    return left_behind


def namespaces(cluster: Cluster) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"*-{cluster.pid}-*")]


def end(cluster: Cluster) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    output, errors = cluster.communicate(timeout=120)
    return cluster.returncode, output, errors


def wait_for_start(cluster: Cluster, hosts: int = 2) -> None:
    """Until every process has printed it."""
    assert cluster.stdout is not None
    assert [cluster.stdout.readline() for _ in range(hosts)] == ["started\n"] * hosts


ENDLESS = ("sh", "-c", "echo started; exec sleep 600")


def program(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import json, os, pathlib, time\nfrom mpi4py import MPI\n{text}"


# Process 0 prints the network namespace of each process, and the bytes sent through its link.
RING = """
comm = MPI.COMM_WORLD
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
sent, received = bytes([comm.rank]) * 1_000_000, bytearray(1_000_000)
comm.Sendrecv(sent, right, recvbuf=received, source=left)
assert received == bytes([left]) * 1_000_000
comm.Barrier()  # all bytes have arrived
through_link = int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
rows = comm.gather((os.readlink("/proc/self/ns/net"), through_link))
if rows:
    print(json.dumps(rows), flush=True)
"""


# Process 0 prints for each host the counted bytes, and those that its link has carried.
COUNTED = """
import torch, topologies
from powergossip.network import Gather, Mean, Network, ToAll, processes
who = processes()
network = Network(topologies.make("ring", who.size))
message = MESSAGE
carried = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
def conversation():
    yield message
network.run(conversation())  # whatever there is to set up
who.gather(None)
before, counted = int(carried.read_text()), int(network.bits[0])
network.run(conversation())
time.sleep(0.5)
rows = who.gather(((int(network.bits[0]) - counted) / 8, int(carried.read_text()) - before))
if who.rank == 0:
    print(json.dumps(rows), flush=True)
"""
SYMMETRIC = ("to neighbors", "all-reduce")
MESSAGES = {
    "to neighbors": "ToAll(torch.ones(1, 500_000))",
    "all-reduce": "Mean(torch.ones(1, 500_000))",
    "all-gather": "Gather([torch.ones(100_000 * (1 + who.rank))])",
}


@pytest.mark.parametrize(
    "kind", ["all-gather", *(pytest.param(k, marks=pytest.mark.slow) for k in SYMMETRIC)]
)
def test_counted_bits_are_those_that_a_link_carries(start: Start, kind: str) -> None:
    """But for headers, 4.6 %, and TCP's acknowledgments of what arrives."""
    cluster = start(*program(COUNTED.replace("MESSAGE", MESSAGES[kind])), hosts=4, rate="none")
    code, output, errors = end(cluster)
    assert (code, errors) == (0, "")
    rows = json.loads(output)
    everything = sum(counted for counted, _ in rows)
    for counted, carried in rows:
        assert counted < carried < 1.1 * counted + 0.03 * everything
    assert sum(carried for _, carried in rows) < 1.1 * everything


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


def test_a_link_carries_its_rate_each_way(start: Start) -> None:
    """A host's own link limits what it sends to all, and what it receives from all."""

    def best(rate: str) -> list[float]:  # bits per second: sent, received
        cluster = start(*program(TRANSFERS), hosts=3, rate=rate)
        code, output, errors = end(cluster)
        assert (code, errors) == (0, "")
        return [max(rates) for rates in zip(*json.loads(output), strict=True)]

    def reaches(rate: str, least: float, most: float) -> bool:
        found = best(rate)
        assert max(found) < most
        return min(found) > least

    # A busy machine is slower at times, never faster.
    assert any(reaches("20mbit", 0.75 * RATE, 1.05 * RATE) for _ in range(5))
    assert any(reaches("none", 5 * RATE, math.inf) for _ in range(5))


# --- Its end --------------------------------------------------------------------------------------


def test_the_exit_code_is_the_programs(start: Start, left_behind: Traces) -> None:
    """Namespaces of an earlier script with the same PID are no obstacle."""
    earlier = 'ip netns add "emulated-cluster-$$-0"; exec "$@"'
    cluster = start("sh", "-c", "exit 7", rate="10mbit", launcher=("sh", "-c", earlier, "sh"))
    assert end(cluster)[0] == 7
    assert left_behind(cluster) == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_ends_it(start: Start, left_behind: Traces, number: signal.Signals) -> None:
    cluster = start(*ENDLESS)
    wait_for_start(cluster)
    assert len(namespaces(cluster)) == 3, "two hosts and the switch"
    cluster.send_signal(number)
    assert end(cluster)[0] == 1  # mpirun's
    assert left_behind(cluster) == []


def test_mpirun_ends_with_a_killed_script_and_the_next_start_removes_its_leftovers(
    start: Start, left_behind: Traces
) -> None:
    killed = start(*ENDLESS)
    wait_for_start(killed)
    enter = ["ip", "netns", "exec", namespaces(killed)[0]]
    visitor = subprocess.Popen([*enter, "sh", "-c", "trap '' TERM; exec sleep 600"])
    try:
        killed.kill()
        assert killed.stdout is not None
        assert killed.stdout.read() == ""  # returns when nobody holds it any more
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert set(left_behind(killed)) == set(namespaces(killed))
        assert len(namespaces(killed)) == 3, "else there is nothing to remove"
        assert end(start("true"))[0] == 0
        assert visitor.wait(timeout=60) == -signal.SIGKILL
    finally:
        visitor.kill()
        visitor.wait()
        killed.communicate(timeout=90)
    assert left_behind(killed) == []


def test_clusters_do_not_disturb_each_other(
    start: Start, left_behind: Traces, tmp_path: Path
) -> None:
    """Messages go around the ring of one before and after another comes and goes."""
    go = tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    first = start(*program(f"{RING}\n{waits}\n{RING}"), hosts=3, rate="100mbit")
    assert first.stdout is not None
    before = json.loads(first.stdout.readline())
    homes = {home for home, _ in before}
    assert len(homes | {os.readlink("/proc/self/ns/net")}) == 3 + 1, "none is the machine's own"
    assert all(through_link >= 1_000_000 for _, through_link in before)
    code, output, errors = end(start(*program(RING), rate="100mbit"))
    assert (code, errors) == (0, "")
    assert not {home for home, _ in json.loads(output)} & homes
    go.touch()
    code, output, errors = end(first)
    assert (code, errors) == (0, "")
    assert {home for home, _ in json.loads(output)} == homes
    assert left_behind(first) == []


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "--hosts, --rate; use: python environment/emulated_cluster.py --hosts N --rate"),
        ("--hosts 2 --rate none --", "nothing to run; end with -- and a command"),
        ("--hosts 2 --rate none true", "unrecognized arguments: true; use: python env"),
        ("--hosts 2 --rate none --latency soon -- true", "--latency soon: use 0"),
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
def test_bad_input_is_refused_in_a_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulated_cluster.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert re.fullmatch("error: .*\n", printed.err), "one line"
    assert (sentence in printed.err, printed.out) == (True, "")


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, "there is no ip on PATH; install it (Debian, Ubuntu: apt-get install iproute2)"),
        ({"ip": "", "tc": ""}, "there is no mpirun on PATH"),
        ({"ip": "", "tc": "", "mpirun": "echo 'mpirun (Open MPI) 4.1.4'"}, "Open MPI) 4"),
        ({"ip": "", "tc": "", "mpirun": "echo 'HYDRA build details:'"}, 'says "HYDRA build'),
        ({"ip": "", "tc": "", "mpirun": "echo 'mpirun (Open MPI) 5.0.11'"}, 'no program "train"'),
    ],
)
def test_a_missing_tool_is_named(
    programs: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in programs.items():
        executable(tmp_path / name, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(emulated_cluster.Refused, match=re.escape(sentence)):
        emulated_cluster.check_machine("train")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(emulated_cluster.Refused, match="only root"):
        emulated_cluster.check_machine("train")


def test_an_error_of_the_kernel_is_reported_and_nothing_is_left(
    start: Start, left_behind: Traces, tmp_path: Path
) -> None:
    executable(tmp_path / "tc", "echo 'Error: Specified qdisc kind is unknown.' >&2; exit 1")
    path = f"{tmp_path}:{os.environ['PATH']}"
    cluster = start("true", rate="10mbit", PATH=path)
    code, output, errors = end(cluster)
    assert (code, output) == (2, "")
    assert errors.startswith('error: no cluster can be emulated here, tc says "Error: Specified q')
    assert errors.count("\n") == 1
    assert left_behind(cluster) == []


# Process 0 prints the seconds of a short message there and back, the least of several.
ROUND_TRIP = """
comm, least = MPI.COMM_WORLD, 9.0
for _ in range(5):
    comm.Barrier()
    start = time.perf_counter()
    if comm.rank == 0:
        comm.send(1, 1)
        comm.recv(source=1)
        least = min(least, time.perf_counter() - start)
    elif comm.rank == 1:
        comm.send(comm.recv(source=0), 0)
if comm.rank == 0:
    print(least, flush=True)
"""


def test_latency_is_added_in_each_direction(start: Start, left_behind: Traces) -> None:
    cluster = start(*program(ROUND_TRIP), late="100ms")
    code, output, errors = end(cluster)
    assert code == 0, errors
    assert 0.2 <= float(output) < 0.3
    assert left_behind(cluster) == []
