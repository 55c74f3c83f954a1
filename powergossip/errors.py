"""Exceptions that end a run. Imports nothing heavy."""


class BadInput(ValueError):
    """Invalid input of the user. The text is one sentence with the accepted values."""


class Stopped(RuntimeError):
    """The run cannot continue. The text is one sentence with the reason."""

    exit_code = 1


class Interrupted(Stopped):
    """The run was stopped by this signal, after all processes agreed on it."""

    def __init__(self, text: str, signal: int):
        super().__init__(text)
        self.signal = signal
