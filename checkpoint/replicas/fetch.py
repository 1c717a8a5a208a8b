"""Brings a rank's state from another node into its own host memory, before it looks there.

A node that takes the place of a lost one has nothing; the node that keeps the copies of
its ranks does, or ranks elsewhere that hold the same state. What is fetched becomes slots
of the rank like those it has sealed itself, so that restoring asks for nothing new: all
ranks agree on a step that each has in host memory.

What does not belong here: choosing the step. Up to two are fetched, since the newest copy
of one rank may have no counterpart at another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.core.checked_json import RecordError
from checkpoint.core.shards import ShardTable
from checkpoint.core.slots import choose_slot
from checkpoint.errors import DamagedMemoryError
from checkpoint.replicas.wire import (
    Copy,
    Line,
    Peer,
    ReplicaError,
    StaleReplicaError,
    connect,
    seal_copy,
    text,
    time_allowed_s,
)
from checkpoint.stage import allocation, slotfile
from checkpoint.stage.damage import refuse
from checkpoint.stage.slot_sums import stored_sums, verify
from checkpoint.stage.slotfile import SlotFile
from outlast.errors import FatalError

logger = logging.getLogger(__name__)

_MAX_FETCHED = 2
# Another agent may get its start command a moment later than this one.
_BEGIN_S = 10.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place that may have a rank's state: copies of `rank`, or its own slots."""

    peer: Peer
    rank: int
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What became of the fetch for one rank."""

    rank: int
    copies: tuple[Copy, ...] = ()
    nbytes: int = 0
    problem: str = ""
    """Why the rank has nothing in host memory now; "" when it has."""


class Fetcher:
    """Fetches for the ranks of one node at the start of an attempt."""

    def __init__(
        self,
        job_id: str,
        attempt: int,
        *,
        num_slots: int,
        pause: Callable[[float], bool],
    ) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._num_slots = num_slots
        self._pause = pause
        self._lines: dict[str, Line] = {}

    def hang_up(self) -> None:
        """Have a fetch under way in another thread fail; that thread closes."""
        for line in list(self._lines.values()):
            line.hang_up()

    def close(self) -> None:
        """Close all lines, as the thread that fetches."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def fetch(self, rank: int, folder: Path, sources: Sequence[Source]) -> Fetched:
        """Fetch what is newer than what `folder` holds, from the first source that has any.

        What it holds is verified first: a slot that is damaged is no state to come back to.
        """
        _refuse_damaged(folder)
        own = _sealed(folder)
        problems = []
        for source in sources:
            try:
                copies, nbytes = self._from(source, folder, own)
            except (ReplicaError, OSError, ValueError, FatalError) as error:
                self._hang_up(source.peer)
                problems.append(f"node {source.peer.node}: {error}")
                continue
            if copies:
                return Fetched(rank=rank, copies=copies, nbytes=nbytes)
            problems.append(f"node {source.peer.node} has nothing newer")
        if _sealed(folder):
            return Fetched(rank=rank)
        return Fetched(rank=rank, problem="; ".join(problems) or "no other node has its state")

    def _from(
        self, source: Source, folder: Path, own: Sequence[Copy]
    ) -> tuple[tuple[Copy, ...], int]:
        line = self._line(source.peer)
        answer = line.ask({"kind": "list", "rank": source.rank, "own": source.own})
        listed = answer.get("copies")
        if not isinstance(listed, list):
            raise ReplicaError("a list of copies is none")
        newest = max(own, default=Copy(0, 0))
        wanted = [copy for copy in (Copy(*pair) for pair in listed) if copy > newest]
        fetched, nbytes = [], 0
        # Oldest first: of slots that give way, those of a later step go before others.
        for copy in sorted(wanted)[-_MAX_FETCHED:]:
            nbytes += self._get(line, source, copy, folder)
            fetched.append(copy)
        return tuple(fetched), nbytes

    def _get(self, line: Line, source: Source, copy: Copy, folder: Path) -> int:
        described = line.ask(
            {
                "kind": "get",
                "rank": source.rank,
                "own": source.own,
                "attempt": copy.attempt,
                "step": copy.step,
            }
        )
        try:
            table = ShardTable.from_json(text(described, "table").encode())
        except RecordError as error:
            raise ReplicaError(f"the shard table is damaged: {error}") from error
        slots = allocation.prepare(folder, table, num_slots=self._num_slots)
        try:
            slot = _room(slots, copy.step)
            slot.invalidate()
            allowed_s = time_allowed_s(len(slot.map), None)
            sums = line.receive_payload(slot, time.monotonic() + allowed_s)
            seal_copy(slot, described, sums)
            nbytes = slot.payload_bytes
        finally:
            for slot in slots:
                slot.close()
        return nbytes

    def _line(self, peer: Peer) -> Line:
        deadline_s = time.monotonic() + _BEGIN_S
        while peer.node not in self._lines:
            try:
                self._lines[peer.node] = connect(peer, self._job_id, self._attempt)
            except (StaleReplicaError, TimeoutError):
                raise
            except (ReplicaError, OSError):
                if time.monotonic() > deadline_s or self._pause(_RETRY_S):
                    raise
        return self._lines[peer.node]

    def _hang_up(self, peer: Peer) -> None:
        line = self._lines.pop(peer.node, None)
        if line is not None:
            line.close()


def _room(slots: Sequence[SlotFile], step: int) -> SlotFile:
    """The slot to fetch into, locked until it is closed."""
    locked: list[int] = []
    while True:
        index = choose_slot(
            [slot.read() for slot in slots], step=step, common_step=-1, upload=False, locked=locked
        )
        if index is None:
            raise ReplicaError("uploads hold every slot")
        if slots[index].try_lock(exclusive=True):
            return slots[index]
        locked.append(index)


def _refuse_damaged(folder: Path) -> None:
    """Refuse slots that do not fit their checksums, from the newest to the first that does."""
    slots = slotfile.open_existing(folder)
    try:
        for slot in sorted(slots, key=lambda slot: slot.read().step, reverse=True):
            # An uploader may read it at the same time; nobody overwrites it now.
            if not slot.read().sealed:
                continue
            try:
                sums = stored_sums(slot)
                if sums is not None:
                    verify(slot, sums)
                return
            except DamagedMemoryError as error:
                refuse(folder.parent, slot, error)
    finally:
        for slot in slots:
            slot.close()


def _sealed(folder: Path) -> list[Copy]:
    slots = slotfile.open_existing(folder)
    try:
        facts = [slot.read() for slot in slots]
        return [Copy(slot.attempt, slot.step) for slot in facts if slot.sealed]
    finally:
        for slot in slots:
            slot.close()
