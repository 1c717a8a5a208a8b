"""States of jobs, nodes and incidents, and every transition that exists.

The tables are the specification: the machine raises `InvalidTransitionError`
for anything that is not in them, and the diagrams in the documentation are
drawn from them. What triggers a transition is in `steps`, `acting`, `requests`,
`losses` and `fleet`.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "QUEUED"  # has no nodes, and waits for its turn
    PROVISIONING = "PROVISIONING"  # some places have no node
    PREFLIGHT = "PREFLIGHT"  # nodes are being checked before use
    STARTING = "STARTING"  # workers are started; no common step yet
    RUNNING = "RUNNING"
    SUSPENDING = "SUSPENDING"  # workers are being stopped
    DIAGNOSING = "DIAGNOSING"  # suspected nodes are being checked
    REPAIRING = "REPAIRING"  # bad nodes are being replaced
    RESTARTING = "RESTARTING"  # the next attempt is about to start
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class NodeState(StrEnum):
    """Where a node stands, whoever uses it."""

    READY = "READY"  # free
    STANDBY = "STANDBY"  # free, checked, held for whoever loses a node
    ASSIGNED = "ASSIGNED"  # a job's
    SUSPECT = "SUSPECT"  # a job's, and a recent fault started here
    DRAINING = "DRAINING"  # a person wants it empty; its job is moving away
    QUARANTINED = "QUARANTINED"  # excluded, with a session
    DRAINED = "DRAINED"  # excluded and empty
    REPAIRING = "REPAIRING"  # failed its checks; a person must act
    VALIDATING = "VALIDATING"  # being checked before it may come back
    RETIRED = "RETIRED"  # gone for good, unless it joins anew
    RELEASED = "RELEASED"  # the cluster's again, with no blame; free when it joins anew


class IncidentState(StrEnum):
    """How far an incident has come."""

    OPEN = "OPEN"
    EVIDENCE = "EVIDENCE"  # workers are stopped, changes are gathered
    VERDICT = "VERDICT"
    ACTING = "ACTING"
    VERIFYING = "VERIFYING"  # training again, not yet past the fault
    CLOSED = "CLOSED"


class InvalidTransitionError(AssertionError):
    """The machine tried a transition that the tables do not have: our mistake."""


JOB_TRANSITIONS: dict[JobState, tuple[JobState, ...]] = {
    JobState.QUEUED: (
        JobState.PROVISIONING,
        JobState.PAUSED,
        JobState.CANCELLED,
        JobState.FAILED,
    ),
    JobState.PROVISIONING: (
        JobState.PREFLIGHT,
        JobState.QUEUED,
        JobState.PAUSED,
        JobState.CANCELLED,
    ),
    JobState.PREFLIGHT: (
        JobState.STARTING,
        JobState.PROVISIONING,
        JobState.QUEUED,
        JobState.PAUSED,
        JobState.CANCELLED,
    ),
    JobState.STARTING: (JobState.RUNNING, JobState.SUSPENDING, JobState.SUCCEEDED),
    JobState.RUNNING: (JobState.SUSPENDING, JobState.SUCCEEDED),
    JobState.SUSPENDING: (
        JobState.DIAGNOSING,
        JobState.REPAIRING,
        JobState.RESTARTING,
        JobState.QUEUED,
        JobState.SUCCEEDED,
        JobState.PAUSED,
        JobState.CANCELLED,
        JobState.FAILED,
    ),
    JobState.DIAGNOSING: (
        JobState.REPAIRING,
        JobState.RESTARTING,
        JobState.PAUSED,
        JobState.CANCELLED,
        JobState.FAILED,
    ),
    JobState.REPAIRING: (
        JobState.PREFLIGHT,
        JobState.PROVISIONING,
        JobState.PAUSED,
        JobState.CANCELLED,
    ),
    JobState.RESTARTING: (JobState.STARTING, JobState.PROVISIONING),
    JobState.PAUSED: (JobState.QUEUED, JobState.SUCCEEDED, JobState.CANCELLED),
    JobState.SUCCEEDED: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}

NODE_TRANSITIONS: dict[NodeState, tuple[NodeState, ...]] = {
    NodeState.READY: (
        NodeState.STANDBY,
        NodeState.ASSIGNED,
        NodeState.QUARANTINED,
        NodeState.DRAINED,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.STANDBY: (
        NodeState.READY,
        NodeState.ASSIGNED,
        NodeState.QUARANTINED,
        NodeState.DRAINED,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.ASSIGNED: (
        NodeState.READY,
        NodeState.SUSPECT,
        NodeState.DRAINING,
        NodeState.VALIDATING,
        NodeState.QUARANTINED,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.SUSPECT: (
        NodeState.ASSIGNED,
        NodeState.READY,
        NodeState.DRAINING,
        NodeState.VALIDATING,
        NodeState.QUARANTINED,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.DRAINING: (
        NodeState.DRAINED,
        NodeState.ASSIGNED,
        NodeState.QUARANTINED,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.QUARANTINED: (
        NodeState.DRAINED,
        NodeState.READY,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.DRAINED: (
        NodeState.VALIDATING,
        NodeState.READY,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.VALIDATING: (
        NodeState.READY,
        NodeState.QUARANTINED,
        NodeState.DRAINED,
        NodeState.REPAIRING,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.REPAIRING: (
        NodeState.READY,
        NodeState.VALIDATING,
        NodeState.RETIRED,
        NodeState.RELEASED,
    ),
    NodeState.RETIRED: (NodeState.VALIDATING, NodeState.READY, NodeState.RELEASED),
    NodeState.RELEASED: (NodeState.READY,),
}

INCIDENT_TRANSITIONS: dict[IncidentState, tuple[IncidentState, ...]] = {
    IncidentState.OPEN: (IncidentState.EVIDENCE, IncidentState.CLOSED),
    IncidentState.EVIDENCE: (IncidentState.VERDICT, IncidentState.CLOSED),
    IncidentState.VERDICT: (
        IncidentState.ACTING,
        IncidentState.EVIDENCE,
        IncidentState.CLOSED,
    ),
    IncidentState.ACTING: (
        IncidentState.VERIFYING,
        IncidentState.EVIDENCE,
        IncidentState.CLOSED,
    ),
    IncidentState.VERIFYING: (IncidentState.CLOSED, IncidentState.EVIDENCE),
    IncidentState.CLOSED: (),
}

TERMINAL = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
# Workers of the current attempt are meant to be alive in these.
AT_WORK = (JobState.STARTING, JobState.RUNNING)
# And may be in these.
LIVE = (*AT_WORK, JobState.SUSPENDING)
# Nodes in these states carry a job's place.
PLACED = (NodeState.ASSIGNED, NodeState.SUSPECT, NodeState.DRAINING)
# Free to be given to a job.
FREE = (NodeState.READY, NodeState.STANDBY)
# What its last checks have said of a node holds on between these states, and no longer: else a
# job may have used it since, or something spoke against it.
STAYS_CHECKED = frozenset(
    {
        (NodeState.READY, NodeState.STANDBY),
        (NodeState.STANDBY, NodeState.READY),
        (NodeState.READY, NodeState.ASSIGNED),
        (NodeState.STANDBY, NodeState.ASSIGNED),
        (NodeState.ASSIGNED, NodeState.SUSPECT),
        (NodeState.SUSPECT, NodeState.ASSIGNED),
        (NodeState.VALIDATING, NodeState.READY),
    }
)
EXCLUDED = (
    NodeState.QUARANTINED,
    NodeState.DRAINED,
    NodeState.REPAIRING,
    NodeState.VALIDATING,
    NodeState.RETIRED,
    NodeState.RELEASED,
)
# Nobody expects to hear of a node in these.
AWAY = (NodeState.RETIRED, NodeState.RELEASED)


def check_job(old: JobState, new: JobState, what: str) -> None:
    """Raise InvalidTransitionError unless the table has `old` -> `new`."""
    if new not in JOB_TRANSITIONS[old]:
        raise InvalidTransitionError(f"job {what}: {old} -> {new} is not a transition")


def check_node(old: NodeState, new: NodeState, what: str) -> None:
    """Raise InvalidTransitionError unless the table has `old` -> `new`."""
    if new not in NODE_TRANSITIONS[old]:
        raise InvalidTransitionError(f"node {what}: {old} -> {new} is not a transition")


def check_incident(old: IncidentState, new: IncidentState, what: str) -> None:
    """Raise InvalidTransitionError unless the table has `old` -> `new`."""
    if new not in INCIDENT_TRANSITIONS[old]:
        raise InvalidTransitionError(f"incident {what}: {old} -> {new} is not a transition")
