"""What older versions wrote differently in the journal, and what this one reads instead.

A field that gets another name, is dropped or is written in another form has its entry here, and
stays here: there is no other way in which an older journal is read. A field that is added needs
none, as it has a default. A test holds the list of all names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from controller.core.attempt_record import AttemptRecord
from controller.core.incident_record import Evidence, TimelineEntry
from controller.core.kinds import EvidenceKind
from controller.core.orders import ForgetJob, StartWorkers, StopWorkers
from controller.core.records import JobPlan, NodeRecord, Size
from controller.core.states import JobState

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
_Value = TypeVar("_Value")

# By record: what a field was called, and what it is called now.
RENAMED: dict[type, dict[str, str]] = {
    JobPlan: {"replica_places": "replica_node_indexes"},
    Size: {"replica_places": "replica_node_indexes"},
    StopWorkers: {"look_first": "capture_stacks"},
}
# By record: fields that nothing reads any more.
DROPPED: dict[type, frozenset[str]] = {
    AttemptRecord: frozenset({"rank_nodes", "world_size"}),
    ForgetJob: frozenset({"keep_memory"}),
    # An order that has all of its attempt is given up; see `Context.send`.
    StartWorkers: frozenset(
        {
            "checkpoint_url",
            "committed_step",
            "rank_nodes",
            "ranks",
            "rendezvous_host",
            "rendezvous_port",
            "replica_peers",
            "spec_json",
            "world_size",
        }
    ),
}


def with_names_of_now(kind: type, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """The fields of a record under the names that they have now, without those dropped since."""
    renamed = RENAMED.get(kind, {})
    dropped = DROPPED.get(kind, frozenset())
    return {renamed.get(name, name): value for name, value in values.items() if name not in dropped}


def _with_detected(data: dict[str, Json]) -> dict[str, Json]:
    """Evidence of a version that wrote what a detector found as the class of a failure."""
    if "detected" in data or data.get("kind") != EvidenceKind.DETECTED:
        return data
    return {**data, "detected": data.get("fault_class") or None, "fault_class": ""}


def _with_nodes_once(data: dict[str, Json]) -> dict[str, Json]:
    """An attempt of a version that wrote the node of each rank."""
    ranks = data.get("rank_nodes")
    if "nodes" in data or not isinstance(ranks, list):
        return data
    nodes = list(dict.fromkeys(map(str, ranks)))
    return {**data, "nodes": [*nodes], "workers_per_node": len(ranks) // max(1, len(nodes))}


def _with_quarantined_s(data: dict[str, Json]) -> dict[str, Json]:
    """A node of a version that read from the session's id when its quarantine began."""
    session = data.get("quarantine")
    if not session or "quarantined_s" in data:
        return data
    return {**data, "quarantined_s": float(str(session).rpartition("/")[2])}


def _with_state(data: dict[str, Json]) -> dict[str, Json]:
    """A line of a timeline of a version that knew a job's state by its name in small letters."""
    if "state" in data:
        return data
    phase = str(data.get("phase"))
    entered = phase.upper() if phase.upper() in JobState.__members__ else None
    return {**data, "state": entered, "is_verdict": phase == "verdict"}


# By record: what rewrites the form that an older version gave it.
UPGRADES: dict[type, Callable[[dict[str, Json]], dict[str, Json]]] = {
    Evidence: _with_detected,
    AttemptRecord: _with_nodes_once,
    NodeRecord: _with_quarantined_s,
    TimelineEntry: _with_state,
}
