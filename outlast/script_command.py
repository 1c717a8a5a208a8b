"""From a command line to what a rank starts.

`python train.py` and `python -m package.train` can be run in a fork of a standby process of their
interpreter, with their imports done. All else is executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Programs that stand for "the interpreter of this job".
_INTERPRETER = re.compile(r"python(3(\.\d+)?)?")
# As torchrun has it: what is printed is in the log at once.
_UNBUFFERED = "-u"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a command starts; fields as in `ScriptContract`."""

    command: tuple[str, ...]
    python: tuple[str, ...] = ()
    note: str = ""
    is_foreign: bool = False
    """The command is an interpreter of Python other than ours."""


def start_of(command: Sequence[str], *, executable: str, python: str = "") -> Start:
    """How a command starts where `executable` is our own interpreter.

    A bare `python` is the interpreter of the job: `python`, or ours where that is "".
    """
    program, *arguments = command
    interpreter = program
    if _INTERPRETER.fullmatch(program):
        interpreter = python or executable
    if not is_python(interpreter):
        return Start(command=tuple(command))
    options, target = split_arguments(arguments)
    is_foreign = not _is_same(interpreter, executable)
    if not target:
        return Start(command=(interpreter, *arguments), is_foreign=is_foreign)
    executed = (interpreter, _UNBUFFERED, *arguments)
    if options:
        note = f"the interpreter has the option {options[0]}"
        return Start(command=executed, note=note, is_foreign=is_foreign)
    return Start(command=executed, python=target, is_foreign=is_foreign)


def is_python(program: str) -> bool:
    """Whether a program is an interpreter of Python, by its name."""
    return _INTERPRETER.fullmatch(os.path.basename(program)) is not None


def _is_same(program: str, executable: str) -> bool:
    """Whether both are the interpreter of one environment.

    Links are not followed: those of two environments lead to the same file.
    """
    places = (os.path.abspath(program), os.path.abspath(executable))
    folders = {os.path.dirname(place) for place in places}
    return len(folders) == 1 and os.path.realpath(places[0]) == os.path.realpath(places[1])


def split_arguments(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of the interpreter, and the script, or "-m" and a module, with its arguments.

    No target where it is no file: a line of code, standard input, or an option with a value of
    its own that is not known here.
    """
    options: list[str] = []
    for index, argument in enumerate(arguments):
        match argument:
            case "-u":
                continue
            case "-m":
                return tuple(options), tuple(arguments[index:])
            case "-" | "-c" | "-W" | "-X" | "--check-hash-based-pycs":
                return tuple(options), ()
            case _ if argument.startswith("-"):
                options.append(argument)
            case _:
                return tuple(options), tuple(arguments[index:])
    return tuple(options), ()
