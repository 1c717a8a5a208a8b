"""The file of a black box: where its words and records lie.

Six areas:

- a header with the rank's present: phase, last completed step, last operation
  *entered*, of all and of each group; with running totals of the time spent in each
  phase, and in operations within it; and with what its steps used, beside what was
  expected of them;
- a ring of step records (loss, gradient norm, ...), read by the agent exactly
  once each;
- a ring of what the same steps were spent on, so that it is known for longer than operations and
  spans are kept;
- a ring of evaluation records, the losses of held-out sets with names, each written before the
  record of its step;
- a ring of operation records (group, sequence number, micro-batch, peer, start, end, and when its
  messages left);
- a ring of span records: phases, and the passes within them, with what they waited for others.

The header says how many records the last two have: a job may ask for more.

A ring entry is valid when the index stored at its end equals the index it was
written for; the writer stores that last, so a torn entry is never taken for a
whole one. The header is made of 64-bit words, each stored and loaded whole:
`struct.pack_into` clears its target first, so a reader would see zeros now and
then (measured: 3 reads in 1,000).

Times are `outlast.clock.node_time_ns()` at the ends of operations and steps: all processes of
a node share that clock, and no step of the wall clock moves it. Operations of a device have
the moments at which it came to them and left them, by the same clock; they are noted when the
host learns of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from outlast.blackbox.records import Group, Phase, StepPart
from outlast.worker_contract import BLACK_BOX_RECORDS

MAGIC = b"OUTLBB07"
HEADER_BYTES = 4096
# A heat map shows 1,000 steps; 72 KiB of a box, and 80 KiB of what they were spent on.
NUM_STEP_RECORDS = 1024

# magic, rank, world size, attempt, pid, records
IDENTITY = struct.Struct("<8sIIqqq")
IDENTITY_AT = 0
# Index of the header's 64-bit words: completed step, resumed step, phase, phase since
# (ns), steps written, ops written, spans written; evaluations written.
COMPLETED, RESUMED, PHASE, PHASE_SINCE, STEPS_WRITTEN, OPS_WRITTEN, SPANS_WRITTEN = range(8, 15)
EVALS_WRITTEN = 15
# op + group * 2**32, sequence, detail, peer, entered at (ns), left at (ns)
OP_GROUP, OP_SEQ, OP_DETAIL, OP_PEER, OP_ENTERED, OP_LEFT = range(16, 22)
MARKS = 32  # one (ns) per StartMark
# Time spent so far: one (ns) per Phase that has ended. At the end of the header, where there is
# room for more phases, one (ns) per Phase and Group in operations that have ended.
PHASE_TOTALS = 48
OP_TOTALS = 192
# What steps used so far: forward, backward, busy and waiting in the pipeline (ns); then one
# (ns) per Group of communication that was hidden, one (bytes) per Group that was sent.
FORWARD, BACKWARD, BUSY, WAITED = range(128, 132)
HIDDEN = 136
SENT = 144
# Peak of the device's memory (bytes), and what was expected: memory (bytes), bubble (ppm).
PEAK_MEMORY, EXPECTED_MEMORY, EXPECTED_BUBBLE = range(152, 155)
# Waiting for a batch: time (ns), and steps.
DATA_WAIT, DATA_WAITS = range(155, 157)
# Sequence number entered last: one per Group.
GROUP_SEQS = 160
END_OF_TOTALS = OP_TOTALS + len(Phase) * len(Group)
PARTS_PER_UNIT = 1_000_000

# step, loss, grad norm, learning rate, tokens, start (ns), end (ns), eval loss, index
STEP_RECORD = struct.Struct("<qdddqQQdQ")
STEP_RECORD_INDEX_AT = STEP_RECORD.size - 8
# op, group, peer, sequence, detail, message, start (ns), end (ns), departed (ns), index
OP_RECORD = struct.Struct("<HHiQiiQQQQ")
# phase, pass, chunk, micro-batch, start (ns), end (ns), waited (ns), index
SPAN_RECORD = struct.Struct("<HHIqQQQQ")

# step, name of the held-out set, loss, index
EVAL_RECORD = struct.Struct("<q48sdQ")

STEPS_AT = HEADER_BYTES
EVALS_AT = STEPS_AT + NUM_STEP_RECORDS * STEP_RECORD.size
# Seven evaluations of 16 sets, the most that there may be: they are read with the steps, several
# times a second.
NUM_EVAL_RECORDS = 112
PARTS_AT = EVALS_AT + NUM_EVAL_RECORDS * EVAL_RECORD.size
# In 64-bit words, each stored whole: step, its length and time in operations (ns), then one (ns)
# per `StepPart`; index. What follows a step is added to its record.
PART_STEP, PART_LENGTH, PART_WAITED = range(3)
PART_SPENT = 3
PART_INDEX = PART_SPENT + len(StepPart)
PART_WORDS = PART_INDEX + 1
OPS_AT = PARTS_AT + NUM_STEP_RECORDS * PART_WORDS * 8


@dataclass(frozen=True, slots=True)
class Rings:
    """Where the rings lie whose length a job may choose."""

    records: int = BLACK_BOX_RECORDS

    @property
    def spans_at(self) -> int:
        return OPS_AT + self.records * OP_RECORD.size

    @property
    def file_bytes(self) -> int:
        return self.spans_at + self.records * SPAN_RECORD.size


# The agent reads them several times a second: listing an enumeration costs more than its words.
PHASES, GROUPS = tuple(Phase), tuple(Group)
OP_TOTALS_AT = tuple(
    ((phase, group), OP_TOTALS + phase * len(GROUPS) + group)
    for phase in PHASES
    for group in GROUPS
)
# Nanoseconds since the epoch until the year 2262, and what a signed word can hold.
MAX_NS = 2**63 - 1


class BlackBoxError(ValueError):
    """The file is not a black box of this version, not yet whole, or whole no longer."""
