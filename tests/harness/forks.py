"""A server that forks Python programs from a process that has already imported torch.

Starting Python with torch takes seconds of a core, a fork milliseconds. Each program is `__main__`
of a process of its own, with its own session, working directory, arguments, environment and output,
and ends as any Python program does. Only its modules are not taken apart: freeing everything that
the server has imported takes ten times as long as the fork.

Under mpirun, every process that mpirun starts is a stand-in: it asks the server for a fork with its
own environment (and so its rank) and output, passes signals on, and ends with the same exit code.

    python tests/harness/forks.py serve SOCKET MODULE ...            until its stdin is closed
    python tests/harness/forks.py stand-in SOCKET SCRIPT [ARGUMENT ...]
    python tests/harness/forks.py bound PARENT COMMAND ...           gets SIGTERM when PARENT ends

Only the standard library is used, because stand-ins must start fast.
"""

import array
import atexit
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Fork:
    """A running fork; `output` holds the file descriptors of its stdout and stderr."""

    def __init__(
        self,
        server: str,
        command: list[str],
        cwd: str,
        environment: dict[str, str],
        output: tuple[int, int],
    ):
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server)
        request = {"command": command, "cwd": cwd, "environment": environment}
        content = json.dumps(request).encode() + b"\n"
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", output))]
        sent = self._connection.sendmsg([content], files)
        self._connection.sendall(content[sent:])
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the signal that ended it. Raises TimeoutError."""
        self._connection.settimeout(timeout)
        return os.waitstatus_to_exitcode(int(self._answers.readline()))

    def close(self) -> None:
        """The server then ends the fork, if it still runs."""
        self._answers.close()
        self._connection.close()


def stand_in(server: str, *command: str) -> int:
    """Run a fork in place of this process, which ends if mpirun or torchrun is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fork = Fork(server, list(command), os.getcwd(), dict(os.environ), (1, 2))

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(fork.pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = fork.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def bound(parent: str, *command: str) -> int:
    """Become a command that gets SIGTERM when the process that has started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it has ended already
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the fork; None once stdin is closed."""
    waiting: dict[int, socket.socket] = {}  # pid of a fork → connection of its client
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    for pid in waiting:
                        _end(pid)
                    return None
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    request = _receive(connection)
                    if request is None:
                        connection.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        connection.close()
                        return request
                    for file in request["output"]:
                        os.close(file)
                    _answer(connection, pid)
                    waiting[pid] = connection
                    ends = os.pidfd_open(pid)
                    events.register(connection, selectors.EVENT_READ, pid)
                    events.register(ends, selectors.EVENT_READ, (pid, connection))
                elif isinstance(key.data, int):  # the client has gone, and the fork goes too
                    if waiting.pop(key.data, None) is None:
                        continue  # both ended at the same time
                    events.unregister(key.fileobj)
                    _end(key.data)
                else:
                    pid, connection = key.data
                    _, status = os.waitpid(pid, 0)
                    events.unregister(key.fileobj)
                    os.close(key.fd)
                    if waiting.pop(pid, None) is not None:
                        events.unregister(connection)
                        _answer(connection, status)
                    connection.close()


def _end(pid: int) -> None:
    """Kill a fork."""
    with suppress(ProcessLookupError):  # its session has not begun, or has ended
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client may have been killed
        connection.sendall(f"{number}\n".encode())


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The request of a client. None if the client was killed before it was complete."""
    files = array.array("i")
    content, sent, *_ = connection.recvmsg(65536, socket.CMSG_SPACE(2 * files.itemsize))
    for _, _, data in sent:
        files.frombytes(data)
    while not content.endswith(b"\n"):
        more = connection.recv(65536) if content else b""
        if not more:
            for file in files:
                os.close(file)
            return None
        content += more
    return json.loads(content) | {"output": list(files)}


def become(request: dict[str, Any]) -> types.CodeType:
    """Make this process that of the request. Returns the code of its script."""
    os.setsid()
    for target, file in enumerate(request["output"], start=1):
        os.dup2(file, target)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 these stay open
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    script, *_ = sys.argv = request["command"]
    folders = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(script).resolve().parent), *filter(None, folders)]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    return compile(Path(script).read_bytes(), script, "exec")


def run(code: types.CodeType) -> int:
    """Run a script, with its threads and all that it has registered for its end. Returns its exit
    code, or minus the signal that ends it."""
    status: Any = None
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = 120
    return int(status or 0)


def main() -> types.CodeType | None:
    role, place, *rest = sys.argv[1:]
    if role == "bound":
        sys.exit(bound(place, *rest))
    if role == "stand-in":
        sys.exit(stand_in(place, *rest))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(64)  # clients may wait already
        print("ready", flush=True)
        for module in rest:
            with suppress(ModuleNotFoundError):  # a package that only other programs need
                __import__(module)
        for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            sys.path.remove(folder)  # each fork has folders of its own
        gc.freeze()
        request = serve(listener)
    return None if request is None else become(request)


if __name__ == "__main__":
    code = main()
    if code is not None:
        ended = run(code)
        if ended == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(ended & 0xFF)
