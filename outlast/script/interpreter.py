"""Running a script or a module as `__main__`, with the end that the interpreter gives it.

What does not belong here: what the process was before (`outlast.script.fresh`).
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType, TracebackType

# As the interpreter has it for a file that it cannot open.
_NO_SUCH_SCRIPT = 2
_FAILED = 1


def run_main(target: Sequence[str]) -> int:
    """Run a script, or "-m" and a module, with its arguments; its exit code.

    `sys.exit` and its like are left to the interpreter, which runs the handlers of the end and
    waits for threads when the caller has returned from all of its frames.
    """
    main = _new_main()
    try:
        if target[0] == "-m":
            sys.argv = ["-m", *target[2:]]
            sys.orig_argv = [sys.executable, "-u", *target]
            _run_named(target[1], alter_argv=True)
        else:
            sys.argv = list(target)
            sys.orig_argv = [sys.executable, "-u", *target]
            return _run_file(target[0], main)
    except SystemExit:
        raise
    # The boundary of the script: whatever it is, the interpreter would print it.
    except BaseException as error:  # noqa: BLE001
        return _report(error)
    return 0


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    # What the interpreter gives it before anything runs.
    main.__dict__.update(
        __builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter
    )
    sys.modules["__main__"] = main
    return main


def _run_file(path: str, main: ModuleType) -> int:
    if not os.path.isfile(path) and os.path.exists(path):
        # A folder or an archive with a `__main__.py`, which is on `sys.path` by now.
        _run_named("__main__", alter_argv=False)
        return 0
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(
            f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {reason}",
            file=sys.stderr,
        )
        return _NO_SUCH_SCRIPT
    place = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", place)
    main.__dict__.update(__file__=place, __cached__=None, __loader__=loader)
    exec(compile(source, place, "exec", dont_inherit=True), main.__dict__)
    return 0


def _run_named(name: str, *, alter_argv: bool) -> None:
    # What `python -m` itself calls: it fills the `__main__` that there is.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _report(error: BaseException) -> int:
    """Print an exception as the interpreter does, without our frames; the exit code."""
    trace = _without_ours(error.__traceback__)
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as failure:  # noqa: BLE001  # of a hook that the script has put there
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter ends by the signal itself after a Ctrl-C that nobody caught.
        sys.excepthook = _say_nothing
        raise error
    return _FAILED


def _say_nothing(*given: object) -> None:
    """It has been printed."""


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The frames below this module's."""
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace
