"""The routes of the JSON API that are one call each: data, from which all else is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import MethodDescriptor

from outlast.v1 import (
    access_pb2,
    diagnostics_pb2,
    incidents_pb2,
    jobs_pb2,
    nodes_pb2,
    ranks_pb2,
    trends_pb2,
)

ROOT = "/api/v1"

_SERVICES = {
    name: service
    for file in (
        access_pb2,
        diagnostics_pb2,
        incidents_pb2,
        jobs_pb2,
        nodes_pb2,
        ranks_pb2,
        trends_pb2,
    )
    for name, service in file.DESCRIPTOR.services_by_name.items()
}


def method(name: str) -> MethodDescriptor:
    """The gRPC method of a name as `Jobs/GetJob`."""
    service, _, called = name.partition("/")
    found: MethodDescriptor = _SERVICES[service].methods_by_name[called]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A route. Parts of its path in braces are fields of the request.

    A GET takes query parameters, anything else a JSON body with the other fields of the request.
    """

    verb: str
    path: str
    method: MethodDescriptor
    what: str
    """In a sentence."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Query parameters, and the field of the request that each is."""
    page: str = ""
    """The parameter that says how many a page of a list has, unless the service itself sees to it
    that an answer without the parameter is no larger than a page."""


def _get(path: str, called: str, what: str, page: str = "", **parameters: str) -> Call:
    return Call(
        verb="GET",
        path=path,
        method=method(called),
        what=what,
        parameters=parameters,
        page=page,
    )


def _post(path: str, called: str, what: str) -> Call:
    return Call(verb="POST", path=path, method=method(called), what=what)


CALLS = (
    _get("/whoami", "Access/WhoAmI", "Who asks, as the controller knows him."),
    _get(
        "/audit",
        "Access/ReadAudit",
        "`most` calls (1,000 by default, up to 10,000) that changed something or were refused, "
        "newest first: since a time, of a `caller`, or all. `after`: `next` of the page before, "
        "which is of newer ones. For admins.",
        most="most",
        since_s="since_s",
        caller="caller",
        after="after",
    ),
    _get("/jobs/{job_id}", "Jobs/GetJob", "A job."),
    _get(
        "/jobs/{job_id}/history",
        "Jobs/GetHistory",
        "The `most` newest states that a job went through (1,000 by default, up to 10,000), and as "
        "many of its committed checkpoints, oldest first; `only` `states`, or `checkpoints`. "
        "`after`, with the same `only`: `next` of the page before, which is of newer ones.",
        most="most",
        after="after",
        only="only",
    ),
    _post("/jobs/{job_id}/pause", "Jobs/PauseJob", "Stop a job so that it can go on later."),
    _post("/jobs/{job_id}/resume", "Jobs/ResumeJob", "Let a paused job go on."),
    _post("/jobs/{job_id}/cancel", "Jobs/CancelJob", "End a job for good."),
    _get(
        "/jobs/{job_id}/ranks",
        "Ranks/ListRanks",
        "What each rank was last heard to do; up to 4,096 from `first` on.",
        first="first",
        most="most",
    ),
    _get(
        "/jobs/{job_id}/trends",
        "Trends/GetJobTrends",
        "How MFU, periodic stalls and late launches have changed over days and weeks; with the 100 "
        "of its nodes that are most often the slowest.",
    ),
    _get(
        "/node-statistics",
        "Trends/ListNodeStatistics",
        "How `most` nodes (100 by default, up to 1,000), or one `node`, compared with their peers "
        "over some days, those that are often the slowest first. `after`: `next` of the page "
        "before.",
        page="most",
        days="days",
        node="node",
        most="most",
        after="after",
    ),
    _get(
        "/incidents",
        "Incidents/ListIncidents",
        "The `newest` incidents (100 by default, up to 1,000), oldest first: of a `job`, of those "
        "that a `node` has to do with, or of all. `after`: `next` of the page before, which is of "
        "newer ones. Brief ones have no evidence and timeline.",
        page="newest",
        job="job_id",
        node="node",
        newest="newest",
        after="after",
        brief="brief",
    ),
    _get("/incidents/{incident_id}", "Incidents/GetIncident", "An incident with its evidence."),
    _get(
        "/nodes",
        "Nodes/ListNodes",
        "`most` nodes (100 by default, up to 1,000), those that need attention first: of those in "
        "a `state`, or of all. `after`: `next` of the page before.",
        page="most",
        most="most",
        after="after",
        state="state",
    ),
    _get(
        "/nodes/{node_id}",
        "Nodes/GetNode",
        "A node, with the last changes of its state and what its links carry now.",
    ),
    _post("/nodes/{node_id}/cordon", "Nodes/CordonNode", "Keep new work off a node."),
    _post("/nodes/{node_id}/uncordon", "Nodes/UncordonNode", "Lift a cordon or a quarantine."),
    _post("/nodes/{node_id}/drain", "Nodes/DrainNode", "Cordon a node and move its work away."),
    _post("/nodes/{node_id}/forget", "Nodes/ForgetNode", "Take a node that is gone off the list."),
    _get(
        "/diagnostics",
        "Diagnostics/ListDiagnostics",
        "The `newest` runs of diagnostics (100 by default, up to 1,000), newest first: of those "
        "that checked a `node`, or of all. `after`: `next` of the page before.",
        page="newest",
        node="node",
        newest="newest",
        after="after",
    ),
    _get(
        "/diagnostics/{run_id}",
        "Diagnostics/GetDiagnostics",
        "A run with its findings, or only those of a `node`.",
        node="node",
    ),
    _post("/diagnostics", "Diagnostics/RunDiagnostics", "Begin a run of checks on nodes."),
)
