"""Why a process ended, from what stands last in its log: scripts seldom report it otherwise.

An exception that nobody caught is printed by the interpreter as it ends, and ranks of torch's
process groups have `[rankN]: ` before each of its lines. Without that mark nothing tells such a
traceback from one that a program printed and went on, but that more output follows it; so do a few
lines of the interpreter's own end. A program that refuses its arguments, or cannot be started, says
so in one line.

What does not belong here: reports in files (`error_reports`), and what class of failure any of it
is (`diagnostics.core.exits`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from controller.agent.workers.error_reports import EXCEPTION, ErrorReport, full_name

# The exit code that Python gives an exception, and those that say that nothing could be run.
_FAILED, _WRONG_USE, _NOT_EXECUTABLE, _NOT_FOUND = 1, 2, 126, 127
# What `sys.exit`, argparse and the interpreter itself end a program by.
_ENDED_ITSELF = "SystemExit"

# A progress bar leaves its line open.
_RANK = re.compile(r"^(?:.*?[^\w\s])??(?:\[rank\d+\]: )+")
_PLAIN_HEADER = "Traceback (most recent call last):"
_HEADER = re.compile(r"^(?:.*[^\w\s])?Traceback \(most recent call last\):$")
_GROUP_HEADER = re.compile(r"^  \+ Exception Group Traceback \(most recent call last\):$")
_IN_GROUP = "  | "
_PART_OF_GROUP = re.compile(r"^ +[|+]")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Before the traceback of an exception that did not end the process: of a thread, a finalizer, a
# child process or a task.
_OF_OTHERS = re.compile(
    r"^(?:Exception in thread |Exception ignored |Error in |--- Logging error ---|"
    r"Process [\w:-]+:$|future: <|Task exception was never retrieved)"
)
# A program that logs an exception has caught it.
_LOGGED = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
# Printed by libraries while the interpreter ends.
_NOISE = re.compile(
    r"^\r|^(?:\[rank\d+\]:)?\[?[IWEF]\d{3,4} |NCCL (?:INFO|WARN)|Warning: |^wandb: |"
    r"^Exception ignored "
)
# Of a message of several lines, or of handlers of the end: those of a CUDA error are four.
_MAX_LINES_AFTER = 5

_SAYS_WHY = {
    _FAILED: re.compile(r"^\S+: (?:No module named |Error while finding module specification )"),
    _WRONG_USE: re.compile(r"^\S+: can't open file |^(?:\S.*: )?[Ee]rror: "),
    _NOT_EXECUTABLE: re.compile(
        r": (?:Permission denied|Exec format error|Is a directory|Argument list too long)$"
    ),
    _NOT_FOUND: re.compile(
        r": (?:No such file or directory|Not a directory|(?:command )?not found)$"
    ),
}
_USAGE = re.compile(r"^ ?[Uu]sage: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Printed:
    """A traceback in lines: where it starts with those that it came from, and has its exception."""

    start: int
    header: int
    exception: int
    is_others: bool


def last_words(log: str, code: int) -> ErrorReport | None:
    """What ended a process with this exit code, by the end of its log; None where nothing says."""
    if code not in _SAYS_WHY:
        return None
    lines = log.split("\n")
    if code == _FAILED and (found := _by_rank(lines) or _by_python(lines)):
        return found
    return _said(lines, code)


def _by_rank(lines: Sequence[str]) -> ErrorReport | None:
    """The exception that torch's own hook has printed; the process has ended by it."""
    marked = [number for number, line in enumerate(lines) if _RANK.match(line)]
    if not marked:
        return None
    # Empty lines of it have no mark.
    own = [_RANK.sub("", line) for line in lines[marked[0] :] if not line or _RANK.match(line)]
    found = [each for each in _printed(own) if not each.is_others]
    return _report(own, found[-1], len(own)) if found else None


def _by_python(lines: Sequence[str]) -> ErrorReport | None:
    """The exception that is printed last, if what follows it is no work that went on."""
    found = list(_printed(lines))
    own = [each for each in found if not each.is_others]
    if not own:
        return None
    last = own[-1]
    others = {line for each in found for line in (each.header, each.exception) if each.is_others}
    after = [
        line
        for number, line in enumerate(lines)
        if number > last.exception and number not in others and _is_output(line)
    ]
    was_logged = last.start > 0 and _LOGGED.search(lines[last.start - 1])
    if len(after) > (0 if was_logged else _MAX_LINES_AFTER):
        return None
    # What follows without a mark may be of the message or not, but for lines that are indented.
    end = last.exception + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    return _report(lines, last, end)


def _is_output(line: str) -> bool:
    is_own = line.strip() and not line.startswith((" ", "\t"))
    return bool(is_own) and not _NOISE.search(line) and not _OF_OTHERS.match(line)


def _printed(lines: Sequence[str]) -> Iterator[_Printed]:
    """The tracebacks in lines, in order."""
    before: _Printed | None = None
    for header, line in enumerate(lines):
        is_group = bool(_GROUP_HEADER.match(line))
        if not is_group and not _HEADER.match(line):
            continue
        exception = _exception_line(lines, header, is_group)
        if exception is None:
            continue
        above = next((each for each in reversed(lines[:header]) if each.strip()), "")
        linked = before if above.strip(" |") in _LINKS else None
        before = _Printed(
            start=linked.start if linked else header,
            header=header,
            exception=exception,
            is_others=linked.is_others if linked else bool(_OF_OTHERS.match(above)),
        )
        yield before


def _exception_line(lines: Sequence[str], header: int, is_group: bool) -> int | None:
    """Where the exception of a traceback stands; None where the traceback is not whole."""
    mark = _IN_GROUP if is_group else ""
    for number in range(header + 1, len(lines)):
        line = lines[number]
        if not line.startswith(mark):
            return None
        if not line.startswith(f"{mark} "):
            return number if EXCEPTION.fullmatch(line.removeprefix(mark)) else None
    return None


def _report(lines: Sequence[str], printed: _Printed, end: int) -> ErrorReport:
    exception = EXCEPTION.fullmatch(lines[printed.exception].removeprefix(_IN_GROUP))
    assert exception is not None, "the line was found by it"
    more = (line for line in lines[printed.exception + 1 : end] if not _PART_OF_GROUP.match(line))
    first = lines[printed.start]
    start = first if _GROUP_HEADER.match(first) else _PLAIN_HEADER
    return ErrorReport(
        exception_type=full_name(exception["name"]),
        message="\n".join((exception["message"] or "", *more)).rstrip(),
        traceback="\n".join((start, *lines[printed.start + 1 : end])).rstrip() + "\n",
    )


def _said(lines: Sequence[str], code: int) -> ErrorReport | None:
    """The line by which a program, a shell or the interpreter says why it does not run."""
    last = [line for line in lines if line.strip() and not _NOISE.search(line)][-1:]
    if not last or not _SAYS_WHY[code].search(last[0]):
        return None
    is_of_arguments = code == _WRONG_USE and "can't open file" not in last[0]
    if is_of_arguments and not any(_USAGE.match(line) for line in lines):
        return None
    return ErrorReport(exception_type=_ENDED_ITSELF, message=last[0].strip())
