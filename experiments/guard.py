"""Stands between a launcher and its command. The standard library only: it starts in 30 ms.

    python guard.py bound SIGNAL PARENT COMMAND …    COMMAND gets the signal of this number when the
                                                     process PARENT, which has started this, is gone
    python guard.py locked FILE COMMAND …            while COMMAND runs, FILE has a shared lock
    python guard.py reported FILE COMMAND …          in a job of Slurm: COMMAND's exit code will
                                                     stand in FILE.exit

They exit with COMMAND's exit code, 128 + the signal's number if a signal has ended it.
"""

import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bound(number: int, parent: int, command: list[str]) -> int:
    """PARENT counts as gone when the thread that has started this is.

    As the threads of PARENT end one by one, the kernel tells it several times: to this process,
    which hands it on once, since a second signal ends train.py without a checkpoint; so PARENT can
    also send it. It hands on SIGTERM, too. SIGINT it leaves to COMMAND, which a terminal tells as
    well. When this process is killed, COMMAND gets the signal.

    preexec_fn in PARENT would do without this process; but it runs Python in a fork of a program
    with threads, which now and then hangs for ever.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    waited_for = {signal.Signals(number), signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it gets no exit codes
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    prctl(PR_SET_PDEATHSIG, number)
    guard = os.getpid()
    if os.getppid() != parent:  # it was gone before
        return 128 + number
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != guard:
            os._exit(128 + number)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        become(command)
    left = {number, int(signal.SIGTERM)}  # to be handed on
    while True:
        arrived = signal.sigwait(waited_for)
        if arrived == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif arrived in left:
            left.remove(arrived)
            os.kill(child, arrived)


def locked(file: str, command: list[str]) -> None:
    """Exits with 1 if somebody else has FILE for himself."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: {file} is locked by another start of this run")
    os.set_inheritable(descriptor, True)
    become(command)


def become(command: list[str]) -> None:
    """Turn into it: the process number stays."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def reported(file: str, command: list[str]) -> int:
    """COMMAND's exit code, which is written at the end, in one piece.

    FILE is what was submitted. If it is gone the job was given up before it started, and another
    one may do its work. Slurm tells all processes of a job when it shall end (SIGTERM), so that is
    not handed on; but a warning before a time limit, as of --signal=B:USR1@60, arrives only here.
    """
    import json
    import shlex
    import subprocess
    from pathlib import Path

    exit_file = Path(f"{file}.exit")
    if not Path(file).exists():
        print("error: this job was given up before it started", file=sys.stderr)
        return 1
    exit_file.unlink(missing_ok=True)  # of the time before Slurm put it back into the queue
    print(f"$ {shlex.join(command)}", flush=True)
    child: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        if child:
            child[0].send_signal(number)

    signal.signal(signal.SIGTERM, lambda *_: None)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, hand_on)
    try:
        child.append(subprocess.Popen(command))
        code = child[0].wait()
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        code = 127
    code = code if code >= 0 else 128 - code
    content = {"job": os.environ.get("SLURM_JOB_ID", ""), "exit_code": code}
    new = Path(f"{file}.new")
    with new.open("w") as stream:
        stream.write(json.dumps(content) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(exit_file)
    return code


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "bound":
        sys.exit(bound(int(rest[0]), int(rest[1]), rest[2:]))
    elif how == "locked":
        locked(rest[0], rest[1:])
    else:
        assert how == "reported"
        sys.exit(reported(rest[0], rest[1:]))
