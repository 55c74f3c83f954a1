"""One machine as a cluster with links of a limited rate (Linux, as root):

    python environment/emulated_cluster.py --hosts 4 --rate 100mbit -- python train.py seed=2

runs `mpirun -np 4 python train.py seed=2` with each process on a host of its own, and removes the
hosts afterwards. All are linked to one switch. --rate is what a link carries, each way, in bits per
second as tc writes them (10mbit, 1gbit; k is 1000), or none: no limit. Signals are handed on to
mpirun. The exit code is mpirun's, or 2 if nothing could be run.

What is emulated: the rate, by a token bucket at both ends of every link, one for each way. Messages
travel by TCP in frames of 1500 bytes, whose headers count: 95.6 % of the rate is content at most.
Who receives from several hosts, or sends to several, has one link for them all. TCP controls
congestion by Linux' own default, cubic (where the kernel has it), whatever this machine's default.

What is not emulated, and what to make of it:

- Processors. All hosts compute with the cores of this machine, and so do TCP and this emulation.
  More hosts than cores take turns: a step computes for longer than in a cluster. What the links
  cost is the difference from the same command with `--rate none`, which also tells up to which rate
  this machine keeps up at all. OMP_NUM_THREADS=1 gives a process no more than its share.
- Latency. It is the local kernel's, tens of microseconds when idle. What is saved by sending fewer
  bytes shows; what is saved by sending fewer messages does not.
- The first bytes after silence. A link is then ahead by up to half a millisecond, or two frames if
  those take longer: at 1gbit 62.5 kB pass at once, below 50mbit 3 kB.
- Separate machines. Hosts share memory, disks, GPUs and the host's name, and MPI is aware of it
  (MPI_COMM_TYPE_SHARED is everyone), but messages do not take the way through memory.
- The outside. A host reaches the other hosts only: download data before.

Open MPI shows as it is over TCP: when two processes send each other long messages at the same time,
it often sends one after the other, at half the rate each. OMPI_MCA_btl_tcp_flags=send avoids most
of that.

A host is a network namespace, emulated-cluster-PID-RANK with the PID of this script; look into one
with `ip netns exec emulated-cluster-PID-RANK ip -s link`. The switch is a bridge in a namespace of
its own, where mpirun runs too: the machine's addresses, routes and firewall are not involved, and
clusters that run at the same time do not meet. If this script itself is killed (SIGKILL), mpirun
ends too, and the next start removes the namespaces.
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

USAGE = "python environment/emulated_cluster.py --hosts N --rate RATE -- COMMAND …"

NAMESPACES = Path("/run/netns")  # where ip keeps them
FAMILY = "emulated-cluster"  # what their names begin with

MAX_HOSTS = 250
SUBNET = "10.0.0.0/24"  # of every cluster: they do not meet
SWITCH_ADDRESS = "10.0.0.254/24"

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"  # TCP's, in a namespace

FRAME = 1514  # bytes: 1500 and an Ethernet header
# A timer may be late by this without loss. A larger bucket lets more pass at once after silence.
BUCKET = 0.0005  # seconds at the full rate
# TCP has to wait 200 ms for some losses, so there shall be few of them even when all send to one.
QUEUE = 0.2  # seconds at the full rate

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
PATIENCE = 2.0  # seconds that a process has to end after a signal
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Refused(ValueError):
    """What was asked for cannot be done; the text is one sentence."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; use: {USAGE}")


def parse(arguments: list[str]) -> tuple[int, int | None, list[str]]:
    """Hosts, bits per second (None: no limit), command. Raises Refused."""
    parser = Parser(
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", required=True, metavar="N", help=f"1 to {MAX_HOSTS}")
    parser.add_argument("--rate", required=True, help="what a link carries, or none")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if not re.fullmatch("[0-9]{1,9}", options.hosts) or not 1 <= int(options.hosts) <= MAX_HOSTS:
        raise Refused(f"--hosts {options.hosts}: use a whole number from 1 to {MAX_HOSTS}")
    rate = bits_per_second(options.rate)
    if not command:
        raise Refused("there is nothing to run; end with -- and a command, like -- python train.py")
    return int(options.hosts), rate, command


def bits_per_second(text: str) -> int | None:
    """Of a rate in tc's notation; None for "none". Raises Refused.

    That includes what is easily mistaken: tc's mbps, megabytes per second, and bare numbers.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", text.lower())
    rate = round(float(found[1]) * RATES[found[2]]) if found else 0
    if not SLOWEST <= rate <= FASTEST:
        raise Refused(f"--rate {text}: use none, or 1kbit to 100gbit, like 10mbit or 1.5gbit")
    return rate


def check_machine(program: str) -> None:
    """Raises Refused if something is missing."""
    if os.geteuid() != 0:
        raise Refused("only root can make network namespaces; run this as root")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise Refused(
                f"there is no {tool} on PATH; install it (Debian, Ubuntu: apt-get install iproute2)"
            )
    if not shutil.which("mpirun"):
        raise Refused("there is no mpirun on PATH; activate the environment that setup.sh made")
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False
    ).stdout.partition("\n")[0]
    found = re.match(r"mpirun \(Open MPI\) (\d+)", version)
    if not found or int(found[1]) < 5:
        raise Refused(
            f'this needs the mpirun of Open MPI 5 or newer; the one here says "{version}"'
        )
    if not shutil.which(program):
        raise Refused(f'there is no program "{program}"')


class Cluster:
    """Hosts 0, 1, … and a switch. remove() removes what build() has made until then."""

    def __init__(self, n_hosts: int, rate: int | None) -> None:  # rate: bits per second
        self.rate = rate
        self.name = f"{FAMILY}-{os.getpid()}"
        self.hosts = [f"{self.name}-{rank}" for rank in range(n_hosts)]
        self.switch = f"{self.name}-switch"

    def build(self) -> None:
        """Raises Refused where the kernel does not allow that or lacks what it takes."""
        batch("ip", [f"netns add {name}" for name in (self.switch, *self.hosts)])
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
        for rank, host in enumerate(self.hosts):
            address = f"address add 10.0.0.{rank + 1}/24 dev eth0"
            batch("ip", ["link set lo up", address, "link set eth0 up"], host)
            # With bbr, connections that share a link leave a fifth of it unused.
            command = ["ip", "netns", "exec", host, "sh", "-c", f"echo cubic >{CONGESTION_CONTROL}"]
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
        if self.rate is not None:
            self.limit(self.rate)

    def limit(self, rate: int) -> None:
        """Let every link carry so many bits per second, each way."""
        bucket = max(2 * FRAME, round(rate / 8 * BUCKET))  # bytes
        queue = max(100 * FRAME, round(rate / 8 * QUEUE))  # bytes
        # TCP hands on up to 64 KiB as one; the bucket takes apart what does not fit, at 1gbit for
        # much of a core.
        segment = min(2**16, bucket // 2)  # bytes

        def qdisc(link: str) -> str:
            return f"qdisc add dev {link} root tbf rate {rate}bit burst {bucket} limit {queue}"

        for host in self.hosts:
            batch("ip", [f"link set eth0 gso_max_size {segment}"], host)
            batch("tc", [qdisc("eth0")], host)
        batch("tc", [qdisc(f"port{rank}") for rank in range(len(self.hosts))], self.switch)

    def run(self, command: list[str], forwarded: set[signal.Signals]) -> int:
        """mpirun's exit code, or 128 + the number of the signal that ended it. The signals to hand
        on, and SIGCHLD, are blocked in the caller."""
        enter_host = f'exec ip netns exec "{self.name}-$OMPI_COMM_WORLD_RANK" "$@"'
        mpirun = [
            *("mpirun", "-np", str(len(self.hosts)), "--map-by", ":oversubscribe"),
            *("--bind-to", "none"),
            # processes reach mpirun through the switch
            *("--pmixmca", "ptl_base_if_include", SUBNET),
            *("--pmixmca", "ptl_base_remote_connections", "1"),
            # and each other by TCP, where MPI would choose the memory they share
            *("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "osc", "^sm"),
            *("--mca", "btl_tcp_if_include", SUBNET),
            *("sh", "-c", enter_host, "sh", *command),
        ]
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *mpirun],
            env=os.environ | as_root,
            start_new_session=True,  # a terminal's Ctrl-C would arrive twice
            preexec_fn=prepare_mpirun,
        )
        while (code := process.poll()) is None:
            number = signal.sigwait({*forwarded, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                process.send_signal(number)
        return code if code >= 0 else 128 - code

    def remove(self) -> None:
        remove([self.switch, *self.hosts])


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Let ip or tc carry out the lines. Raises Refused with its complaint."""
    where = [] if namespace is None else ["-netns", namespace]
    done = subprocess.run(
        [tool, *where, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        complaint = done.stderr.partition("\n")[0]
        raise Refused(
            f'no cluster can be emulated here, {tool} says "{complaint}"; '
            "it takes all of root's rights, and veth, bridge and sch_tbf in the kernel"
        )


def prepare_mpirun() -> None:
    """In the new process: signals arrive again, one of them when this script has been killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove(names: Collection[str]) -> None:
    """Namespaces with their links and with the processes that still run in them."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun has files to remove
        asked: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while (left := processes_in(names)) and time.monotonic() < deadline:
            for process in left - asked:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            asked |= left
            time.sleep(0.01)
    # -force: another start may remove the same, and be faster
    lines = [f"netns delete {name}" for name in names if (NAMESPACES / name).exists()]
    subprocess.run(
        ["ip", "-force", "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )


def processes_in(names: Iterable[str]) -> set[int]:
    """The processes whose network namespace has one of the names."""

    def identity(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:  # it has ended
            return None
        return status.st_dev, status.st_ino

    inside = {identity(NAMESPACES / name) for name in names} - {None}
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {int(path.name) for path in processes if identity(path / "ns" / "net") in inside}


def leftovers() -> list[str]:
    """Namespaces whose script runs no more; with our PID, an earlier script's."""

    def runs(process: str) -> bool:
        # a zombie, which in a container without an init may stay one, is in no namespace
        return int(process) != os.getpid() and Path("/proc", process, "ns", "net").exists()

    names = [path.name for path in NAMESPACES.glob(f"{FAMILY}-*")]
    owners = [re.match(f"{FAMILY}-([0-9]+)-", name) for name in names]
    return [name for name, owner in zip(names, owners, strict=True) if owner and not runs(owner[1])]


def main(arguments: list[str]) -> int:
    """The exit code."""
    # What is ignored from the start, like SIGHUP under nohup, stays so. The others wait until there
    # is an mpirun to hand them on to, so that none of them ends this script before the removal.
    forwarded = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    try:
        n_hosts, rate, command = parse(arguments)
        check_machine(command[0])
        remove(leftovers())
        cluster = Cluster(n_hosts, rate)
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
