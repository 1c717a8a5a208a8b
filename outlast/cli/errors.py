"""Exit codes of the `outlast` command, and the one error that carries them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees."""

    OK = 0
    # Also whatever else was done and did not come out well; docs/reference/cli.md lists it.
    JOB_FAILED = 1
    BAD_INPUT = 2
    NO_CONTROLLER = 3
    # 128 + SIGINT, as shells report it.
    INTERRUPTED = 130


class CliError(Exception):
    """A message for the user and the exit code that goes with it."""

    def __init__(self, message: str, code: ExitCode = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def bad_input(about: str = "") -> Iterator[None]:
    """A ValueError within is a mistake of the user's: its message is shown, after `about`."""
    try:
        yield
    except ValueError as error:
        raise CliError(f"{about}{error}") from error
