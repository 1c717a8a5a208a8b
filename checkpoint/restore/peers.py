"""What a restore from storage needs of the other ranks, and how they agree on a failure.

A failure that one rank meets must end the restore on all of them, with the same
error, or they would wait for each other. So ranks come to a verdict together at
fixed places; between them a rank that has failed keeps up the exchange with bytes
of no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol, TypeVar

from torch import Tensor

from checkpoint.errors import (
    CorruptCheckpointError,
    LayoutMismatchError,
    StorageUnavailableError,
)
from outlast.errors import OutlastError

_Result = TypeVar("_Result")


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Peers(Protocol):
    """All ranks that restore together. Every wait has a deadline and raises at its end."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks give; not negative."""

    def gather(self, own: bytes) -> list[bytes]:
        """What every rank gave, in rank order."""

    def from_rank_0(self, own: bytes) -> bytes:
        """What rank 0 gave, on every rank."""

    def send(self, message: Tensor, peer: int, tag: int) -> Pending:
        """Start to send bytes in host memory, which must stay as they are until `wait`."""

    def receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        """Start to receive bytes into host memory."""

    def abandon(self) -> None:
        """The restore has failed here: nothing more is exchanged, whatever is under way."""


@contextmanager
def abandoned_on_failure(peers: Peers) -> Iterator[Peers]:
    """The same peers. An exception also ends whatever is under way with them."""
    try:
        yield peers
    except BaseException:
        peers.abandon()
        raise


class _Agreement(IntEnum):
    """The gravest counts. A store that fails says nothing about what it holds."""

    OK = 0
    CORRUPT = 1
    MISMATCH = 2
    UNAVAILABLE = 3
    REFUSED = 4


def outcome(work: Callable[[], _Result]) -> _Result | Exception:
    """What `work` gives, or its failure when that is one to agree on.

    Not for work that waits for other ranks.
    """
    try:
        return work()
    except (OutlastError, OSError) as error:
        return error


def agree(peers: Peers, step: int, problem: Exception | None) -> None:
    """Return when no rank has a problem; raise the same error on every rank otherwise."""
    own = _verdict(problem)
    verdict = _Agreement(peers.largest(own))
    if verdict is _Agreement.OK:
        return
    texts = peers.gather(_text(problem).encode() if own is verdict else b"")
    text = next(raw.decode() for raw in texts if raw)
    match verdict:
        case _Agreement.CORRUPT:
            raise CorruptCheckpointError(step, text) from problem
        case _Agreement.MISMATCH:
            raise LayoutMismatchError(text) from problem
        case _Agreement.UNAVAILABLE:
            raise StorageUnavailableError(text) from problem
        case _Agreement.REFUSED:
            raise StorageUnavailableError(text, lasting=True) from problem


def _verdict(problem: Exception | None) -> _Agreement:
    match problem:
        case None:
            return _Agreement.OK
        case CorruptCheckpointError():
            return _Agreement.CORRUPT
        case LayoutMismatchError():
            return _Agreement.MISMATCH
        case StorageUnavailableError(lasting=False):
            return _Agreement.UNAVAILABLE
        case _:
            return _Agreement.REFUSED


def _text(problem: Exception | None) -> str:
    return problem.what if isinstance(problem, CorruptCheckpointError) else str(problem)


class Alone:
    """The peers of a job of one rank: none."""

    rank = 0
    size = 1

    def largest(self, number: int) -> int:
        return number

    def gather(self, own: bytes) -> list[bytes]:
        return [own]

    def from_rank_0(self, own: bytes) -> bytes:
        return own

    def send(self, message: Tensor, peer: int, tag: int) -> Pending:
        raise ValueError(f"there is no rank {peer} to send to")

    def receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        raise ValueError(f"there is no rank {peer} to receive from")

    def abandon(self) -> None:
        """Nobody to leave."""
