"""How a run ends other than well, or does not begin.

In a module of its own, which is imported in no time.
"""


class BadInput(ValueError):
    """What the user asked for cannot be done; the text is one sentence that says what would do."""


class Stopped(RuntimeError):
    """The run cannot go on, for a reason that the text says in one sentence."""

    exit_code = 1


class Interrupted(Stopped):
    """The run was asked to stop, and all processes know: by a signal of this number."""

    def __init__(self, text: str, signal: int):
        super().__init__(text)
        self.signal = signal
