"""What a dead process reported of its end in the file that it was given for that.

There are two forms: our own workers', and that of torch's `record`, by which a script is decorated
(`torch.distributed.elastic.multiprocessing.errors`). torch gives the bare name of the exception's
class, whole seconds as a string, and the traceback, in which the name stands in full.

What does not belong here: reading the file, and what a script that is not decorated has printed
(`last_words`).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.blackbox.records import MAX_COUNT
from outlast.worker_contract import ErrorField

# The line of a traceback that has the exception: its name, and the first line of its message.
EXCEPTION = re.compile(
    r"(?P<name>(?:[^\W\d]\w*|<locals>)(?:\.(?:[^\W\d]\w*|<locals>))*)(?:: (?P<message>.*))?"
)
# Before each line of a group of exceptions.
_OF_GROUP = re.compile(r"^\s*\| ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """The exception that ended a process, and when."""

    exception_type: str = ""
    """With its module, where that is known."""
    message: str = ""
    traceback: str = ""
    at_s: float | None = None
    """Node time; None where it is not known."""
    wall_s: float | None = None
    """Whole seconds of the wall clock, rounded down; None where they are not known."""


def read_report(document: Mapping[str, object]) -> ErrorReport | None:
    """The report in a file's document, of either form; None where it is none."""
    match document:
        case {ErrorField.TYPE: str(name), **more}:
            return ErrorReport(
                exception_type=name,
                message=_text(more.get(ErrorField.MESSAGE)),
                traceback=_text(more.get(ErrorField.TRACEBACK)),
                at_s=_moment_s(more.get(ErrorField.AT_S)),
            )
        case {"message": {"message": str(text), **more}}:
            extra = more.get("extraInfo")
            info = extra if isinstance(extra, dict) else {}
            trace = _text(info.get("py_callstack"))
            return _torchs(text, trace, _moment_s(info.get("timestamp")))
        # A process that passes on what another one reported may write this.
        case {"message": str(text)}:
            return _torchs(text, "", _moment_s(document.get("timestamp")))
    return None


def full_name(name: str) -> str:
    """The name of an exception's class as Python prints it, with its module."""
    if "." in name:
        return name
    found = getattr(builtins, name, None)
    is_pythons = isinstance(found, type) and issubclass(found, BaseException)
    # Python leaves out these two modules.
    return f"{'builtins' if is_pythons else '__main__'}.{name}"


def _torchs(text: str, trace: str, wall_s: float | None) -> ErrorReport:
    name, colon, message = text.partition(": ")
    if not colon or not name.isidentifier():
        return ErrorReport(exception_type="", message=text, traceback=trace, wall_s=wall_s)
    return ErrorReport(
        exception_type=_printed_name(name, message, trace),
        message=message,
        traceback=trace,
        wall_s=wall_s,
    )


def _printed_name(bare: str, message: str, trace: str) -> str:
    """The name that the traceback has for a class."""
    lines = (EXCEPTION.fullmatch(_OF_GROUP.sub("", line)) for line in trace.split("\n"))
    same = [line for line in lines if line and line["name"].rpartition(".")[2] == bare]
    first_line = message.partition("\n")[0]
    matching = [line for line in same if (line["message"] or "").startswith(first_line)]
    # The last one: what it came from stands before it.
    found = [*same, *matching][-1:]
    if not found:
        # Only the class itself could tell its module.
        name = full_name(bare)
        return name if name.startswith("builtins.") else bare
    return full_name(found[0]["name"])


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _moment_s(value: object) -> float | None:
    """A time that a worker wrote down, as a number or as torch does."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float) and 0 <= value <= MAX_COUNT:
        return float(value)
    return None
