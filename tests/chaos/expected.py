"""What each row must come to, and whether it did.

The terminal state of every row is SUCCEEDED: none of these faults is deterministic in the
job itself, and its layout is never another one. So losses are bitwise those of the fault-free
run in every row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.matrix import (
    NODE_CLOCK_STEPS_S,
    OWN_CLOCK_STEPS_S,
    STORE,
    Fault,
    Moment,
    Row,
    Victim,
    is_lasting,
)

# Host memory is sealed every step, and a rank may be struck between a step and its seal.
_REDONE_FROM_MEMORY = 2
# The newest checkpoint in storage may be two intervals old when one was under way.
_REDONE_FROM_STORAGE = 40

_RESTART = ("restart_in_place",)
_REPLACE = ("replace_nodes",)
_NODE_GONE = ("node_lost", "node_unresponsive")
# The same of a rank that ended by itself: the exit, or what the others say of it.
_ENDED = ("worker_killed", "transient", "user_error")
_HUNG = ("hang", "node_unresponsive")
_KILLS_NODE = (Fault.AGENT, Fault.NODE, Fault.ZOMBIE)
# A node takes with it what it was sending to the store; the next upload makes up for it.
_UPLOAD_LOST = ("storage",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a row must come to.

    `causes`: one incident at least has one of these; empty: none is needed. `also` may be
    there besides. `names_victim`: the incident with such a cause blames the victim's node.
    """

    state: str = "SUCCEEDED"
    causes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    names_victim: bool = False
    most_redone: int = _REDONE_FROM_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenIncident:
    """An incident as the controller tells it."""

    cause: str
    action: str
    reason: str
    culprits: tuple[str, ...]
    detection_s: float | None
    recovery_s: float | None
    steps_redone: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a row came to."""

    state: str
    reason: str
    attempts: int
    struck_node: str
    incidents: tuple[SeenIncident, ...]
    losses_equal: bool
    # Where they begin to differ.
    first_difference: int | None
    wall_s: float
    # How long the job that follows waited for its nodes; None where none follows.
    next_queued_s: float | None = None
    # What was found after everything had ended, or went wrong on the way.
    trouble: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signs:
    """Of a fault alone, at a steady moment."""

    causes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    names_victim: bool = False


_NODE_SIGNS = _Signs(causes=_NODE_GONE, also=_UPLOAD_LOST, actions=_REPLACE, names_victim=True)
_SIGNS = {
    Fault.KILLED: _Signs(causes=("worker_killed",), actions=_RESTART, names_victim=True),
    Fault.STOPPED: _Signs(causes=_HUNG, actions=_RESTART, names_victim=True),
    Fault.ZOMBIE: _NODE_SIGNS,
    Fault.EXIT: _Signs(causes=_ENDED, actions=_RESTART, names_victim=True),
    Fault.EXCEPTION: _Signs(causes=_ENDED, actions=_RESTART, names_victim=True),
    # The mistake of a program has no culprit among nodes.
    Fault.DEADLOCK: _Signs(causes=("user_error",), actions=_RESTART),
    Fault.NAN: _Signs(causes=("non_finite",), actions=_RESTART, names_victim=True),
    # So large a gradient has no norm: the step is not applied, and done again without the flip.
    Fault.BIT_FLIP: _Signs(
        causes=("non_finite",), also=("spike",), actions=_RESTART, names_victim=True
    ),
    Fault.STARVED: _Signs(also=("straggler", "slowdown")),
    Fault.STANDBY: _Signs(),
    Fault.AGENT: _NODE_SIGNS,
    Fault.AGENT_BACK: _Signs(
        causes=("workers_missing",), also=_UPLOAD_LOST, actions=_RESTART, names_victim=True
    ),
    Fault.NODE: _NODE_SIGNS,
    Fault.CONTROLLER: _Signs(),
    Fault.SILENT: _Signs(),
    Fault.PARTITION: _Signs(),
    # Until there is room again, and what host memory holds is uploaded.
    Fault.DISK_FULL: _Signs(causes=("storage",), actions=("pause",)),
    Fault.STORE_DOWN: _Signs(causes=("storage",)),
    Fault.STORE_SILENT: _Signs(causes=("storage",)),
    **dict.fromkeys((*NODE_CLOCK_STEPS_S, *OWN_CLOCK_STEPS_S), _Signs()),
    Fault.MEMORY_FLIP: _Signs(causes=("silent_corruption",), names_victim=True),
    # The rank goes on, and what it notes next is true again.
    Fault.GARBAGE: _Signs(),
    # The newer one has no workers, nor what was in host memory.
    Fault.TWIN: _Signs(
        causes=("workers_missing",), also=_UPLOAD_LOST, actions=_RESTART, names_victim=True
    ),
    # Nothing has failed.
    Fault.PLANNED: _Signs(),
    Fault.POISON: _Signs(),
}


def expected(row: Row) -> Expectation:
    """What this row must come to."""
    if row.fault is Fault.MEMORY_FLIP:
        # No slot of the rank is left, and the other node has no copy of it.
        return Expectation(
            causes=_SIGNS[row.fault].causes,
            also=("worker_killed", "transient"),
            names_victim=True,
            most_redone=_REDONE_FROM_STORAGE,
        )
    signs = _SIGNS[row.fault]
    if waits_for_store(row):
        signs = _SIGNS[Fault.DISK_FULL]
    causes, also, actions = signs.causes, signs.also, signs.actions
    names_victim = signs.names_victim
    loses_memory = row.fault in (*_KILLS_NODE, Fault.TWIN)
    redone = _REDONE_FROM_STORAGE if loses_memory else _REDONE_FROM_MEMORY
    if row.moment in (Moment.RESTORE, Moment.RECOVERY, Moment.DIAGNOSIS, Moment.TWICE):
        # The other fault of the row has an incident too, or shares this one.
        if row.fault in STORE and row.moment in (Moment.RESTORE, Moment.RECOVERY):
            also, actions = (*also, *_NODE_GONE, "storage", "transient"), ()
            redone = _REDONE_FROM_STORAGE
            # It is well again when the next upload is due.
            causes = _NODE_GONE
        else:
            also, actions = (*also, "worker_killed"), (*actions, *_RESTART)
        if row.moment in (Moment.DIAGNOSIS, Moment.TWICE):
            causes = (*causes, "worker_killed") if causes else ()
            # What is diagnosed is that a rank of the same node was killed.
            names_victim = names_victim and row.moment is Moment.DIAGNOSIS
    if row.moment is Moment.START:
        # It is waited for. One that is silent for a moment has answered late, no more.
        if row.fault is Fault.STORE_DOWN:
            causes = ("storage",)
        elif row.fault is Fault.STORE_SILENT:
            causes, also = (), ("storage",)
    if is_lasting(row):
        causes, also, names_victim = ("straggler",), ("slowdown",), True
    return Expectation(
        causes=causes,
        also=also,
        actions=actions,
        names_victim=names_victim and row.victim is not Victim.NOBODY,
        most_redone=redone,
    )


def waits_for_store(row: Row) -> bool:
    """Whether the job waits for its last checkpoint until a deadline, and is paused then.

    Where the controller's clock steps, the store goes too, so that a deadline has to come; at
    the other moments one is under way when it steps, and must not come.
    """
    if row.fault in OWN_CLOCK_STEPS_S:
        return row.moment in (Moment.STEADY, Moment.UPLOAD)
    return row.fault is Fault.DISK_FULL


def problems(expectation: Expectation, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome, in words; empty when nothing is."""
    found = list(outcome.trouble)
    if outcome.state != expectation.state:
        found.append(f"ended {outcome.state}: {outcome.reason}")
    allowed = (*expectation.causes, *expectation.also)
    for incident in outcome.incidents:
        if incident.cause not in allowed:
            found.append(f"unexpected incident: {incident.cause}: {incident.reason}")
        elif _is_unexpected_action(expectation, incident):
            found.append(f"unexpected action: {incident.action}: {incident.reason}")
        if (incident.steps_redone or 0) > expectation.most_redone:
            found.append(f"{incident.steps_redone} steps redone")
    named = [item for item in outcome.incidents if item.cause in expectation.causes]
    if expectation.causes and not named:
        found.append(f"not detected: no incident of {' or '.join(expectation.causes)}")
    right = any(item.culprits == (outcome.struck_node,) for item in named)
    if expectation.names_victim and named and not right:
        blamed = [", ".join(item.culprits) or "nobody" for item in named]
        found.append(f"{outcome.struck_node} was struck, blamed: {'; '.join(blamed)}")
    if not outcome.losses_equal:
        found.append(f"losses differ from step {outcome.first_difference}")
    return found


def _is_unexpected_action(expectation: Expectation, incident: SeenIncident) -> bool:
    """Something that is told only, as trouble with the store is, has no action."""
    is_ours = incident.cause in expectation.causes and incident.action != ""
    return is_ours and bool(expectation.actions) and incident.action not in expectation.actions
