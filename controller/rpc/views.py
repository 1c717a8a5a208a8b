"""What clients see: the state's records as messages. Pure but for the curves they quote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from google.protobuf import json_format, struct_pb2

from controller.command_messages import chosen_messages
from controller.convert import capacity_message
from controller.core import accounting, cost, leaving
from controller.core.changes import State
from controller.core.edge.clocks import ClockReading
from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.kinds import Wanted
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import TERMINAL, JobState
from controller.efficiency import epochs, hardware_flops, peak_of, time_left_s, token_perplexity
from controller.specs import spec_of
from controller.store.curves import Curves, StepRow
from outlast.flops import Convention, flops_per_token
from outlast.ids import NodeId
from outlast.v1 import common_pb2, incidents_pb2, jobs_pb2, nodes_pb2


def brief_job(
    job: JobRecord,
    curves: Curves,
    matmul_flops: Mapping[NodeId, float],
    *,
    now_s: float,
    is_blind: bool = False,
) -> jobs_pb2.Job:
    """A job as it stands, but for its spec and its nodes; see `complete` and `peak_of`."""
    parts, last = accounting.totals(job.account, now_s), curves.last(job.job_id)
    speed = curves.tokens_per_s(job.job_id) if job.state is JobState.RUNNING else 0.0
    message = jobs_pb2.Job(
        job_id=job.job_id,
        name=job.name,
        state=job.state,
        reason=_reason(job, is_blind=is_blind),
        state_since_s=job.since_s,
        submitted_s=job.submitted_s,
        finished_s=job.finished_s,
        attempt=job.attempt,
        step=0 if last is None else last.step,
        total_steps=job.plan.total_steps or 0,
        loss=None if last is None else last.loss,
        tokens_per_s=speed,
        committed_step=job.committed_step,
        committed_s=job.committed_s,
        retry_left=job.retry_left,
        open_incident=job.incident or "",
        restarts=job.restarts,
        error=job.error,
        exit_code=job.exit_code,
        environment=job.environment,
        environment_changes=job.environment_changes,
        data_left_out=job.data_left_out,
        grad_norm=None if last is None else last.grad_norm,
        learning_rate=None if last is None else last.learning_rate,
        ranks=job.plan.world_size,
        seconds={str(part): seconds for part, seconds in parts.items()},
        ettr=accounting.ettr(parts) or 0.0,
        ettr_last_hour=accounting.ettr(accounting.window(job.account, now_s)) or 0.0,
        checkpoint_url=job.checkpoint_url,
        chosen_starts=chosen_messages(job.chosen),
        skipped=[common_pb2.StepRange(first=each.first, last=each.last) for each in job.skipped],
        owner=job.owner,
        priority=job.plan.priority,
        yields=job.num_yields,
    )
    message.MergeFrom(_efficiency(job, last, speed, curves.step_s(job.job_id)))
    message.MergeFrom(_peak(job, matmul_flops))
    return message


def _peak(job: JobRecord, matmul_flops: Mapping[NodeId, float]) -> jobs_pb2.Job:
    """What its devices could do."""
    peak = peak_of(job, matmul_flops)
    if peak is None:
        return jobs_pb2.Job()
    return jobs_pb2.Job(device=peak.name, peak_flops_per_s=peak.flops_per_s)


def _efficiency(
    job: JobRecord, last: StepRow | None, speed: float, step_s: float | None
) -> jobs_pb2.Job:
    """How well it uses its devices and its data, and for how long it will."""
    spec = spec_of(job.spec_json)
    return jobs_pb2.Job(
        model_flops_per_s=speed * flops_per_token(spec.model.shape, Convention.WINDOWED),
        full_model_flops_per_s=speed * flops_per_token(spec.model.shape, Convention.FULL),
        hardware_flops_per_s=speed * hardware_flops(job.spec_json, Convention.WINDOWED),
        perplexity=None if last is None else token_perplexity(job, last),
        epochs=None if last is None else epochs(job, last),
        time_left_s=None if last is None else time_left_s(job, last, step_s),
    )


def complete(message: jobs_pb2.Job, job: JobRecord) -> None:
    """Add what is large and seldom changes."""
    message.nodes[:] = [node or "" for node in job.nodes]
    message.spec.CopyFrom(struct_of(job.submitted_spec_json))


def node_message(
    node: NodeRecord,
    *,
    is_connected: bool,
    last_heartbeat_s: float | None,
    is_late: bool,
    now_s: float,
    clock: ClockReading | None = None,
) -> nodes_pb2.Node:
    """A node as it stands. `last_heartbeat_s` is of the wall clock."""
    return nodes_pb2.Node(
        node_id=node.node,
        state=node.state,
        reason="; ".join(filter(None, (node.reason, leaving.note(node, now_s)))),
        state_since_s=node.since_s,
        connected=is_connected,
        last_heartbeat_s=last_heartbeat_s or 0.0,
        late=is_late,
        clock_ahead_s=None if clock is None else clock.ahead_s,
        clock_error_s=None if clock is None else clock.error_s,
        address=node.address,
        workers=node.workers,
        job_id=node.job or "",
        cordoned=node.cordoned,
        capacity=None if node.capacity is None else capacity_message(node.capacity),
    )


def incident_message(
    incident: IncidentRecord, *, now_s: float, is_brief: bool = False
) -> incidents_pb2.Incident:
    """An incident with its cost, as far as it is known."""
    message = _brief_incident(incident, now_s)
    if not is_brief:
        message.MergeFrom(_findings(incident))
    return message


def _findings(incident: IncidentRecord) -> incidents_pb2.Incident:
    """What an incident goes by, of which there may be much."""
    return incidents_pb2.Incident(
        evidence=[_evidence(item) for item in incident.evidence],
        timeline=[
            common_pb2.TimelineEntry(phase=entry.phase, at_s=entry.at_s, detail=entry.detail)
            for entry in incident.timeline
        ],
        node_checks=[
            incidents_pb2.NodeCheck(node=node, verdict=verdict)
            for node, verdict in incident.findings
        ],
        bad_links=[
            incidents_pb2.BadLink(node=one, peer=other) for one, other in incident.bad_links
        ],
    )


def _brief_incident(incident: IncidentRecord, now_s: float) -> incidents_pb2.Incident:
    parts = cost.parts_s(incident, now_s)
    return incidents_pb2.Incident(
        incident_id=incident.incident,
        job_id=incident.job,
        attempt=incident.attempt,
        state=incident.state,
        cause=incident.cause,
        action=incident.action or "",
        reason=incident.reason,
        culprit_nodes=incident.culprits,
        opened_s=incident.opened_s,
        closed_s=incident.closed_s,
        fault_step=incident.fault_step,
        resumed_step=incident.resumed_step,
        steps_redone=cost.steps_lost(incident),
        recovery_s=cost.recovery_s(incident),
        detection_s=cost.detection_s(incident),
        diagnostic_run=incident.search,
        count=incident.count,
        last_s=incident.last_s,
        is_note=incident.is_note,
        seconds={str(part): seconds for part, seconds in parts.items() if seconds > 0},
    )


def incidents_of(state: State, job_id: str) -> list[IncidentRecord]:
    """The incidents of a job, or of all jobs, oldest first."""
    found = [record for record in state.incidents.values() if job_id in ("", record.job)]
    return sorted(found, key=lambda record: record.opened_s)


def concerns(incident: IncidentRecord, node: NodeId) -> bool:
    """Whether an incident names a node: as a culprit, in its evidence, bad links or bad checks."""
    return (
        node in incident.culprits
        or any(item.node == node for item in incident.evidence)
        or any(checked == node and verdict != "pass" for checked, verdict in incident.findings)
        or any(node in link for link in incident.bad_links)
    )


@lru_cache(maxsize=256)
def struct_of(spec_json: str) -> struct_pb2.Struct:
    """A spec as a Struct, whose numbers are doubles. To be copied, not changed."""
    struct = struct_pb2.Struct()
    json_format.ParseDict(_doubles(json.loads(spec_json)), struct)
    return struct


def document_of(struct: struct_pb2.Struct) -> object:
    """The document that a client packed: whole numbers are integers again.

    Infinities and NaN stay, so that whoever checks the document can say where they are.
    """
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> object:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "struct_value":
            return document_of(value.struct_value)
        case _:
            return None


def _evidence(item: Evidence) -> incidents_pb2.Evidence:
    return incidents_pb2.Evidence(
        kind=item.kind,
        node=item.node or "",
        rank=item.rank,
        detail=item.detail,
        at_s=item.at_s,
        traceback=item.traceback,
    )


def _reason(job: JobRecord, *, is_blind: bool) -> str:
    if job.state in TERMINAL:
        return job.reason
    reason = job.reason
    if job.wanted is not Wanted.RUN and job.state is not JobState.PAUSED:
        reason += f" (asked to {job.wanted})"
    if is_blind:
        reason += " (many nodes are silent at once: nothing is replaced until that is understood)"
    return reason


def _doubles(value: object) -> object:
    """Integers that a double cannot hold become text, which the spec's parser reads too."""
    if isinstance(value, dict):
        return {key: _doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_doubles(item) for item in value]
    is_too_large = isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53
    return str(value) if is_too_large else value
