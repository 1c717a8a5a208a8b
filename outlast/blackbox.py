"""The black box: a fixed-size memory-mapped file in which a rank notes what it does.

The worker writes with plain stores into shared pages, so there is no system
call in the hot path and the record outlives the process. The node agent reads
it without asking the worker: heartbeats, hang culprits, the loss curve and the
crash report all come from here.

Three areas:

- a header with the rank's present: phase, last completed step, last operation
  *entered*, of all and of each group; with running totals of the time spent in each
  phase, and in operations within it; and with what its steps used, beside what was
  expected of them;
- a ring of step records (loss, gradient norm, ...), read by the agent exactly
  once each;
- a ring of operation records (group, sequence number, micro-batch, start, end).

A ring entry is valid when the index stored at its end equals the index it was
written for; the writer stores that last, so a torn entry is never taken for a
whole one. The header is made of 64-bit words, each stored and loaded whole:
`struct.pack_into` clears its target first, so a reader would see zeros now and
then (measured: 3 reads in 1,000).

Times are `outlast.clock.node_time_ns()` at the ends of operations and steps: all processes of
a node share that clock, and no step of the wall clock moves it. Operations of a device have
the moments at which it came to them and left them, by the same clock; they are noted when the
host learns of it.

What does not belong here: decisions. This is a recorder.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from outlast.clock import node_time_ns
from outlast.notes import (
    MAX_COUNT,
    MAX_DETAIL,
    Expected,
    Group,
    Op,
    Operation,
    OpRecord,
    Phase,
    Present,
    StartMark,
    StepRecord,
    StepUse,
    TimeUse,
    bubble_of,
)

__all__ = [
    "BlackBoxError",
    "Expected",
    "Group",
    "Op",
    "OpRecord",
    "Operation",
    "Phase",
    "Present",
    "Reader",
    "StartMark",
    "StepRecord",
    "StepUse",
    "TimeUse",
    "Writer",
    "bubble_of",
]

MAGIC = b"OUTLBB03"
HEADER_BYTES = 4096
NUM_STEP_RECORDS = 512
NUM_OP_RECORDS = 4096

_IDENTITY = struct.Struct("<8sIIqq")  # magic, rank, world size, attempt, pid
_IDENTITY_AT = 0
# Index of the header's 64-bit words: completed step, resumed step, phase, phase since
# (ns), steps written, ops written.
_COMPLETED, _RESUMED, _PHASE, _PHASE_SINCE, _STEPS_WRITTEN, _OPS_WRITTEN = range(8, 14)
# op + group * 2**32, sequence, detail, entered at (ns), left at (ns)
_OP_GROUP, _OP_SEQ, _OP_DETAIL, _OP_ENTERED, _OP_LEFT = range(16, 21)
_MARKS = 32  # one (ns) per StartMark
# Time spent so far: one (ns) per Phase that has ended, then one (ns) per Phase and
# Group in operations that have ended.
_PHASE_TOTALS = 48
_OP_TOTALS = 64
# What steps used so far: forward, backward, busy and waiting in the pipeline (ns); then one
# (ns) per Group of communication that was hidden, one (bytes) per Group that was sent.
_FORWARD, _BACKWARD, _BUSY, _WAITED = range(128, 132)
_HIDDEN = 136
_SENT = 144
# Peak of the device's memory (bytes), and what was expected: memory (bytes), bubble (ppm).
_PEAK_MEMORY, _EXPECTED_MEMORY, _EXPECTED_BUBBLE = range(152, 155)
_END_OF_TOTALS = 155
# Sequence number entered last: one per Group.
_GROUP_SEQS = 160
_PARTS_PER_UNIT = 1_000_000

# step, loss, grad norm, learning rate, tokens, start (ns), end (ns), eval loss, index
_STEP = struct.Struct("<qdddqQQdQ")
_STEP_INDEX_AT = _STEP.size - 8
# op, group, sequence, detail, start (ns), end (ns), index
_OP = struct.Struct("<IIQqQQQ")

_STEPS_AT = HEADER_BYTES
_OPS_AT = _STEPS_AT + NUM_STEP_RECORDS * _STEP.size
FILE_BYTES = _OPS_AT + NUM_OP_RECORDS * _OP.size
# The agent reads them several times a second: listing an enumeration costs more than its words.
_PHASES, _GROUPS = tuple(Phase), tuple(Group)
_OP_TOTALS_AT = tuple(
    ((phase, group), _OP_TOTALS + phase * len(_GROUPS) + group)
    for phase in _PHASES
    for group in _GROUPS
)
# Nanoseconds since the epoch until the year 2262, and what a signed word can hold.
_MAX_NS = 2**63 - 1


class BlackBoxError(ValueError):
    """The file is not a black box of this version, not yet whole, or whole no longer."""


class Writer:
    """A rank's own end of its black box. Not thread-safe: one writer thread."""

    def __init__(self, path: str | Path, *, rank: int, world_size: int, attempt: int) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _allocate(handle, path)
            self._map = mmap.mmap(handle, FILE_BYTES)
        finally:
            os.close(handle)
        self._words = memoryview(self._map).cast("q")
        self._steps = 0
        self._ops = 0
        self._completed_step = -1
        self._resumed_step = -1
        self._phase = Phase.STARTING
        self._phase_since_ns = node_time_ns()
        self._seqs = [0] * len(Group)
        self._entered = (0, 0, 0, 0, 0)
        self._ended: OpRecord | None = None
        # How far a device has come in each group; the host runs ahead of it.
        self._device_seqs: dict[int, int] = {}
        for index in range(_OP_GROUP, _OP_LEFT + 1):
            self._words[index] = 0
        for index in range(_PHASE_TOTALS, _GROUP_SEQS + len(Group)):
            self._words[index] = 0
        self._publish()
        _IDENTITY.pack_into(self._map, _IDENTITY_AT, MAGIC, rank, world_size, attempt, os.getpid())

    def phase(self, phase: Phase) -> None:
        """Say what the rank is busy with from now on."""
        now_ns = node_time_ns()
        self._words[_PHASE_TOTALS + self._phase] += now_ns - self._phase_since_ns
        self._phase = phase
        self._phase_since_ns = now_ns
        self._publish()

    def mark(self, mark: StartMark, at_ns: int | None = None) -> None:
        """Note a moment of the start."""
        self._words[_MARKS + mark] = at_ns or node_time_ns()

    def resumed(self, step: int) -> None:
        """Say after which step this attempt goes on (0: from the beginning)."""
        self._resumed_step = step
        self._completed_step = step
        self._publish()

    def enter(self, op: Op, group: Group, detail: int = -1) -> int:
        """Note that an operation starts; returns its sequence number in the group.

        `detail` is the root of a broadcast, the micro-batch of a send or receive, else -1.
        """
        seq = self._seqs[group] + 1
        self._seqs[group] = seq
        start_ns = node_time_ns()
        self._entered = (op, group, seq, detail, start_ns)
        words = self._words
        words[_OP_LEFT] = 0
        words[_OP_GROUP] = op | group << 32
        words[_OP_SEQ] = seq
        words[_OP_DETAIL] = detail
        words[_OP_ENTERED] = start_ns
        words[_GROUP_SEQS + group] = seq
        return seq

    def leave(self) -> None:
        """Note that the operation entered last has ended."""
        end_ns = node_time_ns()
        self._words[_OP_LEFT] = end_ns
        self._keep(self._entered, end_ns)

    def stands_in(self, operation: OpRecord) -> None:
        """Note that a device has come to an operation that was entered before.

        A device does later what it is given: this says which of it holds it up.
        """
        words = self._words
        words[_OP_LEFT] = 0
        words[_OP_GROUP] = operation.op | operation.group << 32
        words[_OP_SEQ] = operation.seq
        words[_OP_DETAIL] = operation.detail
        words[_OP_ENTERED] = operation.start_ns
        words[_GROUP_SEQS + operation.group] = operation.seq

    def waits_for_device(self) -> None:
        """Note that the host gives a device no more work until it has caught up.

        Until then the box said what was given last; from now on it says how far the
        device has come, first of all to the end of the last operation that has ended.
        """
        if self._ended is not None:
            self.stands_in(self._ended)
            self._words[_OP_LEFT] = self._ended.end_ns
            for group, seq in self._device_seqs.items():
                self._words[_GROUP_SEQS + group] = seq

    def ended(self, operation: OpRecord) -> None:
        """Note that a device has left an operation; the operation entered last may be another."""
        self._ended = operation
        self._device_seqs[operation.group] = operation.seq
        words = self._words
        here = (operation.op | operation.group << 32, operation.seq)
        if (words[_OP_GROUP], words[_OP_SEQ]) == here:
            words[_OP_LEFT] = operation.end_ns
        entered = (
            operation.op,
            operation.group,
            operation.seq,
            operation.detail,
            operation.start_ns,
        )
        self._keep(entered, operation.end_ns)

    def _keep(self, entered: tuple[int, int, int, int, int], end_ns: int) -> None:
        """Put an operation that has ended into the ring; `entered` as `enter` noted it."""
        at = _OPS_AT + self._ops % NUM_OP_RECORDS * _OP.size
        op, group, seq, detail, start_ns = entered
        self._ops += 1
        self._words[_OP_TOTALS + self._phase * len(Group) + group] += end_ns - start_ns
        _OP.pack_into(self._map, at, op, group, seq, detail, start_ns, end_ns, self._ops)
        self._publish()

    def expect(self, expected: Expected) -> None:
        """Note what the rank should need, before it trains."""
        self._words[_EXPECTED_MEMORY] = expected.memory_bytes
        self._words[_EXPECTED_BUBBLE] = round(expected.bubble * _PARTS_PER_UNIT)

    def used(self, use: StepUse) -> None:
        """Add what a step used."""
        words = self._words
        words[_FORWARD] += use.forward_ns
        words[_BACKWARD] += use.backward_ns
        words[_BUSY] += use.busy_ns
        words[_WAITED] += use.waited_ns
        for group, hidden_ns in use.hidden_ns.items():
            words[_HIDDEN + group] += hidden_ns
        for group, sent_bytes in use.sent_bytes.items():
            words[_SENT + group] += sent_bytes
        words[_PEAK_MEMORY] = use.peak_memory_bytes

    def completed(self, record: StepRecord) -> None:
        """Note a completed step, with its figures."""
        at = _STEPS_AT + self._steps % NUM_STEP_RECORDS * _STEP.size
        self._steps += 1
        eval_loss = float("nan") if record.eval_loss is None else record.eval_loss
        _STEP.pack_into(
            self._map,
            at,
            record.step,
            record.loss,
            record.grad_norm,
            record.learning_rate,
            record.tokens,
            record.start_ns,
            record.end_ns,
            eval_loss,
            self._steps,
        )
        self._completed_step = record.step
        self._publish()

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _publish(self) -> None:
        words = self._words
        words[_RESUMED] = self._resumed_step
        words[_PHASE] = self._phase
        words[_PHASE_SINCE] = self._phase_since_ns
        words[_STEPS_WRITTEN] = self._steps
        words[_OPS_WRITTEN] = self._ops
        words[_COMPLETED] = self._completed_step


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
            self._check_whole()
            self._map = mmap.mmap(self._handle, FILE_BYTES, prot=mmap.PROT_READ)
            magic = _IDENTITY.unpack_from(self._map, _IDENTITY_AT)[0]
            if magic != MAGIC:
                self._map.close()
                raise BlackBoxError(f"black box {path}: magic {magic!r}, expected {MAGIC!r}")
        except BaseException:
            os.close(self._handle)
            raise
        self._words = memoryview(self._map).cast("q")
        self._steps_read = 0

    def present(self) -> Present:
        """Where the rank stands now."""
        self._check_whole()
        _, rank, _, attempt, pid = _IDENTITY.unpack_from(self._map, _IDENTITY_AT)
        words = self._words
        op_and_group = words[_OP_GROUP]
        return Present(
            rank=rank,
            attempt=_in_range(attempt, 0, MAX_COUNT, otherwise=0),
            pid=_in_range(pid, 0, MAX_COUNT, otherwise=0),
            phase=Phase(words[_PHASE]),
            phase_since_ns=self._time_ns(_PHASE_SINCE),
            completed_step=self._step(_COMPLETED),
            resumed_step=self._step(_RESUMED),
            op=Op(op_and_group & 0xFFFFFFFF),
            group=Group(op_and_group >> 32),
            op_seq=self._count(_OP_SEQ),
            detail=_in_range(words[_OP_DETAIL], -1, MAX_DETAIL, otherwise=-1),
            op_entered_ns=self._time_ns(_OP_ENTERED),
            op_left_ns=self._time_ns(_OP_LEFT),
            entered={group: self._count(_GROUP_SEQS + group) for group in _GROUPS},
        )

    def time_use(self) -> TimeUse:
        """Where the rank's time has gone; what still goes on is not in it."""
        self._check_whole()
        words = self._words
        phases = {phase: words[_PHASE_TOTALS + phase] for phase in _PHASES}
        operations = {where: words[index] for where, index in _OP_TOTALS_AT}
        return TimeUse(
            phases_s={phase: ns / 1e9 for phase, ns in phases.items() if ns > 0},
            operations_s={where: ns / 1e9 for where, ns in operations.items() if ns > 0},
        )

    def step_use(self) -> StepUse:
        """What all steps so far used together."""
        self._check_whole()
        hidden = {group: self._time_ns(_HIDDEN + group) for group in _GROUPS}
        sent = {group: self._count(_SENT + group) for group in _GROUPS}
        return StepUse(
            forward_ns=self._time_ns(_FORWARD),
            backward_ns=self._time_ns(_BACKWARD),
            busy_ns=self._time_ns(_BUSY),
            waited_ns=self._time_ns(_WAITED),
            hidden_ns={group: hidden_ns for group, hidden_ns in hidden.items() if hidden_ns},
            sent_bytes={group: sent_bytes for group, sent_bytes in sent.items() if sent_bytes},
            peak_memory_bytes=self._count(_PEAK_MEMORY),
        )

    def expected(self) -> Expected | None:
        """What the rank should need; None until it has said so."""
        self._check_whole()
        memory_bytes = self._count(_EXPECTED_MEMORY)
        if not memory_bytes:
            return None
        parts = _in_range(self._words[_EXPECTED_BUBBLE], 0, _PARTS_PER_UNIT, otherwise=0)
        return Expected(memory_bytes=memory_bytes, bubble=parts / _PARTS_PER_UNIT)

    def marks(self) -> dict[StartMark, int]:
        """Moments of the start noted so far, in nanoseconds since the epoch."""
        self._check_whole()
        found = {mark: self._time_ns(_MARKS + mark) for mark in StartMark}
        return {mark: at_ns for mark, at_ns in found.items() if at_ns}

    def new_steps(self) -> list[StepRecord]:
        """Step records written since the last call, oldest first."""
        self._check_whole()
        written = self._words[_STEPS_WRITTEN]
        records = []
        for index in range(max(self._steps_read, written - NUM_STEP_RECORDS), written):
            at = _STEPS_AT + index % NUM_STEP_RECORDS * _STEP.size
            if self._words[(at + _STEP_INDEX_AT) >> 3] != index + 1:
                continue
            *fields, stored_index = _STEP.unpack_from(self._map, at)
            # Not `written` at the end: were that garbage once, no later step would be read.
            self._steps_read = stored_index
            step, loss, grad_norm, learning_rate, tokens, start_ns, end_ns, eval_loss = fields
            if not (0 <= step <= MAX_COUNT and 0 <= tokens <= MAX_COUNT):
                continue
            if max(start_ns, end_ns) > _MAX_NS:
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
                    eval_loss=None if eval_loss != eval_loss else eval_loss,
                )
            )
        return records

    def ops(self) -> list[OpRecord]:
        """The operations still in the ring, oldest first."""
        self._check_whole()
        written = self._words[_OPS_WRITTEN]
        records = []
        for index in range(max(0, written - NUM_OP_RECORDS), written):
            at = _OPS_AT + index % NUM_OP_RECORDS * _OP.size
            op, group, seq, detail, start_ns, end_ns, stored = _OP.unpack_from(self._map, at)
            if stored == index + 1:
                records.append(
                    OpRecord(
                        op=Op(op),
                        group=Group(group),
                        seq=seq,
                        detail=detail,
                        start_ns=start_ns,
                        end_ns=end_ns,
                    )
                )
        return records

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._handle)

    def _check_whole(self) -> None:
        """A page that the file no longer has would end the process that reads it (SIGBUS)."""
        size = os.fstat(self._handle).st_size
        if size != FILE_BYTES:
            raise BlackBoxError(f"black box {self._path}: {size} bytes, expected {FILE_BYTES}")

    def _count(self, index: int) -> int:
        return _in_range(self._words[index], 0, MAX_COUNT, otherwise=0)

    def _step(self, index: int) -> int:
        return _in_range(self._words[index], -1, MAX_COUNT, otherwise=-1)

    def _time_ns(self, index: int) -> int:
        return max(0, self._words[index])


def _in_range(number: int, least: int, most: int, *, otherwise: int) -> int:
    return number if least <= number <= most else otherwise


def _allocate(handle: int, path: str | Path) -> None:
    """Take the whole file's room on its disk now.

    A store into a page that a full disk has no block for ends the process by SIGBUS, and nobody
    would say why.
    """
    try:
        os.posix_fallocate(handle, 0, FILE_BYTES)
    except OSError as error:
        message = f"black box {path}: no room for its {FILE_BYTES} bytes: {error.strerror}"
        raise OSError(error.errno, message) from error
    # One of an earlier version may be longer.
    os.ftruncate(handle, FILE_BYTES)
