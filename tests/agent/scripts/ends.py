"""Ends in the way that its argument names."""

from __future__ import annotations

import atexit
import sys
import threading


class Last:
    """Says that it is deleted with the module."""

    def __del__(self) -> None:
        print("deleted")


def inner(how: str) -> None:
    match how:
        case "exit text":
            sys.exit("a text")
        case "exit none":
            sys.exit()
        case "exit 300":
            sys.exit(300)
        case "raise":
            raise ValueError("loss is not finite")
        case "chained":
            try:
                inner("raise")
            except ValueError as error:
                raise RuntimeError("cannot go on") from error
        case "interrupt":
            raise KeyboardInterrupt
        case "thread":
            threading.Thread(target=late).start()
        case "bad hook":
            sys.excepthook = lambda *given: 1 / 0
            inner("raise")
        case "hook":
            sys.excepthook = lambda kind, value, trace: print(f"hooked {value}")
            inner("raise")


def late() -> None:
    # After the last line of the script, which the interpreter then waits for.
    threading.main_thread().join()
    print("late")


last = Last()
atexit.register(print, "at exit")
print("begin", file=sys.stderr)
inner(sys.argv[1])
