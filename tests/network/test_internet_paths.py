"""Machines behind NATs, and links that fail, in network namespaces."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from powergossip.errors import BadInput
from tests.harness.launch import ROOT
from tests.harness.machines import JOIN, Machine
from tests.harness.namespaces import PUBLIC, Internet

pytest.importorskip("iroh")
pytestmark = pytest.mark.slow

LANS = "192.168.1", "192.168.2"
HALTED = 30  # seconds without a sign of life that end a run
TRAINING = "task_architecture=MLP max_steps_per_epoch=4 batch_size=64 batched_gradients=off"
TRAINING += " optimizer=choco gossip=asynchronous on_worker_loss=continue worker_timeout=10"


@pytest.fixture
def net() -> Iterator[Internet]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nft"))):
        pytest.skip("this needs root, ip, tc and nft")
    net = Internet()
    try:
        net.build()
        net.nat("probe", 250, "192.168.250")
    except (BadInput, OSError) as error:
        net.remove()
        pytest.skip(f"no internet can be emulated here: {error}")
    yield net
    net.remove()


class Run:
    """Machines that exchange messages for some seconds, the first one first."""

    def __init__(self, net: Internet, folder: Path, hosts: str, seconds: int, **given: object):
        length = given.pop("length", 10**4)
        timeout = given.pop("worker_timeout", None)  # of exchanges by edges
        variables = {} if timeout is None else {"WORKER_TIMEOUT": str(timeout)}
        self._outputs = [folder / host for host in hosts.split()]
        self.processes = [
            subprocess.Popen(
                net.command(
                    *(host, sys.executable, "-m", "tests.harness.far", str(folder), str(rank)),
                    *(str(len(hosts.split())), str(seconds), str(length)),
                    json.dumps(given if rank == 0 else {}),
                ),
                env={**os.environ, **variables, "XDG_STATE_HOME": str(folder / f"state-{rank}")},
                cwd=ROOT,
                stdout=output.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, (host, output) in enumerate(zip(hosts.split(), self._outputs, strict=True))
        ]

    def wait(self, text: str = "step 0 ", seconds: float = 120) -> None:
        """Wait until all have said this."""
        deadline = time.monotonic() + seconds
        while not all(text in output.read_text() for output in self._outputs):
            assert time.monotonic() < deadline, [output.read_text() for output in self._outputs]
            time.sleep(0.1)

    def ends(self, seconds: float = 150) -> dict[str, str]:
        """What each machine has said. All end well."""
        codes = [process.wait(seconds) for process in self.processes]
        said = {output.name: output.read_text() for output in self._outputs}
        assert codes == [0] * len(codes), said
        return said

    def fails(self, *sentences: str) -> None:
        """Those that are not killed end with exit code 1 and one of these sentences."""
        for process, output in zip(self.processes, self._outputs, strict=True):
            code, said = process.wait(HALTED + 120), output.read_text()
            if code != -9:
                errors = [line for line in said.splitlines() if line.startswith("error: ")]
                assert code == 1, said
                assert len(errors) == 1, said
                assert any(re.search(sentence, errors[0]) for sentence in sentences), errors


class OnHost(Machine):
    """A program powergossip-join on a host."""

    def __init__(self, net: Internet, home: Path, *arguments: str):
        self.home, self.folder, self._output = home, home / "run", home / "output"
        home.mkdir(exist_ok=True)
        words = sys.executable, str(JOIN), *arguments, "--output-dir", str(self.folder)
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                net.command(home.name, *words),
                env={**os.environ, "XDG_STATE_HOME": str(home), "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def two_nats(net: Internet, rule: str = "masquerade", second_lan: str = LANS[1]) -> None:
    for name, lan, number in (("a", LANS[0], 2), ("b", second_lan, 3)):
        net.nat(f"router-{name}", 10 + number, lan, rule)
        net.behind(name, f"router-{name}", lan, number)


def addresses(said: str) -> set[str]:
    """Addresses of the other machines in the connections of one."""
    return set(re.findall(r"\('(\S+):\d+', True", said))


@pytest.mark.parametrize("second_lan", LANS)
def test_two_nats_are_traversed(net: Internet, tmp_path: Path, second_lan: str) -> None:
    """Also if both have the same private addresses."""
    net.host("first", 1)
    two_nats(net, second_lan=second_lan)
    said = Run(net, tmp_path, "first a b", 2).ends()
    assert addresses(said["a"]) == {f"{PUBLIC}.1", f"{PUBLIC}.13"}
    assert addresses(said["b"]) == {f"{PUBLIC}.1", f"{PUBLIC}.12"}


def test_nats_with_a_port_for_each_connection_end_a_run(net: Internet, tmp_path: Path) -> None:
    net.host("first", 1)
    two_nats(net, "masquerade fully-random")
    Run(net, tmp_path, "first a b", 2).fails(
        r"no connection to process \d: no answer within 30 s; addresses tried: ", "is lost"
    )


def test_the_port_of_the_first_machine_is_forwarded(net: Internet, tmp_path: Path) -> None:
    two_nats(net)
    net.forward("router-a", 4433, f"{LANS[0]}.2")
    said = Run(net, tmp_path, "a b", 2, port=4433, addresses=[f"{PUBLIC}.12:4433"]).ends()
    assert addresses(said["b"]) == {f"{PUBLIC}.12"}


def test_a_new_address_and_a_cut_link(net: Internet, tmp_path: Path) -> None:
    for number, name in enumerate(("first", "a", "b"), 1):
        net.host(name, number)
    run = Run(net, tmp_path, "first a b", 14)
    run.wait()
    net.ip("a", f"address del {PUBLIC}.2/24 dev eth0", f"address add {PUBLIC}.77/24 dev eth0")
    time.sleep(2)
    net.ip("switch", "link set b-eth0 down")
    time.sleep(5)
    net.ip("switch", "link set b-eth0 up")
    said = run.ends()
    assert addresses(said["b"]) == {f"{PUBLIC}.1", f"{PUBLIC}.77"}


@pytest.mark.parametrize("worker_timeout", [None, 30])
def test_a_router_with_another_address(
    net: Internet, tmp_path: Path, worker_timeout: int | None
) -> None:
    """The machine behind it, and one behind another NAT, meet again at the address that the first
    machine sees. No message is lost or comes twice."""
    net.host("first", 1)
    two_nats(net)
    run = Run(net, tmp_path, "first a b", 25, worker_timeout=worker_timeout)
    run.wait()
    replaced = f"address del {PUBLIC}.12/24 dev eth0", f"address add {PUBLIC}.77/24 dev eth0"
    net.ip("router-a", *replaced)
    said = run.ends()
    assert addresses(said["b"]) == {f"{PUBLIC}.1", f"{PUBLIC}.77"}


def test_packets_are_lost_and_a_link_is_cut_for_a_minute(net: Internet, tmp_path: Path) -> None:
    """Neither loses a message, nor a machine before worker_timeout."""
    for number, name in enumerate(("first", "a", "b"), 1):
        net.host(name, number)
    net.lose("a", 3)
    run = Run(net, tmp_path, "first a b", 80, worker_timeout=120)
    run.wait()
    net.ip("switch", "link set b-eth0 down")
    time.sleep(60)
    net.ip("switch", "link set b-eth0 up")
    run.ends()


def test_slow_and_asymmetric_links(net: Internet, tmp_path: Path) -> None:
    for number, (name, rate) in enumerate((("first", "10mbit"), ("a", "1mbit")), 1):
        net.host(name, number)
        net.rate(name, rate)
    Run(net, tmp_path, "first a", 2, length=10**6).ends()


def test_ipv6_alone_and_several_devices(net: Internet, tmp_path: Path) -> None:
    """A second device, whose network does not lead to the others, does no harm."""
    for number, name in enumerate(("first", "a"), 1):
        net.host(name, number, v6=True)
        net.ip(name, "link add eth1 type veth peer name eth2", "link set eth1 up")
        net.ip(name, f"address add 10.77.0.{number}/24 dev eth1")
    said = Run(net, tmp_path, "first a", 2).ends()
    assert addresses(said["a"]) == {"[2001:db8::1]"}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_machine_ends_the_others(net: Internet, tmp_path: Path, killed: int) -> None:
    for number, name in enumerate(("first", "a", "b"), 1):
        net.host(name, number)
    run = Run(net, tmp_path, "first a b", 600)
    run.wait()
    said = (tmp_path / ("first", "a")[killed]).read_text()
    (process,) = re.findall(r"process (\d) has met", said)
    run.processes[killed].kill()
    run.fails(f"the connection to process {process} is lost", "it has ended with exit code 1")


def test_a_machine_that_was_killed_behind_a_nat_comes_back(net: Internet, tmp_path: Path) -> None:
    net.host("first", 1)
    two_nats(net)
    new = "new", "--workers", "3", "num_epochs=100000", *TRAINING.split()
    running = [OnHost(net, tmp_path / "first", *new)]
    ticket = running[0].ticket()
    running += [OnHost(net, tmp_path / host, ticket) for host in "ab"]
    running[0].wait_for_workers(3, 120)
    running[2].process.kill()
    running[0].wait_for_workers(2, 120)
    running[2] = OnHost(net, tmp_path / "b", running[2].name)
    for machine in running:
        machine.wait_for_workers(3, 120)
    assert "it is in the run again" in running[2].output
    running[1].process.send_signal(signal.SIGTERM)
    codes = [machine.process.wait(120) for machine in running]
    assert codes == 3 * [128 + signal.SIGTERM], [machine.output for machine in running]
