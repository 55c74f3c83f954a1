"""A Slurm cluster for tests: real daemons on this machine, with files and ports of their own.

It takes root, and Slurm with MUNGE (Debian, Ubuntu: apt-get install slurm-wlm munge). Nothing that
may run on the machine already is touched: not the Slurm that is configured in /etc, nor its MUNGE.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

GUARD = Path(__file__).parents[2] / "powergossip" / "runner" / "guard.py"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PATIENCE = 60.0  # seconds; the machine may be busy

# No plugin here needs more than processes: containers have no cgroups to write to. What is over is
# forgotten soon, as it is on a cluster after some minutes.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MinJobAge={min_job_age}
KillWait=5
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """No cluster can be had here; the text says why."""


class Cluster:
    """Slurm's files and daemons. Commands find it by `environment`."""

    def __init__(self, folder: Path, cores: Sequence[int], min_job_age: int):
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        controller_port, *ports = _free_ports(1 + len(cores))
        # Only a Slurm that was built for it can have several nodes on a machine.
        self._nodes = [host] if len(cores) == 1 else [f"node{i}" for i in range(len(cores))]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={number}"
            for name, port, number in zip(self._nodes, ports, cores, strict=True)
        ]
        text = CONFIGURATION.format(
            host=host,
            folder=folder,
            controller_port=controller_port,
            min_job_age=min_job_age,
            nodes="\n".join(lines),
        )
        (folder / "slurm.conf").write_text(text)

    def command(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, and what it said."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def jobs(self) -> list[str]:
        """The numbers of those that are queued or run."""
        return self.command("squeue", "--noheader", "--format=%A").stdout.split()

    def start(self) -> None:
        """Raises Unavailable."""
        file = {
            name: str(self._folder / f"munge.{name}")
            for name in ("socket", "key", "pid", "log", "seed")
        }
        options = [f"--{name}-file={file[name]}" for name in ("key", "pid", "log", "seed")]
        # --force: a folder of root's counts as insecure
        command = ["munged", "--foreground", "--force", f"--socket={file['socket']}", *options]
        self._start("munged", command)
        self._wait_for("munged", lambda: os.path.exists(file["socket"]))
        self.start_controller()
        for node in self._nodes:
            named = ["-N", node] if len(self._nodes) > 1 else []
            self._start(node, ["slurmd", "-D", *named])
        for node in self._nodes:
            self._wait_for(node, lambda: self._states() == ["idle"] * len(self._nodes))

    def start_controller(self) -> None:
        self._start("slurmctld", ["slurmctld", "-D"])
        self._wait_for("slurmctld", lambda: self.command("scontrol", "ping").returncode == 0)

    def stop_controller(self) -> None:
        self._stop("slurmctld")

    def close(self) -> None:
        """End what is queued or runs, then the daemons."""
        if "slurmctld" in self._daemons:
            self.command("scancel", "--user=root")
            self.command("scancel", "--user=root", "--signal=KILL", "--full")
            end = time.monotonic() + PATIENCE
            while self.jobs() and time.monotonic() < end:
                time.sleep(0.1)
        for name in reversed(list(self._daemons)):
            self._stop(name)

    def _states(self) -> list[str]:
        return self.command("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def _start(self, name: str, command: Sequence[str]) -> None:
        # If the tests are killed, the daemons end too.
        bound = [sys.executable, "-I", "-S", str(GUARD), "bound"]
        bound += [str(int(signal.SIGTERM)), str(os.getpid())]
        with self._output(name).open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*bound, *command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C is for the tests
            )

    def _wait_for(self, name: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if self._daemons[name].poll() is not None or time.monotonic() > end:
                said = self._output(name).read_text(errors="replace").splitlines()
                raise Unavailable(f"{name} does not start: {' / '.join(said[-3:])}")
            time.sleep(0.05)

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.out"

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@contextmanager
def running(cores: Sequence[int] = (8,), min_job_age: int = 2) -> Iterator[Cluster]:
    """A cluster. Raises Unavailable.

    cores        of each node, whatever the machine has
    min_job_age  seconds after which Slurm forgets what is over
    """
    if os.geteuid() != 0:
        raise Unavailable("only root can start Slurm's daemons")
    for tool in TOOLS:
        if not shutil.which(tool):
            raise Unavailable(f"there is no {tool} on PATH")
    # Sockets lie there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder), cores, min_job_age)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
