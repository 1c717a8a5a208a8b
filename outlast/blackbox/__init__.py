"""The black box: a fixed-size memory-mapped file in which a rank notes what it does.

The worker writes with plain stores into shared pages, so there is no system
call in the hot path and the record outlives the process. The node agent reads
it without asking the worker: heartbeats, hang culprits, the loss curve and the
crash report all come from here. `file` has the layout, `records` the words.

What does not belong here: decisions. This is a recorder.
"""

from outlast.blackbox.file import NUM_STEP_RECORDS, BlackBoxError
from outlast.blackbox.opening import open_black_box
from outlast.blackbox.reader import Reader
from outlast.blackbox.records import (
    Expected,
    Group,
    Op,
    Operation,
    OpRecord,
    Pass,
    Phase,
    Present,
    SpanRecord,
    StartMark,
    StepPart,
    StepParts,
    StepRecord,
    StepUse,
    TimeUse,
    bubble_of,
)
from outlast.blackbox.writer import Writer

__all__ = [
    "NUM_STEP_RECORDS",
    "BlackBoxError",
    "Expected",
    "Group",
    "Op",
    "OpRecord",
    "Operation",
    "Pass",
    "Phase",
    "Present",
    "Reader",
    "SpanRecord",
    "StartMark",
    "StepPart",
    "StepParts",
    "StepRecord",
    "StepUse",
    "TimeUse",
    "Writer",
    "bubble_of",
    "open_black_box",
]
