"""Sends copies of sealed slots to the node that keeps them, in the background.

One thread in the node agent, without torch. Training asks by a word in the slot's header,
on all ranks for the same step, and asks again only when no copy is on its way on any rank:
so there is never a queue, and a slow or dead peer costs nothing but the age of the copies.

What does not belong here: who keeps what (`core/placement.py`), and keeping
(`holder.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpoint.core import names
from checkpoint.core.pacing import Pace
from checkpoint.core.slots import ReplicaState, newest_replicated, newest_sealed
from checkpoint.errors import DamagedMemoryError
from checkpoint.replicas.wire import (
    Line,
    Peer,
    ReplicaError,
    StaleReplicaError,
    connect,
    describe,
    time_allowed_s,
)
from checkpoint.stage import slotfile
from checkpoint.stage.damage import refuse
from checkpoint.stage.rank_folder import WatchedFolder
from checkpoint.stage.slotfile import SlotFile
from checkpoint.upload.background import give_way_to_training

logger = logging.getLogger(__name__)

_POLL_S = 0.02
# A peer that is gone is asked again this often while a step waits.
_RETRY_S = 0.5
_JOIN_S = 5.0

OnTrouble = Callable[[int, str], None]


class Replicator:
    """Sends the copies of one job's ranks on this node, for one attempt.

    `holders` says for each of these ranks who keeps its copies; None where dp does, so that
    nothing is sent. `on_trouble(step, detail)` is called in its thread when training goes on
    without copies, once until one arrives again.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        memory_dir: Path,
        holders: Mapping[int, Peer | None],
        on_trouble: OnTrouble,
        *,
        bytes_per_s: float | None = None,
    ) -> None:
        self._job_id = job_id
        self._attempt = attempt
        self._holders = dict(holders)
        self._on_trouble = on_trouble
        self._bytes_per_s = bytes_per_s
        self._pace = Pace(bytes_per_s)
        self._memory_dir = memory_dir
        self._folders = [
            WatchedFolder(memory_dir / names.memory_folder(rank), rank) for rank in sorted(holders)
        ]
        self._lines: dict[str, Line] = {}
        # By rank, the table that went over the present line.
        self._sent_tables: dict[int, int] = {}
        self._is_troubled = False
        self._stopping = threading.Event()
        self.sent_bytes = 0
        self.lag_steps = 0
        """How many steps the newest copies of all ranks here are behind what is sealed."""
        self._thread = threading.Thread(target=self._run, name=f"replicas-{job_id}", daemon=True)

    def start(self) -> None:
        """Begin to watch the slots."""
        self._thread.start()

    def stop(self) -> None:
        """Stop at once; a copy under way is torn at the other side, and known to be."""
        self._stopping.set()
        for line in list(self._lines.values()):
            line.hang_up()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        give_way_to_training()
        try:
            while not self._stopping.wait(_POLL_S):
                try:
                    self._pass()
                except Exception:
                    # A thread that dies silently copies no more.
                    logger.exception("replicator failed: job=%s", self._job_id)
                    self._stopping.wait(_RETRY_S)
        finally:
            for folder in self._folders:
                folder.close()
            for line in self._lines.values():
                line.close()

    def _pass(self) -> None:
        lag_steps = 0
        for folder in self._folders:
            slots = folder.slots()
            for slot in slots:
                if slot.read().is_travelling and not self._stopping.is_set():
                    self._give(folder, slot)
            facts = [slot.read() for slot in slots]
            lag_steps = max(lag_steps, newest_sealed(facts) - max(0, newest_replicated(facts)))
        self.lag_steps = lag_steps

    def _give(self, folder: WatchedFolder, slot: SlotFile) -> None:
        """Bring one slot to its holder, and say in its header what became of that."""
        peer = self._holders[folder.rank]
        if peer is None:
            slot.set_replica(ReplicaState.DONE)
            return
        # The lock fails while a stager is choosing this slot; the next pass looks again.
        if not slot.try_lock(exclusive=False):
            return
        try:
            if not slot.read().is_travelling:
                return
            step = slot.read().step
            slot.set_replica(ReplicaState.BUSY)
            outcome = ReplicaState.FAILED
            try:
                self._try(peer, folder, slot)
                outcome = ReplicaState.DONE
                self._is_troubled = False
            except DamagedMemoryError as error:
                # Half of it may have gone over the line.
                self._hang_up(peer)
                refuse(self._memory_dir, slot, error)
                outcome = ReplicaState.NONE
            except (ReplicaError, OSError, ValueError) as error:
                if self._stopping.is_set():
                    outcome = ReplicaState.WANTED
                else:
                    self._report(step, folder, peer, error)
            finally:
                slot.set_replica(outcome)
        finally:
            slot.unlock()

    def _try(self, peer: Peer, folder: WatchedFolder, slot: SlotFile) -> None:
        deadline_s = time.monotonic() + time_allowed_s(len(slot.map), self._bytes_per_s)
        while True:
            try:
                self._send(peer, folder, slot, deadline_s)
            except (ReplicaError, OSError) as error:
                self._hang_up(peer)
                is_late = time.monotonic() + _RETRY_S > deadline_s
                # A connection that is refused now may be that of an agent that has yet to
                # hear of this attempt; one that never answers is not worth a second wait.
                lasts = isinstance(error, StaleReplicaError | TimeoutError)
                if lasts or is_late or self._stopping.wait(_RETRY_S):
                    raise
            else:
                return

    def _send(self, peer: Peer, folder: WatchedFolder, slot: SlotFile, deadline_s: float) -> None:
        line = self._line(peer)
        digest = slot.table_digest
        table = ""
        if self._sent_tables.get(folder.rank) != digest:
            shards = slotfile.read_table(folder.path)
            if shards is None or shards.digest != digest:
                raise StaleReplicaError(f"{slot.path}: {slotfile.TABLE_FILE} is of other tensors")
            table = shards.to_json().decode()
        facts = [other.read() for other in folder.slots()]
        done = [one for one in facts if one.sealed and one.replica is ReplicaState.DONE]
        request = {"kind": "put", "needed": [[one.attempt, one.step] for one in done]}
        answer = line.ask({**request, **describe(slot, table)})
        self._sent_tables[folder.rank] = digest
        if answer.get("send") is not True:
            return
        self.sent_bytes += line.send_payload(slot, self._pace, self._stopping.wait, deadline_s)
        kept = line.receive()
        if kept is None or kept.get("ok") is not True:
            raise ReplicaError("the copy was not kept" if kept is None else str(kept.get("why")))

    def _line(self, peer: Peer) -> Line:
        if peer.node not in self._lines:
            self._lines[peer.node] = connect(peer, self._job_id, self._attempt)
        return self._lines[peer.node]

    def _hang_up(self, peer: Peer) -> None:
        line = self._lines.pop(peer.node, None)
        self._sent_tables.clear()
        if line is not None:
            with contextlib.suppress(OSError):
                line.close()

    def _report(self, step: int, folder: WatchedFolder, peer: Peer, error: Exception) -> None:
        detail = f"no copy of rank {folder.rank} on node {peer.node}: {error}"
        logger.warning("step not copied: job=%s step=%d %s", self._job_id, step, detail)
        # Where training has stopped as well, the node is lost, and that is news of its own.
        goes_on = newest_sealed([slot.read() for slot in folder.slots()]) > step
        if goes_on and not self._is_troubled:
            self._is_troubled = True
            self._on_trouble(step, detail)
