"""The end of processes: reports of errors, and exit codes."""

import os
import re
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

from powergossip import launcher, ulfm
from powergossip.errors import BadInput, PeerLost, Signaled, Stopped, Unconnected


class Group(Protocol):
    """The connected processes: a part of network.Processes."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool: ...

    def finalize(self) -> None: ...

    def end(self, code: int) -> NoReturn: ...


_connected: Group | None = None  # the processes of this run


def connect(found: Group) -> None:
    """Record the processes of this run."""
    global _connected
    _connected = found


def is_first() -> bool:
    """True in the first process of the run, also before its processes are connected."""
    return launcher.is_first() if _connected is None else _connected.is_first


def speaks_of(error: Exception) -> bool:
    """True if this process reports an error that all processes have, or all on its host."""
    own = os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    return is_first() or (isinstance(error, Unconnected) and own == "0")


def are_several() -> bool:
    """True if this process is connected with others."""
    return _connected is not None and _connected.size > 1


def exit_code(code: int, first: bool) -> int:
    """The exit code of a process that ends for a reason which all processes have.

    Args:
        first: True in the first process. With ULFM, the others end with 0. mpirun (PRRTE 3.0)
            counts a process with another code twice, and may hang after two of them: on a machine
            with other work, one of ten runs did.
    """
    return 0 if ulfm.enabled() and not first else code


def code_of(error: BaseException) -> int:
    """The exit code of an error: 2 for BadInput, the error's own for Stopped, 1 for others."""
    return 2 if isinstance(error, BadInput) else int(getattr(error, "exit_code", 1))


def end_with_sentences() -> None:
    """Report errors of the user that nobody catches in one sentence, also in a driver script."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, BadInput | Stopped):
            return sys.__excepthook__(kind, error, trace)
        report(error)
        sys.exit(code_of(error))

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook


def end_together(found: Group) -> None:
    """End all processes on an uncaught exception: the others would wait for messages forever."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, BadInput) or (isinstance(error, Stopped) and error.in_all_processes):
            if found.is_first:
                report(error)
            found.finalize()
            # When the first process ends, the launcher may kill the others, and mpirun discards
            # unread output.
            time.sleep(0.2 if found.rank == 0 else 0.3)
            os._exit(exit_code(code_of(error), found.rank == 0))
        if ulfm.is_loss(error):
            error = PeerLost("a process has ended before the first step")
        # If several processes fail at once for the same reason, the first one reports it and ends
        # the others, which takes a while where processes share cores. The loss of a process is not
        # the reason: the lost one reports that.
        late = 1.0 if isinstance(error, PeerLost) else 0.0
        time.sleep(late + (0.0 if found.rank == 0 else min(0.5 + 0.1 * found.rank, 3.0)))
        if isinstance(error, Stopped):
            report(error)
        elif isinstance(error, KeyboardInterrupt):
            print("error: interrupted", file=sys.stderr, flush=True)
        else:
            text = f"\nprocess {found.rank} of {found.size} on {socket.gethostname()} failed:\n"
            text += "".join(traceback.format_exception(kind, error, trace))
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.2)  # as above
        if isinstance(error, Signaled):
            os._exit(error.exit_code)  # mpirun ends the others. Abort would print its own message
        code = error.exit_code if isinstance(error, Stopped) else 1
        found.end(130 if isinstance(error, KeyboardInterrupt) else code)

    sys.excepthook = hook


def end_alone(
    process: int,
    group: Group,
    end_others: Callable[[], None],
    others_live: Callable[[], bool],
) -> None:
    """End only this process on an uncaught exception: the others lose it and go on.

    MPI is not finalized, because Open MPI may wait for a lost process there. mpirun ends with the
    code of the first process that ends with another code than 0. mpirun counts such a process
    twice, and ends the others once it has counted as many as there were. While others live, a
    process therefore ends by SIGKILL, which mpirun counts once with ULFM. An exception that is in
    all processes is reported by the first of them.

    Args:
        process: Index of this process.
        group: The surviving processes.
        end_others: Function that ends the processes of this host that are no part of the run.
        others_live: Function that returns whether other processes go on.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        everywhere = isinstance(error, BadInput) or (
            isinstance(error, Stopped) and error.in_all_processes
        )
        if everywhere and not group.is_first:
            time.sleep(1.0)  # mpirun may discard what the first process is about to report
        elif isinstance(error, Stopped | BadInput):
            report(error)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            print(f"\nprocess {process} failed:\n{text}", file=sys.stderr, flush=True)
        if not (everywhere or isinstance(error, Signaled)) and others_live():
            group.finalize()
            _flush()
            if ulfm.enabled():
                os.kill(os.getpid(), signal.SIGKILL)
        code = code_of(error)
        if everywhere:
            end_others()
            time.sleep(0.5)
            code = exit_code(code, group.rank == 0)
        exit_at_once(code)

    global _alone
    _alone = True
    sys.excepthook = hook


_alone = False


def are_up_to_the_hook(error: BadInput | Stopped) -> bool:
    """True if an error must reach `sys.excepthook`, which then ends the processes."""
    return _alone or (are_several() and isinstance(error, Stopped) and not error.in_all_processes)


@contextmanager
def exit_is_an_error() -> Iterator[None]:
    """Turn a call of sys.exit in one of several processes into an error.

    Python would not call `sys.excepthook`, and MPI would wait for the others in MPI_Finalize.
    """
    try:
        yield
    except SystemExit as error:
        if _connected is None or not are_several():
            raise
        text = f"process {_connected.rank} has called sys.exit({error.code}) before the end"
        raise Stopped(text) from error


def exit_at_once(code: int) -> NoReturn:
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


_YAML = {"None": "null", "True": "true", "False": "false"}


def report(error: Exception) -> None:
    """Print the text of an error to the standard error, with the values null, true and false.

    After SIGTERM, print it to mpirun's standard error: Open MPI's mpirun sends SIGTERM to processes
    that it is about to kill and discards their output. If it writes to a file, its next output
    could take the place of the text, which is therefore printed in the usual way as well.
    """
    text = re.sub(r"(?<=[= ])(None|True|False)\b", lambda word: _YAML[word[0]], str(error))
    if isinstance(error, Signaled) and error.signal == signal.SIGTERM:
        try:
            parent = Path("/proc") / str(os.getppid())
            if (parent / "comm").read_text().strip() in ("mpirun", "mpiexec", "prterun"):
                with (parent / "fd" / "2").open("a") as stderr:
                    print(f"error: {text}", file=stderr, flush=True)
                    in_file = stat.S_ISREG(os.fstat(stderr.fileno()).st_mode)
                if not in_file:
                    return
        except OSError:  # not Linux, or a socket
            pass
    print(f"error: {text}", file=sys.stderr, flush=True)
