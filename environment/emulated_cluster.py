"""Emulation of a cluster with limited bandwidth on one machine (Linux, as root):

    python environment/emulated_cluster.py --hosts 4 --rate 100mbit -- python train.py seed=2

runs `mpirun -np 4 python train.py seed=2` with each process on its own emulated host. All hosts are
linked to one switch. --rate is the bandwidth of a link in each direction, in bits per second in the
notation of tc (10mbit, 1gbit, k is 1000), or none for no limit. The exit code is mpirun's, or 2 if
nothing could be run.

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
- Latency. It is the local kernel's, tens of microseconds if idle. Sending fewer bytes saves time
  here, but sending fewer messages does not.
- The first bytes after idle time. A link then sends up to half a millisecond of data at once, or
  two frames if those are more: 62.5 kB at 1gbit, 3 kB below 50mbit.
- Separate machines. Hosts share memory, disks, GPUs and the host name. MPI is aware of it
  (MPI_COMM_TYPE_SHARED has all processes), but does not send messages through shared memory.
- The internet. A host reaches only the other hosts. Download data beforehand.

Open MPI behaves as over any TCP network: of two long messages in opposite directions, it often
sends one after the other, at half the rate each. OMPI_MCA_btl_tcp_flags=send avoids most of this.

A host is a network namespace, and the switch is a bridge in a further one, where mpirun runs. Their
names are visible to mpirun and its processes only. The kernel removes the namespaces when these
have ended. The machine's addresses, routes and firewall are not involved, and concurrent clusters
do not interfere. To inspect host 0 of a running mpirun: `nsenter -t PID -m -n ip -n host0 -s link`.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from powergossip import command_line
from powergossip.errors import BadInput

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

RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bits per second
SLOWEST, FASTEST = 10**3, 10**11  # bits per second; in tc, bytes have 32 bits

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h


def parse(arguments: Sequence[str]) -> tuple[int, int | None, list[str]]:
    """Number of hosts, bits per second (None: no limit), command. Raises BadInput."""
    parser = command_line.parser("python environment/emulated_cluster.py", __doc__ or "")
    parser.add_argument("--hosts", default="", metavar="N", help=f"1 to {MAX_HOSTS}")
    parser.add_argument("--rate", default="", help="bandwidth of a link, or none for no limit")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = command_line.parsed(parser, arguments[:split]), arguments[split + 1 :]
    if not re.fullmatch("[0-9]{1,9}", options.hosts) or not 1 <= int(options.hosts) <= MAX_HOSTS:
        raise BadInput(f"--hosts {options.hosts}: use a whole number from 1 to {MAX_HOSTS}")
    rate = bits_per_second(options.rate)
    if not command:
        raise BadInput(
            "there is nothing to run; end with -- and a command, like -- python train.py"
        )
    return int(options.hosts), rate, [*command]


def bits_per_second(text: str) -> int | None:
    """Parse a rate in the notation of tc; None for "none". Raises BadInput.

    tc's mbps (megabytes per second) and numbers without a unit are rejected: both are easily
    mistaken.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?bit)", text.lower())
    rate = round(float(found[1]) * RATES[found[2]]) if found else 0
    if not SLOWEST <= rate <= FASTEST:
        raise BadInput(f"--rate {text}: use none, or 1kbit to 100gbit, like 10mbit or 1.5gbit")
    return rate


def check_machine(program: str) -> None:
    """Raise BadInput if a right or a program is missing."""
    if os.geteuid() != 0:
        raise BadInput("only root can emulate a cluster, with network namespaces; run this as root")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise BadInput(
                f"there is no {tool} on PATH; install it (Debian, Ubuntu: apt-get install iproute2)"
            )
    if not shutil.which("mpirun"):
        raise BadInput("there is no mpirun on PATH; activate the environment of setup.sh")
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False
    ).stdout.partition("\n")[0]
    found = re.match(r"mpirun \(Open MPI\) (\d+)", version)
    if not found or int(found[1]) < 5:
        raise BadInput(
            f'this needs the mpirun of Open MPI 5 or newer; the one here says "{version}"'
        )
    if not shutil.which(program):
        raise BadInput(f'there is no program "{program}"')


def build(n_hosts: int, rate: int | None) -> None:
    """Move this process to the switch of a new cluster with namespaces host0, host1, …

    Raises BadInput where the kernel does not support it.
    """
    if ctypes.CDLL(None).unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        raise BadInput("no cluster can be emulated here; this needs all rights of root")
    # Names of namespaces are files in /run/netns, which are this process's own.
    private = "mount --make-rprivate / && mkdir -p /run/netns && mount -t tmpfs none /run/netns"
    run(["sh", "-c", private])
    hosts = [f"host{rank}" for rank in range(n_hosts)]
    batch("ip", [f"netns add {host}" for host in hosts])
    lines = [
        "link set lo up",
        "link add switch type bridge",
        f"address add {SWITCH_ADDRESS} dev switch",
        "link set switch up",
    ]
    for rank, host in enumerate(hosts):
        lines += [
            f"link add port{rank} type veth peer name eth0 netns {host}",
            f"link set port{rank} master switch up",
        ]
    batch("ip", lines)
    for rank, host in enumerate(hosts):
        own = f"address add 10.0.0.{rank + 1}/24 dev eth0"
        batch("ip", ["link set lo up", own, "link set eth0 up"], host)
        # With bbr, connections that share a link would leave a fifth of it unused.
        command = ["ip", "netns", "exec", host, "sh", "-c", f"echo cubic >{CONGESTION_CONTROL}"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    if rate is not None:
        limit(hosts, rate)


def limit(hosts: list[str], rate: int) -> None:
    """Limit every link to `rate` bits per second in each direction."""
    bucket = max(2 * FRAME, round(rate / 8 * BUCKET))  # bytes
    queue = max(100 * FRAME, round(rate / 8 * QUEUE))  # bytes
    # TCP passes on segments of up to 64 KiB. The bucket would split larger ones than it holds,
    # which takes much of a core at 1gbit.
    segment = min(2**16, bucket // 2)  # bytes

    def qdisc(link: str) -> str:
        return f"qdisc add dev {link} root tbf rate {rate}bit burst {bucket} limit {queue}"

    for host in hosts:
        batch("ip", [f"link set eth0 gso_max_size {segment}"], host)
        batch("tc", [qdisc("eth0")], host)
    batch("tc", [qdisc(f"port{rank}") for rank in range(len(hosts))])


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run the lines with ip or tc. Raises BadInput with the first line of its error output."""
    where = [] if namespace is None else ["-netns", namespace]
    run([tool, *where, "-batch", "-"], "\n".join(lines))


def run(command: list[str], text: str = "") -> None:
    """Run a command with this input. Raises BadInput with the first line of its error output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = done.stderr.partition("\n")[0]
        raise BadInput(
            f'no cluster can be emulated here, {command[0]} says "{message}"; '
            "this needs all rights of root, and veth, bridge and sch_tbf in the kernel"
        )


def mpirun(n_hosts: int, command: list[str]) -> list[str]:
    """The command with a process on each host."""
    enter_host = 'exec ip netns exec "host$OMPI_COMM_WORLD_RANK" "$@"'
    return [
        *("mpirun", "-np", str(n_hosts), "--map-by", ":oversubscribe", "--bind-to", "none"),
        # Processes reach mpirun through the switch,
        *("--pmixmca", "ptl_base_if_include", SUBNET),
        *("--pmixmca", "ptl_base_remote_connections", "1"),
        # and each other by TCP. MPI's choice would be shared memory.
        *("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "osc", "^sm"),
        *("--mca", "btl_tcp_if_include", SUBNET),
        *("sh", "-c", enter_host, "sh", *command),
    ]


def main(arguments: Sequence[str]) -> None:
    """Replace this process by mpirun. Raises BadInput."""
    n_hosts, rate, command = parse(arguments)
    check_machine(command[0])
    build(n_hosts, rate)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    os.execvpe("mpirun", mpirun(n_hosts, command), os.environ | as_root)


if __name__ == "__main__":
    command_line.run(main)
