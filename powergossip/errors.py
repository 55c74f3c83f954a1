"""Exceptions that end a run. Imports nothing heavy."""


def reason(error: OSError) -> str:
    """The file and the reason of a failure, without its number."""
    return ": ".join(str(text) for text in (error.filename, error.strerror or error) if text)


class BadInput(ValueError):
    """Invalid input of the user. The text is one sentence with the accepted values."""


class Unconnected(BadInput):
    """This host cannot connect with others, which may know nothing of it."""


class Stopped(RuntimeError):
    """The run cannot continue. The text is one sentence with the reason."""

    exit_code = 1
    in_all_processes = False  # whether all of them raise it, so that one report suffices


class Diverged(Stopped):
    """A worker's loss, its parameters or a metric of its model have become infinite or NaN.

    All processes raise it, with the same text: the first such value, by step and then by worker.
    """

    in_all_processes = True


class CannotWrite(Stopped):
    """A file of the run cannot be written."""

    exit_code = 2


class PeerLost(Stopped):
    """Another process has ended, so that its messages will not arrive."""


class Dropped(Stopped):
    """The other processes regard this one as lost and go on without it."""

    exit_code = 75


class Signaled(Stopped):
    """This process has received a signal. The exit code is 128 + its number."""

    def __init__(self, text: str, signal: int):
        super().__init__(text)
        self.signal, self.exit_code = signal, 128 + signal


class Interrupted(Signaled):
    """The run was stopped by this signal, after all processes agreed on it."""

    in_all_processes = True
