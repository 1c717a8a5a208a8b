"""Specs and step reports turned into the controller's words, and commands turned into messages.

Pure functions. What agents report is read in `core/edge/reports.py`; what clients see of the
state is in `rpc/views.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import assert_never

from google.protobuf import json_format

from checkpoint.core.placement import Placement
from checkpoint.replicas.placing import placement_of
from checkpoint.sizing import placed_host_memory_bytes
from controller.core.attempt_record import AttemptRecord
from controller.core.capacity import Capacity, NodeNeed
from controller.core.records import (
    CommandRecord,
    ForgetJob,
    JobPlan,
    NonFiniteAgain,
    PushCheckpoint,
    Rung,
    RunSuite,
    Size,
    StartWorkers,
    StopWorkers,
)
from controller.store.curves import StepRow
from diagnostics.core.finding import Finding
from outlast.chosen import ChosenStart
from outlast.ids import JobId
from outlast.rules.elastic import smaller_sizes
from outlast.spec import JobSpec
from outlast.v1 import agents_pb2, common_pb2, diagnostics_pb2


def plan_of(spec: JobSpec) -> JobPlan:
    """The part of a spec that the machine needs."""
    recovery = spec.recovery
    wanted = _size_of(spec)
    smaller = tuple(map(_size_of, smaller_sizes(spec)))
    return JobPlan(
        nodes=spec.num_nodes,
        workers_per_node=spec.workers_per_node,
        standby=spec.resources.standby,
        total_steps=spec.steps,
        retry_budget=recovery.retry_budget,
        in_place_restarts=recovery.in_place_restarts,
        first_step_timeout_s=recovery.first_step_timeout_s,
        stop_timeout_s=recovery.stop_timeout_s,
        preflight_timeout_s=recovery.preflight_timeout_s,
        diagnose_timeout_s=recovery.diagnose_timeout_s,
        ladder=tuple(Rung(rung) for rung in recovery.ladder),
        replica_places=wanted.replica_places,
        tp=spec.parallel.tp,
        pp=spec.parallel.pp,
        non_finite_again=NonFiniteAgain(spec.detectors.non_finite_again),
        rollback_steps=spec.detectors.rollback_steps,
        sizes=(wanted, *smaller) if smaller else (),
        shrink_after_s=recovery.elastic.after_s,
        grow_after_s=recovery.elastic.grow_after_s,
        need=wanted.need,
        last_checkpoint_s=spec.checkpoint.last_timeout_s,
    )


def _size_of(spec: JobSpec) -> Size:
    # Without names a node is called by its place.
    placement = placement_of(spec)
    return Size(
        dp=spec.parallel.dp,
        nodes=spec.num_nodes,
        spec_json=spec.canonical_json(),
        replica_places=_replica_places(spec, placement),
        need=_need_of(spec, placement),
    )


def _replica_places(spec: JobSpec, placement: Placement | None) -> tuple[tuple[int, ...], ...]:
    """By place of a node, the places that have its ranks' state, too; empty for no copies."""
    if placement is None:
        return ()
    per_node = spec.workers_per_node
    return tuple(
        tuple(int(node) for node in placement.partners(range(first, first + per_node)))
        for first in range(0, spec.layout.world_size, per_node)
    )


def _need_of(spec: JobSpec, placement: Placement | None) -> NodeNeed:
    """What the job needs of each of its nodes: as much as that of them which needs most.

    Any node must be able to take the place of any other.
    """
    per_node = spec.workers_per_node
    return NodeNeed(
        gpus=per_node if spec.resources.device == "cuda" else 0,
        host_memory_bytes=placed_host_memory_bytes(spec, placement),
    )


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
        )
        for report in event.step_reports.reports
    ]


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
    )


def command_message(
    record: CommandRecord, attempt: AttemptRecord | None = None, packed_nodes: bytes = b""
) -> agents_pb2.Command:
    """A journalled command, for its agent; an order to start with what `attempt` says.

    `packed_nodes` are its nodes as `ranknodes.pack` gives them, for an attempt of many ranks.
    """
    message = agents_pb2.Command(
        command_id=record.command_id, job_id=record.job or "", attempt=record.attempt
    )
    match record.command:
        case StartWorkers() as start:
            assert attempt is not None, f"{record.command_id} belongs to no attempt"
            message.start_workers.CopyFrom(_start_message(start, attempt, packed_nodes))
        case StopWorkers() as stop:
            message.stop_workers.CopyFrom(
                agents_pb2.StopWorkers(
                    graceful=stop.graceful, timeout_s=stop.timeout_s, look_first=stop.look_first
                )
            )
        case RunSuite() as suite:
            message.run_suite.CopyFrom(
                agents_pb2.RunSuite(
                    suite=suite.suite,
                    timeout_s=suite.timeout_s,
                    checkpoint_url=suite.checkpoint_url,
                )
            )
        case PushCheckpoint() as push:
            message.push_checkpoint.CopyFrom(
                agents_pb2.PushCheckpoint(
                    checkpoint_url=push.checkpoint_url, timeout_s=push.timeout_s, owner=push.owner
                )
            )
        case ForgetJob():
            message.forget_job.CopyFrom(agents_pb2.ForgetJob())
        case _:
            assert_never(record.command)
    return message


def _start_message(
    start: StartWorkers, attempt: AttemptRecord, packed_nodes: bytes
) -> agents_pb2.StartWorkers:
    return agents_pb2.StartWorkers(
        spec_json=attempt.spec_json,
        ranks=start.ranks,
        world_size=attempt.world_size,
        rendezvous_host=attempt.rendezvous_host,
        rendezvous_port=attempt.rendezvous_port,
        rank_nodes=() if packed_nodes else attempt.rank_nodes,
        packed_nodes=packed_nodes,
        committed_step=attempt.committed_step,
        checkpoint_url=attempt.checkpoint_url,
        replica_peers=[
            agents_pb2.ReplicaPeer(
                node_id=peer.node,
                address=peer.address,
                port=peer.port,
                token=peer.token,
            )
            for peer in start.replica_peers
        ],
        owner=attempt.owner,
        skipped=[
            common_pb2.StepRange(first=each.first, last=each.last) for each in attempt.skipped
        ],
        replayed_step=attempt.replayed_step or 0,
        suspect_nodes=attempt.suspects,
        chosen_starts=chosen_messages(attempt.chosen),
    )


def finding_message(finding: Finding) -> diagnostics_pb2.Finding:
    """A finding, for the wire."""
    return json_format.ParseDict(finding.to_fields(), diagnostics_pb2.Finding())


def chosen_messages(chosen: Iterable[ChosenStart]) -> list[common_pb2.ChosenStart]:
    """Where persons let a job go on."""
    return [
        common_pb2.ChosenStart(
            step=each.step, attempt=each.attempt, url=each.url, url_step=each.url_step
        )
        for each in chosen
    ]
