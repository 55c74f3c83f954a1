"""Programs that read options, print, and end: bad input is one sentence with exit code 2."""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence

from powergossip.errors import BadInput


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """A parser whose help has this text: one line, and what follows the options."""
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


def run(main: Callable[[Sequence[str]], None], prints: bool = True) -> None:
    """Call main with the command line. prints: whether this process reports bad input."""
    try:
        main(sys.argv[1:])
    except BadInput as error:
        if prints:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # else the end of Python visits all objects of torch
