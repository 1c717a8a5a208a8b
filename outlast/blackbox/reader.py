"""Reading a black box while its rank lives, and after."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

from outlast.blackbox.file import (
    BACKWARD,
    BUSY,
    COMPLETED,
    DATA_WAIT,
    DATA_WAITS,
    EVAL_RECORD,
    EVALS_AT,
    EVALS_WRITTEN,
    EXPECTED_BUBBLE,
    EXPECTED_MEMORY,
    FORWARD,
    GROUP_SEQS,
    GROUPS,
    HEADER_BYTES,
    HIDDEN,
    IDENTITY,
    IDENTITY_AT,
    MAGIC,
    MARKS,
    MAX_NS,
    NUM_EVAL_RECORDS,
    NUM_STEP_RECORDS,
    OP_DETAIL,
    OP_ENTERED,
    OP_GROUP,
    OP_LEFT,
    OP_PEER,
    OP_RECORD,
    OP_SEQ,
    OP_TOTALS_AT,
    OPS_AT,
    OPS_WRITTEN,
    PART_INDEX,
    PART_LENGTH,
    PART_SPENT,
    PART_STEP,
    PART_WAITED,
    PART_WORDS,
    PARTS_AT,
    PARTS_PER_UNIT,
    PEAK_MEMORY,
    PHASE,
    PHASE_SINCE,
    PHASE_TOTALS,
    PHASES,
    RESUMED,
    SENT,
    SPAN_RECORD,
    SPANS_WRITTEN,
    STEP_RECORD,
    STEP_RECORD_INDEX_AT,
    STEPS_AT,
    STEPS_WRITTEN,
    WAITED,
    BlackBoxError,
    Rings,
)
from outlast.blackbox.records import (
    MAX_COUNT,
    MAX_DETAIL,
    Expected,
    Group,
    Op,
    OpRecord,
    Pass,
    Phase,
    Present,
    SpanRecord,
    StartMark,
    StepParts,
    StepRecord,
    StepUse,
    TimeUse,
)
from outlast.worker_contract import MOST_BLACK_BOX_RECORDS


class Reader:
    """Reads a black box while its rank lives, and after.

    A rank may write anything into its box, or cut it short: a word that is none reads as
    `unknown`, a number out of range as 0 (a step or detail as -1), a step record with one is
    left out. What a loss or a gradient norm is stays as it is: it may well be non-finite.

    Raises:
        FileNotFoundError: the rank has not opened it yet.
        BlackBoxError: the file is not a black box of this version, or not yet whole. Every
            method raises it when the file has been cut short meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)
        try:
            self._rings = self._read_rings()
            self._check_whole()
            size = self._rings.file_bytes
            self._map = mmap.mmap(self._handle, size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._handle)
            raise
        self._words = memoryview(self._map).cast("q")
        self._steps_read = 0

    def present(self) -> Present:
        """Where the rank stands now."""
        self._check_whole()
        _, rank, world_size, attempt, pid, _ = IDENTITY.unpack_from(self._map, IDENTITY_AT)
        words = self._words
        op_and_group = words[OP_GROUP]
        return Present(
            rank=rank,
            world_size=_in_range(world_size, 0, MAX_DETAIL, otherwise=0),
            attempt=_in_range(attempt, 0, MAX_COUNT, otherwise=0),
            pid=_in_range(pid, 0, MAX_COUNT, otherwise=0),
            phase=Phase(words[PHASE]),
            phase_since_ns=self._time_ns(PHASE_SINCE),
            completed_step=self._step(COMPLETED),
            resumed_step=self._step(RESUMED),
            op=Op(op_and_group & 0xFFFFFFFF),
            group=Group(op_and_group >> 32),
            op_seq=self._count(OP_SEQ),
            detail=_in_range(words[OP_DETAIL], -1, MAX_DETAIL, otherwise=-1),
            peer=_in_range(words[OP_PEER], -1, MAX_DETAIL, otherwise=-1),
            op_entered_ns=self._time_ns(OP_ENTERED),
            op_left_ns=self._time_ns(OP_LEFT),
            entered={group: self._count(GROUP_SEQS + group) for group in GROUPS},
        )

    def time_use(self) -> TimeUse:
        """Where the rank's time has gone; what still goes on is not in it."""
        self._check_whole()
        words = self._words
        phases = {phase: words[PHASE_TOTALS + phase] for phase in PHASES}
        operations = {where: words[index] for where, index in OP_TOTALS_AT}
        return TimeUse(
            phases_s={phase: ns / 1e9 for phase, ns in phases.items() if ns > 0},
            operations_s={where: ns / 1e9 for where, ns in operations.items() if ns > 0},
        )

    def step_use(self) -> StepUse:
        """What all steps so far used together."""
        self._check_whole()
        hidden = {group: self._time_ns(HIDDEN + group) for group in GROUPS}
        sent = {group: self._count(SENT + group) for group in GROUPS}
        return StepUse(
            forward_ns=self._time_ns(FORWARD),
            backward_ns=self._time_ns(BACKWARD),
            busy_ns=self._time_ns(BUSY),
            waited_ns=self._time_ns(WAITED),
            hidden_ns={group: hidden_ns for group, hidden_ns in hidden.items() if hidden_ns},
            sent_bytes={group: sent_bytes for group, sent_bytes in sent.items() if sent_bytes},
            data_wait_ns=self._time_ns(DATA_WAIT),
            data_waits=self._count(DATA_WAITS),
            peak_memory_bytes=self._count(PEAK_MEMORY),
        )

    def expected(self) -> Expected | None:
        """What the rank should need; None until it has said so."""
        self._check_whole()
        memory_bytes = self._count(EXPECTED_MEMORY)
        if not memory_bytes:
            return None
        parts = _in_range(self._words[EXPECTED_BUBBLE], 0, PARTS_PER_UNIT, otherwise=0)
        return Expected(memory_bytes=memory_bytes, bubble=parts / PARTS_PER_UNIT)

    def marks(self) -> dict[StartMark, int]:
        """Moments of the start noted so far, in nanoseconds since the epoch."""
        self._check_whole()
        found = {mark: self._time_ns(MARKS + mark) for mark in StartMark}
        return {mark: at_ns for mark, at_ns in found.items() if at_ns}

    def new_steps(self) -> list[StepRecord]:
        """Step records written since the last call, oldest first."""
        self._check_whole()
        written, kept = self._words[STEPS_WRITTEN], NUM_STEP_RECORDS
        records: list[StepRecord] = []
        named = self._named_losses() if self._steps_read < written else {}
        for index in range(max(self._steps_read, written - kept), written):
            at = STEPS_AT + index % kept * STEP_RECORD.size
            if self._words[(at + STEP_RECORD_INDEX_AT) >> 3] != index + 1:
                continue
            *fields, stored_index = STEP_RECORD.unpack_from(self._map, at)
            # Not `written` at the end: were that garbage once, no later step would be read.
            self._steps_read = stored_index
            step, loss, grad_norm, learning_rate, tokens, start_ns, end_ns, eval_loss = fields
            if not (0 <= step <= MAX_COUNT and 0 <= tokens <= MAX_COUNT):
                continue
            if max(start_ns, end_ns) > MAX_NS:
                continue
            records.append(
                StepRecord(
                    step=step,
                    loss=loss,
                    grad_norm=grad_norm,
                    learning_rate=learning_rate,
                    tokens=tokens,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    # Where nothing was evaluated, NaN is in its place; the mean of sets may be it.
                    eval_loss=None if math.isnan(eval_loss) and step not in named else eval_loss,
                    eval_losses=named.get(step, {}),
                )
            )
        return records

    def step_parts(self) -> list[StepParts]:
        """What the steps still in the ring were spent on, oldest first."""
        self._check_whole()
        written, words = self._words[STEPS_WRITTEN], self._words
        found = []
        for index in range(max(0, written - NUM_STEP_RECORDS), written):
            at = PARTS_AT // 8 + index % NUM_STEP_RECORDS * PART_WORDS
            parts = StepParts(
                step=words[at + PART_STEP],
                length_ns=self._time_ns(at + PART_LENGTH),
                waited_ns=self._time_ns(at + PART_WAITED),
                spent_ns=tuple(map(self._time_ns, range(at + PART_SPENT, at + PART_INDEX))),
            )
            # Looked at last: the writer invalidates it first.
            if words[at + PART_INDEX] == index + 1 and 0 <= parts.step <= MAX_COUNT:
                found.append(parts)
        return found

    def _named_losses(self) -> dict[int, dict[str, float]]:
        """Losses of the held-out sets with names that are still in the ring, by step."""
        written, kept = self._words[EVALS_WRITTEN], NUM_EVAL_RECORDS
        found: dict[int, dict[str, float]] = {}
        for index in range(max(0, written - kept), written):
            at = EVALS_AT + index % kept * EVAL_RECORD.size
            step, name, loss, stored = EVAL_RECORD.unpack_from(self._map, at)
            if stored == index + 1:
                named = found.setdefault(step, {})
                named[name.rstrip(b"\0").decode(errors="replace")] = loss
        return found

    def ops(self) -> list[OpRecord]:
        """The operations still in the ring, oldest first."""
        self._check_whole()
        written, kept = self._words[OPS_WRITTEN], self._rings.records
        records = []
        for index in range(max(0, written - kept), written):
            at = OPS_AT + index % kept * OP_RECORD.size
            *fields, stored = OP_RECORD.unpack_from(self._map, at)
            if stored != index + 1:
                continue
            op, group, peer, seq, detail, message, start_ns, end_ns, departed_ns = fields
            records.append(
                OpRecord(
                    op=Op(op),
                    group=Group(group),
                    seq=seq,
                    detail=detail,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    departed_ns=departed_ns,
                    peer=_in_range(peer, -1, MAX_DETAIL, otherwise=-1),
                    message=_in_range(message, -1, MAX_DETAIL, otherwise=-1),
                )
            )
        return records

    def spans(self) -> list[SpanRecord]:
        """The phases and passes still in the ring, in the order of their ends."""
        self._check_whole()
        written, kept = self._words[SPANS_WRITTEN], self._rings.records
        records = []
        for index in range(max(0, written - kept), written):
            at = self._rings.spans_at + index % kept * SPAN_RECORD.size
            *fields, stored = SPAN_RECORD.unpack_from(self._map, at)
            if stored != index + 1:
                continue
            phase, work, chunk, micro_batch, start_ns, end_ns, waited_ns = fields
            records.append(
                SpanRecord(
                    phase=Phase(phase),
                    work=Pass(work),
                    chunk=_in_range(chunk, 0, MAX_DETAIL, otherwise=0),
                    micro_batch=_in_range(micro_batch, -1, MAX_DETAIL, otherwise=-1),
                    start_ns=start_ns,
                    end_ns=end_ns,
                    waited_ns=waited_ns,
                )
            )
        return records

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._handle)

    def _check_whole(self) -> None:
        """A page that the file no longer has would end the process that reads it (SIGBUS)."""
        size, expected = os.fstat(self._handle).st_size, self._rings.file_bytes
        if size != expected:
            raise BlackBoxError(f"black box {self._path}: {size} bytes, expected {expected}")

    def _read_rings(self) -> Rings:
        """Read once: whatever a rank writes there later, the file is as long as it was."""
        size = os.fstat(self._handle).st_size
        if size < HEADER_BYTES:
            wrong = f"{size} bytes, expected at least {HEADER_BYTES}"
            raise BlackBoxError(f"black box {self._path}: {wrong}")
        about = os.pread(self._handle, IDENTITY.size, IDENTITY_AT)
        if len(about) < IDENTITY.size:
            raise BlackBoxError(f"black box {self._path}: cut short as it was opened")
        magic, *_, records = IDENTITY.unpack(about)
        if magic != MAGIC:
            raise BlackBoxError(f"black box {self._path}: magic {magic!r}, expected {MAGIC!r}")
        if not 1 <= records <= MOST_BLACK_BOX_RECORDS:
            raise BlackBoxError(f"black box {self._path}: {records} records")
        return Rings(int(records))

    def _count(self, index: int) -> int:
        return _in_range(self._words[index], 0, MAX_COUNT, otherwise=0)

    def _step(self, index: int) -> int:
        return _in_range(self._words[index], -1, MAX_COUNT, otherwise=-1)

    def _time_ns(self, index: int) -> int:
        return max(0, self._words[index])


def _in_range(number: int, least: int, most: int, *, otherwise: int) -> int:
    return number if least <= number <= most else otherwise
