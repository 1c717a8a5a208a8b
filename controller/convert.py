"""Specs and step reports turned into the controller's words, and findings into messages.

Pure functions. What agents report is read in `core/edge/reports.py`; commands to them are made in
`command_messages.py`; what clients see of the state is in `rpc/views.py`.
"""

from __future__ import annotations

from dataclasses import asdict

from google.protobuf import json_format

from checkpoint.core.placement import Placement
from checkpoint.replicas.placing import partner_node_indexes, placement_of
from checkpoint.sizing import any_shift_host_memory_bytes, placed_host_memory_bytes
from controller.core.capacity import Capacity, NodeNeed
from controller.core.kinds import NonFiniteAgain, Rung
from controller.core.records import JobPlan, Size
from controller.store.curves import StepRow
from controller.store.history import CommitRow
from diagnostics.core.finding import Finding
from outlast.ids import JobId
from outlast.rules import elastic, workload
from outlast.spec import JobSpec
from outlast.v1 import agents_pb2, common_pb2, diagnostics_pb2


def plan_of(spec: JobSpec) -> JobPlan:
    """The part of a spec that the machine needs."""
    recovery = spec.recovery
    wanted = _size_of(spec)
    sizes = workload.smaller_sizes if spec.is_script else elastic.smaller_sizes
    smaller = tuple(map(_size_of, sizes(spec)))
    return JobPlan(
        nodes=spec.num_nodes,
        workers_per_node=spec.workers_per_node,
        standby=spec.resources.standby,
        total_steps=None if spec.is_script else spec.steps,
        retry_budget=recovery.retry_budget,
        in_place_restarts=recovery.in_place_restarts,
        heals=recovery.heal,
        first_step_timeout_s=recovery.first_step_timeout_s,
        stop_timeout_s=_stop_timeout_s(spec),
        preflight_timeout_s=recovery.preflight_timeout_s,
        diagnose_timeout_s=recovery.diagnose_timeout_s,
        ladder=tuple(Rung(rung) for rung in recovery.ladder),
        replica_node_indexes=wanted.replica_node_indexes,
        replica_shift=wanted.replica_shift,
        any_shift_bytes=wanted.any_shift_bytes,
        tp=spec.parallel.tp,
        pp=spec.parallel.pp,
        ep=spec.parallel.ep,
        cp=spec.parallel.cp,
        non_finite_again=NonFiniteAgain(spec.detectors.non_finite_again),
        rollback_steps=spec.detectors.rollback_steps,
        sizes=(wanted, *smaller) if smaller else (),
        shrink_after_s=recovery.elastic.after_s,
        grow_after_s=recovery.elastic.grow_after_s,
        need=wanted.need,
        last_checkpoint_s=0.0 if spec.is_script else spec.checkpoint.last_timeout_s,
        preflight=recovery.preflight,
        retry_program_errors=recovery.retry_program_errors,
        priority=spec.queue.priority,
        preempts=spec.queue.preempts,
    )


def _size_of(spec: JobSpec) -> Size:
    # Without names a node is called by its place.
    placement = placement_of(spec)
    return Size(
        dp=spec.parallel.dp,
        nodes=spec.num_nodes,
        spec_json=spec.canonical_json(),
        replica_node_indexes=()
        if placement is None
        else partner_node_indexes(placement, spec.workers_per_node),
        replica_shift=0 if placement is None else placement.shift,
        any_shift_bytes=_any_shift_bytes(spec, placement),
        need=_need_of(spec, placement),
    )


def _any_shift_bytes(spec: JobSpec, placement: Placement | None) -> int:
    # What a script keeps in host memory is not known before it runs.
    if placement is None or not placement.shift or spec.is_script:
        return 0
    return any_shift_host_memory_bytes(spec, placement)


def _need_of(spec: JobSpec, placement: Placement | None) -> NodeNeed:
    """What the job needs of each of its nodes: as much as that of them which needs most.

    Any node must be able to take the place of any other.
    """
    per_node = spec.workers_per_node
    return NodeNeed(
        gpus=per_node if spec.resources.device == "cuda" else 0,
        # What a script keeps in host memory is not known before it runs.
        host_memory_bytes=0 if spec.is_script else placed_host_memory_bytes(spec, placement),
        image=spec.workload.image or "",
    )


def _stop_timeout_s(spec: JobSpec) -> float:
    """Workers are killed after half of it; a script has its grace until then."""
    given_s = spec.recovery.stop_timeout_s
    return max(given_s, 2 * spec.workload.stop_grace_s) if spec.is_script else given_s


def capacity_message(capacity: Capacity) -> common_pb2.NodeCapacity:
    """What a node has, for clients."""
    return common_pb2.NodeCapacity(**asdict(capacity))


def step_rows(event: agents_pb2.AgentEvent) -> list[StepRow]:
    """Step reports of one event, for the curve."""
    return [
        StepRow(
            job=JobId(event.job_id),
            step=report.step,
            attempt=report.attempt or event.attempt,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            tokens=report.tokens,
            duration_s=report.duration_s,
            at_s=report.at_s,
            eval_loss=report.eval_loss if report.HasField("eval_loss") else None,
            split=report.split if report.HasField("split") else None,
            eval_losses=dict(report.eval_losses),
        )
        for report in event.step_reports.reports
    ]


def commit_row(event: agents_pb2.AgentEvent) -> CommitRow:
    """A committed checkpoint of one event, for the history."""
    committed = event.checkpoint_committed
    return CommitRow(
        job=JobId(event.job_id),
        step=committed.step,
        # An agent of an older version does not say which attempt saved it.
        attempt=committed.saved_by_attempt or event.attempt,
        at_s=event.at_s,
        size_bytes=committed.size_bytes,
    )


def step_report(row: StepRow) -> common_pb2.StepReport:
    """A row of the curve, for clients."""
    return common_pb2.StepReport(
        step=row.step,
        attempt=row.attempt,
        loss=row.loss,
        grad_norm=row.grad_norm,
        learning_rate=row.learning_rate,
        tokens=row.tokens,
        duration_s=row.duration_s,
        at_s=row.at_s,
        eval_loss=row.eval_loss,
        eval_losses=row.eval_losses,
        split=row.split,
    )


def finding_message(finding: Finding) -> diagnostics_pb2.Finding:
    """A finding, for the wire."""
    return json_format.ParseDict(finding.to_fields(), diagnostics_pb2.Finding())
