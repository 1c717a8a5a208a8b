"""What the stacks of a process say, in one line and as a fingerprint.

The text is py-spy's: a line `Thread 123 (idle): "name"` for each thread, then its
frames, innermost first, as `    function (file:line)`. Native frames stand among the
Python ones.

What does not belong here: taking stacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_THREAD = re.compile(r'^Thread (?:0x)?[0-9a-fA-F]+ \((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?$')
_FRAME = re.compile(r"^\s+(?P<function>.+) \((?P<file>[^():]+)(?::(?P<line>\d+))?\)$")
_PYTHON_FILE = re.compile(r"\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread's calls, innermost first."""

    name: str
    state: str
    frames: tuple[Frame, ...]

    @property
    def innermost(self) -> Frame | None:
        """The innermost call of Python code, or else of any."""
        python = (frame for frame in self.frames if _PYTHON_FILE.search(frame.file))
        return next(python, next(iter(self.frames), None))


def parse(text: str) -> tuple[Thread, ...]:
    """The threads in a dump, in its order; lines that are neither thread nor frame are left out."""
    threads: list[Thread] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            threads.append(Thread(name=head["name"] or "", state=head["state"], frames=()))
            continue
        found = _FRAME.match(line)
        if found is not None and threads:
            frame = Frame(
                function=found["function"], file=found["file"], line=int(found["line"] or 0)
            )
            last = threads[-1]
            threads[-1] = Thread(name=last.name, state=last.state, frames=(*last.frames, frame))
    return tuple(threads)


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    """The thread that runs the program: by its name, or else the first."""
    named = (thread for thread in threads if thread.name == "MainThread")
    return next(named, next(iter(threads), None))


def location_of(text: str) -> str:
    """Where the main thread is, as `function (file:line)`; "" when the dump does not say."""
    thread = main_thread(parse(text))
    frame = None if thread is None else thread.innermost
    return "" if frame is None else f"{frame.function} ({frame.file}:{frame.line})"


def fingerprint_of(text: str) -> str:
    """The same words for stacks that differ in nothing but threads that come and go.

    Python functions of the main thread, outermost first, without line numbers.
    """
    thread = main_thread(parse(text))
    if thread is None:
        return ""
    names = [frame.function for frame in thread.frames if _PYTHON_FILE.search(frame.file)]
    return ">".join(reversed(names))
