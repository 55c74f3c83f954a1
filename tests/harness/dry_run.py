"""A program with the arguments of several commands, each up to where it has read them.

    python tests/harness/dry_run.py KIND PROGRAM ARGUMENTS          KIND: script, module or function

ARGUMENTS is a JSON list of lists. The program starts as from a shell: its imports find what is
installed, and what is in the folder of a script, or for a module in the working directory. It ends
after it has read its command line, or else at its first optimizer or process group, or at the first
program that it starts. Arguments that are rejected are printed after the error; the exit code is
then 1.
"""

import argparse
import importlib
import json
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from powergossip import command_line
from powergossip.runs import configuration


class Reached(BaseException):
    """The program is at the end of its dry run."""


def end(*_: Any, **__: Any) -> NoReturn:
    """In place of a function with which the work of a program begins."""
    raise Reached


def ending(read: Callable[..., object]) -> Callable[..., NoReturn]:
    """A reader of the command line, after which the program ends."""

    def wrapper(*arguments: Any, **keywords: Any) -> NoReturn:
        read(*arguments, **keywords)
        raise Reached

    return wrapper


def start(kind: str, program: str) -> None:
    """Be that program. The first entry of the search path is that of a Python from a shell."""
    if kind == "script":
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    elif kind == "module":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        module, function = program.split(":")
        getattr(importlib.import_module(module), function)()


def is_right(kind: str, program: str, arguments: list[str]) -> bool:
    """Whether the program accepts the arguments. Prints its error."""
    sys.argv = [program, *arguments]
    try:
        start(kind, program)
    except Reached:
        return True
    except SystemExit as ended:
        return not ended.code
    except Exception:
        traceback.print_exc()
        return False
    return True


def main(kind: str, program: str, commands: list[list[str]]) -> bool:
    """Whether the program accepts the arguments of all commands."""
    read = configuration.read_command_line
    configuration.read_command_line = ending(
        lambda config, *rest: read(config.copy(), *rest)  # which the next command reads, too
    )
    argparse.ArgumentParser.parse_args = ending(  # type: ignore[method-assign]
        argparse.ArgumentParser.parse_args
    )
    command_line.parsed = ending(command_line.parsed)
    torch.optim.Optimizer.__init__ = end  # type: ignore[method-assign]
    subprocess.Popen.__init__ = end  # type: ignore[method-assign]
    torch.distributed.init_process_group = end
    failed = [given for given in commands if not is_right(kind, program, given)]
    for given in failed:
        print(f"rejected: {program} {' '.join(given)}", file=sys.stderr)
    return not failed


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
