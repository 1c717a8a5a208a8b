"""Calls that did not come back, counted by store, or by name where no store is asked.

A call that hangs in the kernel or in a client cannot be ended: its thread is left behind. A
store that never answers must not cost a thread per try for ever, so beyond a number of such
calls no more are made until one of them comes back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

# Four parts and four retries of an upload, twice: what comes beside them fails at once.
MAX_HUNG_CALLS = 16

_Result = TypeVar("_Result")

_lock = threading.Lock()
_counts = Counter[str]()


def store_of(url: str) -> str:
    """What hangs together: the server of a URL, a folder by itself."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if separator and rest[:1] != "/" else url


def num_hung(kind: str) -> int:
    """Calls to this store, or of this name, that were given up and have not come back."""
    with _lock:
        return _counts[kind]


class CallWatch:
    """One call: whether its caller waits for it, and whether it has come back."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._is_left = False
        self._is_back = False

    def leave(self) -> None:
        """Nobody waits for it any more."""
        with _lock:
            if not self._is_back and not self._is_left:
                self._is_left = True
                _counts[self._kind] += 1

    def come_back(self) -> None:
        """It has ended, in time or not."""
        with _lock:
            self._is_back = True
            if self._is_left:
                _counts[self._kind] -= 1
                if not _counts[self._kind]:
                    del _counts[self._kind]


def tried(work: Callable[[], _Result]) -> tuple[_Result | None, BaseException | None]:
    """What came of a call, or its error.

    No frame that lasts holds the error, and with it what `work` looked at: the caller may close
    that as soon as it has the error.
    """
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
        return None, error
