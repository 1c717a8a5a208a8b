"""Tries a checkpoint store from this machine: `python -m checkpoint.storage.probe URL`.

The exit code is 0 when files can be created, read and deleted there and none is
replaced; else it is 1, and standard error says what does not work. Whoever starts it
gives it a deadline: a store's client may hang.
"""

from __future__ import annotations

import sys

from checkpoint.storage.storage import Storage
from outlast.errors import OutlastError


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m checkpoint.storage.probe URL", file=sys.stderr)
        return 2
    try:
        Storage(arguments[0]).probe()
    except (OutlastError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
