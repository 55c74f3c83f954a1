"""A guard process between a launcher and its command::

    python guard.py bound SIGNAL PARENT COMMAND …    send SIGNAL (a number) to COMMAND when its
                                                     parent process PARENT has ended
    python guard.py locked FILE COMMAND …            hold a shared lock on FILE while COMMAND runs

The exit code is COMMAND's, or 128 + the signal's number if a signal ended it. Only the standard
library is imported, so that a guard starts in 30 ms.
"""

import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bound(number: int, parent: int, command: list[str]) -> int:
    """Run a command that gets a signal when the thread of PARENT that started the guard has ended.

    The kernel may send the signal several times, as the threads of PARENT end one by one. The guard
    forwards it once, since a second signal ends train.py without a checkpoint. PARENT may also send
    it. SIGTERM is forwarded too. SIGINT is not, since a terminal sends it to COMMAND as well. If
    the guard is killed, COMMAND gets the signal.

    preexec_fn in PARENT would need no guard, but it runs Python in a fork of a program with
    threads, which occasionally deadlocks.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    waited_for = {signal.Signals(number), signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, there are no exit codes
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    prctl(PR_SET_PDEATHSIG, number)
    guard = os.getpid()
    if os.getppid() != parent:  # it has ended already
        return 128 + number
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != guard:
            os._exit(128 + number)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        become(command)
    left = {number, int(signal.SIGTERM)}  # to be forwarded
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
    """Run a command with a lock on FILE. Exit with 1 if another process has an exclusive lock."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: {file} is locked by another start of this run")
    os.set_inheritable(descriptor, True)
    become(command)


def become(command: list[str]) -> None:
    """Replace this process by the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "bound":
        sys.exit(bound(int(rest[0]), int(rest[1]), rest[2:]))
    assert how == "locked"
    locked(rest[0], rest[1:])
