"""What a test does to the server: freeze it, make it refuse, lose its answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tests.kube.fake.errors import ApiError


@dataclass(slots=True)
class _Refusal:
    verb: str
    plural: str
    left: int
    error: ApiError | None


@dataclass(slots=True)
class Faults:
    """Asked by the server for every request."""

    _open: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _refusals: list[_Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open.set()

    def freeze(self) -> None:
        """Accept requests and answer none, watches included, until `thaw`."""
        self._open.clear()

    def thaw(self) -> None:
        """Answer again, beginning with what has been waiting."""
        self._open.set()

    def refuse(self, verb: str, plural: str, error: ApiError, *, times: int = 1) -> None:
        """Answer the next requests of a kind with an error and do nothing."""
        self._add(_Refusal(verb, plural, times, error))

    def lose_answers(self, verb: str, plural: str, *, times: int = 1) -> None:
        """Do what the next requests of a kind ask and break the connection before the answer."""
        self._add(_Refusal(verb, plural, times, None))

    def wait_open(self) -> None:
        """Block while frozen."""
        self._open.wait()

    def take(self, verb: str, plural: str) -> tuple[ApiError | None, bool]:
        """For one request: the error to answer with, and whether its answer gets lost."""
        with self._lock:
            for refusal in self._refusals:
                if (refusal.verb, refusal.plural) == (verb, plural) and refusal.left > 0:
                    refusal.left -= 1
                    return refusal.error, refusal.error is None
        return None, False

    def _add(self, refusal: _Refusal) -> None:
        with self._lock:
            self._refusals.append(refusal)
