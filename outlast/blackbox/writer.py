"""Writing a black box: the rank's own end of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from outlast.blackbox.file import (
    BACKWARD,
    BUSY,
    COMPLETED,
    DATA_WAIT,
    DATA_WAITS,
    END_OF_TOTALS,
    EVAL_RECORD,
    EVALS_AT,
    EVALS_WRITTEN,
    EXPECTED_BUBBLE,
    EXPECTED_MEMORY,
    FORWARD,
    GROUP_SEQS,
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
    OP_TOTALS,
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
    RESUMED,
    SENT,
    SPAN_RECORD,
    SPANS_WRITTEN,
    STEP_RECORD,
    STEPS_AT,
    STEPS_WRITTEN,
    WAITED,
    Rings,
)
from outlast.blackbox.records import (
    Expected,
    Group,
    Op,
    OpRecord,
    Phase,
    SpanRecord,
    StartMark,
    StepPart,
    StepRecord,
    StepUse,
)
from outlast.clock import node_time_ns
from outlast.worker_contract import BLACK_BOX_RECORDS

# By the words' numbers: a word as a key takes as long as all else that an event costs.
_PART_OF_PHASE = tuple(int(StepPart.__members__.get(phase.name, -1)) for phase in Phase)
_PART_OF_PASS = (-1, int(StepPart.FORWARD), int(StepPart.BACKWARD))
_FIRST_BEHIND = int(StepPart.CHECKPOINT)


class Writer:
    """A rank's own end of its black box. Not thread-safe: one writer thread."""

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int,
        world_size: int,
        attempt: int,
        records: int = BLACK_BOX_RECORDS,
    ) -> None:
        """`records` is how many operations are kept, and how many spans."""
        self._rings = Rings(records)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _allocate(handle, path, self._rings.file_bytes)
            self._map = mmap.mmap(handle, self._rings.file_bytes)
        finally:
            os.close(handle)
        self._words = memoryview(self._map).cast("q")
        self._steps = 0
        self._evals = 0
        self._ops = 0
        self._spans = 0
        self._completed_step = -1
        self._resumed_step = -1
        self._phase = Phase.STARTING
        self._phase_since_ns = node_time_ns()
        # Time in operations of the present phase.
        self._op_ns = 0
        self._seqs = [0] * len(Group)
        self._entered = (0, 0, 0, -1, -1, -1, 0)
        self._ended: OpRecord | None = None
        # How far a device has come in each group; the host runs ahead of it.
        self._device_seqs: dict[int, int] = {}
        # Of the step under way: time by part, and in operations, those up to a moment.
        self._spent_ns = [0] * len(StepPart)
        self._waited_ns = 0
        self._waited_until_ns = 0
        # How many steps there had been when the present phase began.
        self._steps_before_phase = 0
        for index in range(OP_GROUP, OP_LEFT + 1):
            self._words[index] = 0
        for index in range(PHASE_TOTALS, END_OF_TOTALS):
            self._words[index] = 0
        self._publish()
        about = (rank, world_size, attempt, os.getpid(), records)
        IDENTITY.pack_into(self._map, IDENTITY_AT, MAGIC, *about)

    def phase(self, phase: Phase) -> None:
        """Say what the rank is busy with from now on."""
        now_ns = node_time_ns()
        self._words[PHASE_TOTALS + self._phase] += now_ns - self._phase_since_ns
        ended = SpanRecord(
            phase=self._phase,
            start_ns=self._phase_since_ns,
            end_ns=now_ns,
            waited_ns=self._op_ns,
        )
        self._spend(ended)
        self._phase = phase
        self._phase_since_ns = now_ns
        self._op_ns = 0
        self._steps_before_phase = self._steps
        self.add_span(ended)

    def begin_step(self) -> int:
        """Note that what goes on from now on is of the next step, and nothing before is.

        Returns the present time. Without it a step begins where the one before has ended.
        """
        now_ns = node_time_ns()
        self._begin_parts(now_ns)
        return now_ns

    def mark(self, mark: StartMark, at_ns: int | None = None) -> None:
        """Note a moment of the start."""
        self._words[MARKS + mark] = at_ns or node_time_ns()

    def resumed(self, step: int) -> None:
        """Say after which step this attempt goes on (0: from the beginning)."""
        self._resumed_step = step
        self._completed_step = step
        self._publish()

    def enter(
        self, op: Op, group: Group, detail: int = -1, peer: int = -1, message: int = -1
    ) -> int:
        """Note that an operation starts; returns its sequence number in the group.

        `detail`, `peer` and `message` are as in `OpRecord`.
        """
        seq = self._seqs[group] + 1
        self._seqs[group] = seq
        start_ns = node_time_ns()
        self._entered = (op, group, seq, detail, peer, message, start_ns)
        words = self._words
        words[OP_LEFT] = 0
        words[OP_GROUP] = op | group << 32
        words[OP_SEQ] = seq
        words[OP_DETAIL] = detail
        words[OP_PEER] = peer
        words[OP_ENTERED] = start_ns
        words[GROUP_SEQS + group] = seq
        return seq

    def leave(self, departed_ns: int = 0) -> None:
        """Note that the operation entered last has ended; `departed_ns` is as in `OpRecord`."""
        end_ns = node_time_ns()
        self._words[OP_LEFT] = end_ns
        # Not of what a device does: it may do that in another phase of the host.
        self._op_ns += end_ns - self._entered[-1]
        self._keep(self._entered, end_ns, departed_ns)

    def stands_in(self, operation: OpRecord) -> None:
        """Note that a device has come to an operation that was entered before.

        A device does later what it is given: this says which of it holds it up.
        """
        words = self._words
        words[OP_LEFT] = 0
        words[OP_GROUP] = operation.op | operation.group << 32
        words[OP_SEQ] = operation.seq
        words[OP_DETAIL] = operation.detail
        words[OP_PEER] = operation.peer
        words[OP_ENTERED] = operation.start_ns
        words[GROUP_SEQS + operation.group] = operation.seq

    def waits_for_device(self) -> None:
        """Note that the host gives a device no more work until it has caught up.

        Until then the box said what was given last; from now on it says how far the
        device has come, first of all to the end of the last operation that has ended.
        """
        if self._ended is not None:
            self.stands_in(self._ended)
            self._words[OP_LEFT] = self._ended.end_ns
            for group, seq in self._device_seqs.items():
                self._words[GROUP_SEQS + group] = seq

    def ended(self, operation: OpRecord) -> None:
        """Note that a device has left an operation; the operation entered last may be another."""
        self._ended = operation
        self._device_seqs[operation.group] = operation.seq
        words = self._words
        here = (operation.op | operation.group << 32, operation.seq)
        if (words[OP_GROUP], words[OP_SEQ]) == here:
            words[OP_LEFT] = operation.end_ns
        entered = (
            operation.op,
            operation.group,
            operation.seq,
            operation.detail,
            operation.peer,
            operation.message,
            operation.start_ns,
        )
        self._keep(entered, operation.end_ns, operation.departed_ns)

    def _keep(
        self, entered: tuple[int, int, int, int, int, int, int], end_ns: int, departed_ns: int
    ) -> None:
        """Put an operation that has ended into the ring; `entered` as `enter` noted it."""
        at = OPS_AT + self._ops % self._rings.records * OP_RECORD.size
        op, group, seq, detail, peer, message, start_ns = entered
        self._ops += 1
        # Those of a device may overlap; one that lies around an earlier one counts from its end.
        until_ns = self._waited_until_ns
        if end_ns > until_ns:
            self._waited_ns += end_ns - (start_ns if start_ns > until_ns else until_ns)
            self._waited_until_ns = end_ns
        self._words[OP_TOTALS + self._phase * len(Group) + group] += end_ns - start_ns
        # Of a message that left while it was waited for, the wait has all of its time.
        departed_ns = departed_ns if departed_ns < start_ns else 0
        about = (op, group, peer, seq, detail, message)
        OP_RECORD.pack_into(self._map, at, *about, start_ns, end_ns, departed_ns, self._ops)
        self._publish()

    def add_span(self, span: SpanRecord) -> None:
        """Note a pass that has ended. Phases are noted by `phase`."""
        if span.work:
            own_ns = span.end_ns - span.start_ns - span.waited_ns
            if own_ns > 0:
                self._spent_ns[_PART_OF_PASS[span.work]] += own_ns
        at = self._rings.spans_at + self._spans % self._rings.records * SPAN_RECORD.size
        self._spans += 1
        SPAN_RECORD.pack_into(
            self._map,
            at,
            span.phase,
            span.work,
            span.chunk,
            span.micro_batch,
            span.start_ns,
            span.end_ns,
            span.waited_ns,
            self._spans,
        )
        self._publish()

    def expect(self, expected: Expected) -> None:
        """Note what the rank should need, before it trains."""
        self._words[EXPECTED_MEMORY] = expected.memory_bytes
        self._words[EXPECTED_BUBBLE] = round(expected.bubble * PARTS_PER_UNIT)

    def used(self, use: StepUse) -> None:
        """Add what a step used."""
        words = self._words
        words[FORWARD] += use.forward_ns
        words[BACKWARD] += use.backward_ns
        words[BUSY] += use.busy_ns
        words[WAITED] += use.waited_ns
        for group, hidden_ns in use.hidden_ns.items():
            words[HIDDEN + group] += hidden_ns
        for group, sent_bytes in use.sent_bytes.items():
            words[SENT + group] += sent_bytes
        words[DATA_WAIT] += use.data_wait_ns
        words[DATA_WAITS] += use.data_waits
        words[PEAK_MEMORY] = use.peak_memory_bytes

    def completed(self, record: StepRecord) -> None:
        """Note a completed step, with its figures."""
        for name, loss in record.eval_losses.items():
            at = EVALS_AT + self._evals % NUM_EVAL_RECORDS * EVAL_RECORD.size
            self._evals += 1
            EVAL_RECORD.pack_into(self._map, at, record.step, name.encode(), loss, self._evals)
        self._keep_parts(record)
        at = STEPS_AT + self._steps % NUM_STEP_RECORDS * STEP_RECORD.size
        self._steps += 1
        eval_loss = float("nan") if record.eval_loss is None else record.eval_loss
        STEP_RECORD.pack_into(
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

    def _spend(self, phase: SpanRecord) -> None:
        """Count a phase that ends as a part of the step under way, or of the one before."""
        part = _PART_OF_PHASE[phase.phase]
        own_ns = phase.end_ns - phase.start_ns - phase.waited_ns
        if part < 0 or own_ns <= 0:
            return
        before = self._steps_before_phase
        if part < _FIRST_BEHIND:
            # Once a step has ended, what is left of its last phase is no part of it.
            if before == self._steps:
                self._spent_ns[part] += own_ns
        elif before:
            self._words[self._parts_at(before - 1) + PART_SPENT + part] += own_ns

    def _keep_parts(self, record: StepRecord) -> None:
        """Put what the step was spent on into the ring, before the step itself."""
        part = _PART_OF_PHASE[self._phase]
        if 0 <= part < _FIRST_BEHIND and self._steps_before_phase == self._steps:
            own_ns = record.end_ns - self._phase_since_ns - self._op_ns
            self._spent_ns[part] += max(0, own_ns)
        words, at = self._words, self._parts_at(self._steps)
        words[at + PART_INDEX] = 0
        words[at + PART_STEP] = record.step
        words[at + PART_LENGTH] = min(MAX_NS, max(0, record.end_ns - record.start_ns))
        words[at + PART_WAITED] = self._waited_ns
        for index, spent_ns in enumerate(self._spent_ns, start=at + PART_SPENT):
            words[index] = spent_ns
        words[at + PART_INDEX] = self._steps + 1
        self._begin_parts(record.end_ns)

    def _begin_parts(self, at_ns: int) -> None:
        self._spent_ns = [0] * len(StepPart)
        self._waited_ns = 0
        self._waited_until_ns = max(self._waited_until_ns, at_ns)

    def _parts_at(self, index: int) -> int:
        return PARTS_AT // 8 + index % NUM_STEP_RECORDS * PART_WORDS

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _publish(self) -> None:
        words = self._words
        words[RESUMED] = self._resumed_step
        words[PHASE] = self._phase
        words[PHASE_SINCE] = self._phase_since_ns
        # Before the steps: a reader takes each step once, with the evaluations that are there then.
        words[EVALS_WRITTEN] = self._evals
        words[STEPS_WRITTEN] = self._steps
        words[OPS_WRITTEN] = self._ops
        words[SPANS_WRITTEN] = self._spans
        words[COMPLETED] = self._completed_step


def _allocate(handle: int, path: str | Path, nbytes: int) -> None:
    """Take the whole file's room on its disk now.

    A store into a page that a full disk has no block for ends the process by SIGBUS, and nobody
    would say why.
    """
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        message = f"black box {path}: no room for its {nbytes} bytes: {error.strerror}"
        raise OSError(error.errno, message) from error
    # One of an earlier process may be longer.
    os.ftruncate(handle, nbytes)
