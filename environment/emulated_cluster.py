"""Emulation of a cluster with limited bandwidth on one machine (Linux, as root):

    python environment/emulated_cluster.py --hosts 4 --rate 100mbit -- python train.py seed=2

runs `mpirun -np 4 python train.py seed=2` with each process on its own emulated host, and removes
the hosts afterwards. All hosts are linked to one switch. --rate is the bandwidth of a link in each
direction, in bits per second in the notation of tc (10mbit, 1gbit, k is 1000), or none for no
limit. --latency 20ms is the time from a host to another, in addition to the local kernel's. Signals
are forwarded to mpirun. The exit code is mpirun's, or 2 if nothing could be run.

The emulation limits the rate by a token bucket for each direction at both ends of every link.
Messages are sent by TCP in frames of 1500 bytes including headers: the payload is at most 95.6 % of
the rate. A host that receives from several hosts, or sends to several, has one link for all of
them. The congestion control of TCP is cubic, Linux' default, where the kernel has it, whatever the
default of this machine.

Not emulated:

- Processors. All hosts compute with the cores of this machine, and so do TCP and the emulation. If
  there are more hosts than cores, a step computes for longer than in a cluster. The cost of the
  links is the difference to the same command with `--rate none`, which also shows the highest rate
  that this machine can emulate. OMP_NUM_THREADS=1 limits a process to one core.
- Latency, without --latency. It is the local kernel's, tens of microseconds if idle. Sending fewer
  bytes saves time here, but sending fewer messages does not. With --latency, a process
  (delayed_switch.py) takes the place of the switch. It needs a part of a core, and frames are later
  where processes outnumber cores.
- The first bytes after idle time. A link then sends up to half a millisecond of data at once, or
  two frames if those are more: 62.5 kB at 1gbit, 3 kB below 50mbit.
- Separate machines. Hosts share memory, disks, GPUs and the host name. MPI is aware of it
  (MPI_COMM_TYPE_SHARED has all processes), but does not send messages through shared memory.
- The internet. A host reaches only the other hosts. Download data beforehand.

Open MPI behaves as over any TCP network: of two long messages in opposite directions, it often
sends one after the other, at half the rate each. OMPI_MCA_btl_tcp_flags=send avoids most of this.

A host is a network namespace, emulated-cluster-PID-RANK with the PID of this script. To inspect it:
`ip netns exec emulated-cluster-PID-RANK ip -s link`. The switch is a bridge in a separate
namespace, where mpirun runs. The machine's addresses, routes and firewall are not involved, and
concurrent clusters do not interfere. If this script is killed (SIGKILL), mpirun ends too, and
the next start removes the namespaces.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

USAGE = "python environment/emulated_cluster.py --hosts N --rate RATE [--latency TIME] -- COMMAND …"

NAMESPACES = Path("/run/netns")  # the folder of ip's namespaces
FAMILY = "emulated-cluster"  # prefix of their names

MAX_HOSTS = 250
SUBNET = "10.0.0.0/24"  # of every cluster, since clusters are isolated
SWITCH_ADDRESS = "10.0.0.254/24"

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"  # of TCP, in a namespace

FRAME = 1514  # bytes: 1500 and an Ethernet header
# Timers may be late by this without a loss of rate. A larger bucket would send more at once after
# idle time.
BUCKET = 0.0005  # seconds at the full rate
# Long enough that losses are rare even when all hosts send to one: TCP waits 200 ms for some.
QUEUE = 0.2  # seconds at the full rate

TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds
LONGEST = 10.0  # seconds
SWITCH = Path(__file__).with_name("delayed_switch.py")
RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bits per second
SLOWEST, FASTEST = 10**3, 10**11  # bits per second; in tc, bytes have 32 bits

FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
PATIENCE = 2.0  # seconds for a process to end after a signal
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Refused(ValueError):
    """Invalid arguments, or a machine that cannot run them. The text is one sentence."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; use: {USAGE}")


def parse(arguments: list[str]) -> tuple[int, int | None, float, list[str]]:
    """Number of hosts, bits per second (None: no limit), seconds of latency, command.

    Raises Refused.
    """
    parser = Parser(
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", required=True, metavar="N", help=f"1 to {MAX_HOSTS}")
    parser.add_argument("--rate", required=True, help="bandwidth of a link, or none for no limit")
    parser.add_argument("--latency", default="0", help="from a host to another, such as 20ms")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if not re.fullmatch("[0-9]{1,9}", options.hosts) or not 1 <= int(options.hosts) <= MAX_HOSTS:
        raise Refused(f"--hosts {options.hosts}: use a whole number from 1 to {MAX_HOSTS}")
    rate, latency = bits_per_second(options.rate), seconds(options.latency)
    if not command:
        raise Refused("there is nothing to run; end with -- and a command, like -- python train.py")
    return int(options.hosts), rate, latency, command


def seconds(text: str) -> float:
    """Parse a time such as 20ms or 50us; 0 is none. Raises Refused."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text.lower())
    latency = float(found[1]) * TIMES[found[2]] if found else -1.0
    if text != "0" and not 0 <= latency <= LONGEST:
        raise Refused(f"--latency {text}: use 0, or a time up to 10s, like 20ms or 50us")
    return max(0.0, latency)


def bits_per_second(text: str) -> int | None:
    """Parse a rate in the notation of tc; None for "none". Raises Refused.

    tc's mbps (megabytes per second) and numbers without a unit are rejected: both are easily
    mistaken.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", text.lower())
    rate = round(float(found[1]) * RATES[found[2]]) if found else 0
    if not SLOWEST <= rate <= FASTEST:
        raise Refused(f"--rate {text}: use none, or 1kbit to 100gbit, like 10mbit or 1.5gbit")
    return rate


def check_machine(program: str) -> None:
    """Raise Refused if a right or a program is missing."""
    if os.geteuid() != 0:
        raise Refused("only root can make network namespaces; run this as root")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise Refused(
                f"there is no {tool} on PATH; install it (Debian, Ubuntu: apt-get install iproute2)"
            )
    check_mpirun()
    if not shutil.which(program):
        raise Refused(f'there is no program "{program}"')


def check_mpirun() -> None:
    """Raise Refused unless there is a suitable mpirun."""
    if not shutil.which("mpirun"):
        raise Refused("there is no mpirun on PATH; activate the environment of setup.sh")
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False
    ).stdout.partition("\n")[0]
    found = re.match(r"mpirun \(Open MPI\) (\d+)", version)
    if not found or int(found[1]) < 5:
        raise Refused(
            f'this needs the mpirun of Open MPI 5 or newer; the one here says "{version}"'
        )


class Cluster:
    """Hosts 0, 1, … and a switch. `remove` also removes the results of an incomplete `build`."""

    def __init__(
        self,
        n_hosts: int,
        rate: int | None,  # bits per second
        latency: float = 0.0,  # seconds
    ) -> None:
        self.rate, self.latency = rate, latency
        self.name = f"{FAMILY}-{os.getpid()}"
        self.hosts = [f"{self.name}-{rank}" for rank in range(n_hosts)]
        self.switch = f"{self.name}-switch"

    def build(self) -> None:
        """Create the namespaces and links. Raises Refused where the kernel does not support it."""
        batch("ip", [f"netns add {name}" for name in (self.switch, *self.hosts)])
        if self.latency:
            self.start_delayed_switch()
        else:
            self.build_switch()
        for rank, host in enumerate(self.hosts):
            own = f"address add {address(rank)}/24 dev eth0"
            batch("ip", ["link set lo up", own, "link set eth0 up"], host)
            # With bbr, connections that share a link would leave a fifth of it unused.
            command = ["ip", "netns", "exec", host, "sh", "-c", f"echo cubic >{CONGESTION_CONTROL}"]
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
        if self.rate is not None:
            self.limit(self.rate)

    def build_switch(self) -> None:
        """A bridge, and a pair of linked devices for each host."""
        lines = [
            "link set lo up",
            "link add switch type bridge",
            f"address add {SWITCH_ADDRESS} dev switch",
            "link set switch up",
        ]
        for rank, host in enumerate(self.hosts):
            lines += [
                f"link add port{rank} type veth peer name eth0 netns {host}",
                f"link set port{rank} master switch up",
            ]
        batch("ip", lines, self.switch)

    def start_delayed_switch(self) -> None:
        """A process that is the other end of a device of each host. It ends with the namespaces."""
        command = [sys.executable, str(SWITCH), str(self.latency), str(self.rate or 0)]
        switch = subprocess.Popen(
            [*command, self.switch, *self.hosts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare_launcher,
        )
        assert switch.stdout is not None
        assert switch.stderr is not None
        if switch.stdout.readline() != "ready\n":
            reason = switch.stderr.read().strip().rpartition("\n")[2]
            raise Refused(f'no latency can be emulated here: "{reason}"; it needs /dev/net/tun')
        own = f"address add {SWITCH_ADDRESS} dev eth0"
        batch("ip", ["link set lo up", own, "link set eth0 up"], self.switch)

    def limit(self, rate: int) -> None:
        """Limit every link to `rate` bits per second in each direction."""
        bucket = max(2 * FRAME, round(rate / 8 * BUCKET))  # bytes
        queue = max(100 * FRAME, round(rate / 8 * QUEUE))  # bytes
        # TCP passes on segments of up to 64 KiB. The bucket would split larger ones than it holds,
        # which takes much of a core at 1gbit.
        segment = min(2**16, bucket // 2)  # bytes

        def qdisc(link: str) -> str:
            return f"qdisc add dev {link} root tbf rate {rate}bit burst {bucket} limit {queue}"

        for host in self.hosts:
            batch("ip", [f"link set eth0 gso_max_size {segment}"], host)
            batch("tc", [qdisc("eth0")], host)
        if not self.latency:  # otherwise the switch limits them
            ports = [qdisc(f"port{rank}") for rank in range(len(self.hosts))]
            batch("tc", ports, self.switch)

    def run(self, command: list[str], forwarded: set[signal.Signals]) -> int:
        """Run the command on all hosts, and return the exit code.

        It is mpirun's, or 128 + the number of the signal that ended it. The caller must have
        blocked SIGCHLD and the forwarded signals.
        """
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", *self._mpirun(command)],
            env=os.environ | as_root,
            start_new_session=True,  # otherwise Ctrl-C in a terminal would arrive twice
            preexec_fn=prepare_launcher,
        )
        while (code := process.poll()) is None:
            number = signal.sigwait({*forwarded, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                process.send_signal(number)
        return code if code >= 0 else 128 - code

    def _mpirun(self, command: list[str]) -> list[str]:
        """The namespace and the command of the launcher."""
        enter_host = f'exec ip netns exec "{self.name}-$OMPI_COMM_WORLD_RANK" "$@"'
        return [
            self.switch,
            *("mpirun", "-np", str(len(self.hosts)), "--map-by", ":oversubscribe"),
            *("--bind-to", "none"),
            # Processes reach mpirun through the switch,
            *("--pmixmca", "ptl_base_if_include", SUBNET),
            *("--pmixmca", "ptl_base_remote_connections", "1"),
            # and each other by TCP. MPI's choice would be shared memory.
            *("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "osc", "^sm"),
            *("--mca", "btl_tcp_if_include", SUBNET),
            *("sh", "-c", enter_host, "sh", *command),
        ]

    def remove(self) -> None:
        remove([self.switch, *self.hosts])


def address(rank: int) -> str:
    """The address of a host."""
    return f"10.0.0.{rank + 1}"


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run the lines with ip or tc. Raises Refused with the first line of its error output."""
    where = [] if namespace is None else ["-netns", namespace]
    done = subprocess.run(
        [tool, *where, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        message = done.stderr.partition("\n")[0]
        raise Refused(
            f'no cluster can be emulated here, {tool} says "{message}"; '
            "this needs all rights of root, and veth, bridge and sch_tbf in the kernel"
        )


def prepare_launcher() -> None:
    """In the new process: unblock signals, and request SIGTERM for the end of this script."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove(names: Collection[str]) -> None:
    """Remove namespaces, their links and the processes that still run in them."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # SIGTERM: mpirun has files to remove
        signaled: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while (running := processes_in(names)) and time.monotonic() < deadline:
            for process in running - signaled:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            signaled |= running
            time.sleep(0.01)
    # -force: a concurrent start may remove the same namespaces.
    lines = [f"netns delete {name}" for name in names if (NAMESPACES / name).exists()]
    subprocess.run(
        ["ip", "-force", "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )


def processes_in(names: Iterable[str]) -> set[int]:
    """The processes in the network namespaces of these names."""

    def identity(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:  # the process has ended
            return None
        return status.st_dev, status.st_ino

    inside = {identity(NAMESPACES / name) for name in names} - {None}
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {int(path.name) for path in processes if identity(path / "ns" / "net") in inside}


def leftovers() -> list[str]:
    """Namespaces of scripts that have ended. One with our PID is of an earlier script."""

    def runs(process: str) -> bool:
        # Zombies, which may stay in a container without an init, are in no namespace.
        return int(process) != os.getpid() and Path("/proc", process, "ns", "net").exists()

    names = [path.name for path in NAMESPACES.glob(f"{FAMILY}-*")]
    owners = [re.match(f"{FAMILY}-([0-9]+)-", name) for name in names]
    return [name for name, owner in zip(names, owners, strict=True) if owner and not runs(owner[1])]


def main(arguments: list[str]) -> int:
    """Run the command line, and return the exit code."""
    # Signals that are ignored from the start, like SIGHUP under nohup, stay ignored. The others are
    # blocked until mpirun runs, so that none of them ends this script before the removal.
    forwarded = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    try:
        n_hosts, rate, latency, command = parse(arguments)
        check_machine(command[0])
        remove(leftovers())
        cluster = Cluster(n_hosts, rate, latency)
        try:
            cluster.build()
            return cluster.run(command, forwarded)
        finally:
            cluster.remove()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
