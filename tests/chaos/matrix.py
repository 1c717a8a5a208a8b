"""Which fault strikes at which moment of which job: the full matrix, and a subset of it.

A row is one job with one fault at one moment. Not every combination means something: a rank
that computes nothing cannot compute a NaN, and while nodes are diagnosed no rank runs.
The full matrix has every row that means something; a subset covers every fault, and every
pair of the other properties, with as few rows as a greedy choice finds. Another seed
chooses other rows.

What does not belong here: how a fault is struck (`orders`, `strikes`), and what is expected
of it (`expected`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import product


class Fault(StrEnum):
    """What goes wrong."""

    KILLED = "sigkill"
    STOPPED = "sigstop"
    # A node that is stopped, replaced, and then wakes up.
    ZOMBIE = "zombie"
    EXIT = "exit-code"
    EXCEPTION = "exception"
    # Two collectives in another order than on the other ranks.
    DEADLOCK = "deadlock"
    NAN = "nan"
    # The highest bit of the exponent, in one element of one rank's gradient.
    BIT_FLIP = "bit-flip"
    STARVED = "cpu-starved"
    STANDBY = "standby-killed"
    AGENT = "agent-killed"
    # Started again at once, under the same name.
    AGENT_BACK = "agent-restarted"
    NODE = "node-killed"
    CONTROLLER = "controller-killed"
    SILENT = "controller-silent"
    # Alive, and out of reach.
    PARTITION = "controller-partitioned"
    # To the end; and other jobs asked before for memory and GPUs that no node has.
    DISK_FULL = "disk-full"
    STORE_DOWN = "store-down"
    STORE_SILENT = "store-silent"
    # One node's wall clock goes forward by an hour; then by other amounts.
    CLOCK = "clock-jump"
    CLOCK_BACK = "clock-hour-back"
    CLOCK_DAY = "clock-day"
    CLOCK_DAY_BACK = "clock-day-back"
    # The controller's own.
    OWN_CLOCK = "controller-clock-hour"
    OWN_CLOCK_BACK = "controller-clock-hour-back"
    OWN_CLOCK_DAY = "controller-clock-day"
    OWN_CLOCK_DAY_BACK = "controller-clock-day-back"
    # A rank's black box and its node's agent say what cannot be.
    POISON = "poisoned-report"
    # A bit of the mantissa, in every slot of host memory that one rank has.
    MEMORY_FLIP = "memory-flip"
    # Everything behind the magic word of a rank's black box.
    GARBAGE = "garbage-box"
    # A second agent of the node's name, from folders of its own.
    TWIN = "twin-agent"
    # Everything is stopped in order and started again, ten times.
    PLANNED = "planned-stops"


class Moment(StrEnum):
    """When it strikes."""

    START = "start"
    FIRST_STEP = "first-step"
    STEADY = "steady"
    STAGE_1 = "stage-1"
    UPLOAD = "upload"
    RESTORE = "restore"
    DIAGNOSIS = "diagnosis"
    # Together with SIGKILL of another rank.
    TWICE = "twice"
    # While the ranks start again after another fault.
    RECOVERY = "recovery"


class LayoutName(StrEnum):
    """How the job is spread over its ranks; always over two nodes."""

    DP2 = "dp2"
    PP2 = "pp2"
    TP2_DP2 = "tp2dp2"


class Victim(StrEnum):
    """Whom it strikes: a rank, or its node."""

    FIRST = "first"
    LAST = "last"
    NOBODY = "nobody"


STORE = (Fault.DISK_FULL, Fault.STORE_DOWN, Fault.STORE_SILENT)
_HOUR_S, _DAY_S = 3_600.0, 86_400.0
NODE_CLOCK_STEPS_S: Mapping[Fault, float] = {
    Fault.CLOCK: _HOUR_S,
    Fault.CLOCK_BACK: -_HOUR_S,
    Fault.CLOCK_DAY: _DAY_S,
    Fault.CLOCK_DAY_BACK: -_DAY_S,
}
OWN_CLOCK_STEPS_S: Mapping[Fault, float] = {
    Fault.OWN_CLOCK: _HOUR_S,
    Fault.OWN_CLOCK_BACK: -_HOUR_S,
    Fault.OWN_CLOCK_DAY: _DAY_S,
    Fault.OWN_CLOCK_DAY_BACK: -_DAY_S,
}
# These strike the control plane or the store, and so no rank in particular.
WITHOUT_VICTIM = (
    *(Fault.CONTROLLER, Fault.SILENT, Fault.PARTITION, Fault.PLANNED),
    *(*STORE, *OWN_CLOCK_STEPS_S),
)
# Their job is followed by another one: nothing of the fault may be left on the fleet.
FOLLOWED = (
    *(Fault.AGENT_BACK, Fault.DISK_FULL, Fault.MEMORY_FLIP, Fault.GARBAGE, Fault.TWIN),
    *(Fault.PLANNED, Fault.POISON, *NODE_CLOCK_STEPS_S, *OWN_CLOCK_STEPS_S),
)
# Controller and agents live through these.
ENDS_NOBODY = (Fault.GARBAGE, Fault.POISON, *NODE_CLOCK_STEPS_S, *OWN_CLOCK_STEPS_S)
# Carried out by the rank itself.
INSIDE = (Fault.EXIT, Fault.EXCEPTION, Fault.DEADLOCK, Fault.NAN, Fault.BIT_FLIP)
_OF_A_STEP = (Fault.DEADLOCK, Fault.NAN, Fault.BIT_FLIP)
# What strikes something that is there while no rank runs.
_WITHOUT_RANKS = (
    *(Fault.STANDBY, Fault.AGENT, Fault.AGENT_BACK, Fault.NODE, Fault.POISON),
    *(Fault.CONTROLLER, Fault.SILENT, Fault.PARTITION, *STORE),
    *(*NODE_CLOCK_STEPS_S, *OWN_CLOCK_STEPS_S),
)

# While ranks run, or did a moment ago.
_WITH_RANKS = (Moment.STEADY, Moment.STAGE_1, Moment.UPLOAD, Moment.DIAGNOSIS)
# Each with other deadlines, and other things that are reported.
_REPORTED = (Moment.START, Moment.STEADY, Moment.UPLOAD, Moment.DIAGNOSIS)

# Properties whose pairs a subset covers. Faults by moments are left to the seeds: they alone
# would be 147 rows.
_PAIRS = (
    ("fault", "victim"),
    ("moment", "layout"),
    ("moment", "victim"),
    ("layout", "victim"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One job and one fault."""

    fault: Fault
    moment: Moment
    layout: LayoutName
    victim: Victim

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.fault}@{self.moment}/{self.layout}/{self.victim}"


def has_meaning(row: Row) -> bool:
    """Whether this fault can strike this victim at this moment."""
    if (row.victim is Victim.NOBODY) != (row.fault in WITHOUT_VICTIM):
        return False
    if row.fault is Fault.MEMORY_FLIP:
        # Nobody reads host memory before something else has the ranks start again.
        return row.moment is Moment.TWICE
    if row.fault in (Fault.GARBAGE, Fault.TWIN):
        # Whose box or name it is, makes no difference.
        return row.moment is Moment.STEADY and row.victim is Victim.LAST
    if row.fault is Fault.PLANNED:
        return row.moment is Moment.STEADY
    if row.fault is Fault.POISON:
        return row.moment in _REPORTED
    if row.fault in OWN_CLOCK_STEPS_S:
        # How the ranks are spread, no clock knows.
        return row.moment in _REPORTED and row.layout is LayoutName.DP2
    if row.fault in NODE_CLOCK_STEPS_S and row.fault is not Fault.CLOCK:
        # Of the node that reports the steps. An hour forward, every node has at every moment.
        is_reporting = row.layout is LayoutName.DP2 and row.victim is Victim.FIRST
        return row.moment in _REPORTED and is_reporting
    if row.fault is Fault.EXCEPTION and row.moment in (Moment.START, Moment.FIRST_STEP):
        # Before the first step it ends the job, which rows are not about.
        return False
    if row.fault is Fault.AGENT_BACK:
        # Before its ranks run, there is nothing to blame it for.
        return row.moment in _WITH_RANKS
    match row.moment:
        case Moment.DIAGNOSIS:
            return row.fault in _WITHOUT_RANKS
        case Moment.FIRST_STEP | Moment.STEADY | Moment.UPLOAD:
            return True
        case Moment.RECOVERY:
            return row.fault is not Fault.ZOMBIE
        case _:
            # A node that sleeps through a start is one that never took part, and a step whose
            # other rank is gone computes nothing that could be wrong.
            return row.fault not in _OF_A_STEP and not (
                row.fault is Fault.ZOMBIE and row.moment in (Moment.START, Moment.RESTORE)
            )


def is_lasting(row: Row) -> bool:
    """Whether the fault goes on until somebody is told of it.

    A rank is called slow after three windows of ten seconds, and only beside equals: stages
    of a pipeline have none of two ranks. At the other moments it is slow for a few seconds,
    which is no fault yet.
    """
    return (
        row.fault is Fault.STARVED
        and row.moment is Moment.STEADY
        and row.layout is not LayoutName.PP2
    )


def full() -> tuple[Row, ...]:
    """Every row that means something."""
    rows = (Row(*each) for each in product(Fault, Moment, LayoutName, Victim))
    return tuple(row for row in rows if has_meaning(row))


def subset(seed: int, *, is_brief: bool = False) -> tuple[Row, ...]:
    """Rows that cover every fault and every pair of the other properties; brief: all of these."""
    covered_by = properties if is_brief else pairs
    rows = list(full())
    random.Random(seed).shuffle(rows)
    uncovered = {each for row in rows for each in covered_by(row)}
    chosen: list[Row] = []
    while uncovered:
        best = max(rows, key=lambda row: len(uncovered.intersection(covered_by(row))))
        chosen.append(best)
        uncovered.difference_update(covered_by(best))
    return tuple(chosen)


def properties(row: Row) -> Iterator[tuple[str, ...]]:
    """What is covered of each property."""
    for field in fields(row):
        yield field.name, getattr(row, field.name)


def pairs(row: Row) -> Iterator[tuple[str, ...]]:
    """The pairs of properties that this row covers."""
    for one, other in _PAIRS:
        yield one, getattr(row, one), other, getattr(row, other)


def named(name: str, rows: Sequence[Row]) -> Row:
    """The row of this name.

    Raises:
        ValueError: there is none.
    """
    for row in rows:
        if row.name == name:
            return row
    raise ValueError(f"--only {name!r}: no such row; one is {rows[0].name}")
