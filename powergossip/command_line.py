"""Programs that read options, print, and end: bad input is one sentence with exit code 2."""

import argparse
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from powergossip.errors import BadInput


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """A parser with this help text: one line before the options, and the rest after them."""
    title, _, rest = text.partition("\n\n")
    return argparse.ArgumentParser(
        prog=name,
        description=title,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=rest,
        exit_on_error=False,
        allow_abbrev=False,
    )


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options on a command line. Raises BadInput; exits after --help."""
    try:
        options, unknown = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from error
    if unknown:
        raise BadInput(f"{unknown[0]} is unknown; --help lists the options")
    return options


class _Unbroken(io.FileIO):
    """A standard stream that discards its output once nobody can take it: a closed pipe, a full
    disk, a terminal that is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def keep_streams() -> None:
    """Keep standard streams from ending the program, and print "?" for characters that their
    encoding lacks."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # not a test's or a notebook's
            stream.flush()
            kept = io.TextIOWrapper(
                io.BufferedWriter(_Unbroken(descriptor, "w", closefd=False)),
                encoding=stream.encoding,
                errors="replace" if stream.errors == "strict" else stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, kept)


def run(main: Callable[[Sequence[str]], None], prints: bool = True) -> None:
    """Call main with the command line. prints: whether this process reports bad input."""
    output = sys.stdout
    try:
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
        try:
            main(sys.argv[1:])
        finally:
            if output is not None:
                output.flush()
    except BadInput as error:
        if prints:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if not isinstance(error, BrokenPipeError):  # `| head`
            print(f"error: the standard output: {error.strerror}", file=sys.stderr)
            sys.exit(2)
    finally:
        gc.freeze()  # else the end of Python visits all objects of torch
