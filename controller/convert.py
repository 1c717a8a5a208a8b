"""What comes in from outside, turned into the machine's words, and commands turned back.

Pure functions on messages. What clients see of the state is in `rpc/views.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import TypeVar, assert_never

from google.protobuf import json_format

from checkpoint.placing import placement_of
from checkpoint.sizing import least_node_bytes
from controller.core import events as ev
from controller.core.capacity import Capacity, NodeNeed
from controller.core.records import (
    AttemptRecord,
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
from controller.operations import operation_of
from controller.store.curves import StepRow
from diagnostics.core.exits import ExitFacts, classify
from diagnostics.core.finding import Finding, Localises, ThresholdSource, Verdict
from diagnostics.core.stacks import fingerprint_of
from diagnostics.core.verdicts import NodeVerdict, fold
from outlast.chosen import ChosenStart
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, CommandId, JobId, NodeId
from outlast.rules.elastic import smaller_sizes
from outlast.spec import JobSpec
from outlast.v1 import agents_pb2, common_pb2, diagnostics_pb2

# A frame of a traceback: the file and the function.
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_DIGITS = re.compile(r"\d+")
# Bounds on what one agent may make the journal keep, per exit.
_MAX_DETAIL = 2_000
_MAX_TRACEBACK = 16_000
_MAX_STACKS = 64
_MAX_MODEL = 100

_Word = TypeVar("_Word", ThresholdSource, Verdict, Localises)


def plan_of(spec: JobSpec) -> JobPlan:
    """The part of a spec that the machine needs."""
    recovery = spec.recovery
    smaller = smaller_sizes(spec)
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
        replica_places=replica_places(spec),
        tp=spec.parallel.tp,
        pp=spec.parallel.pp,
        non_finite_again=NonFiniteAgain(spec.detectors.non_finite_again),
        rollback_steps=spec.detectors.rollback_steps,
        sizes=tuple(map(_size_of, (spec, *smaller))) if smaller else (),
        shrink_after_s=recovery.elastic.after_s,
        grow_after_s=recovery.elastic.grow_after_s,
        need=need_of(spec),
        last_checkpoint_s=spec.checkpoint.last_timeout_s,
    )


def need_of(spec: JobSpec) -> NodeNeed:
    """What the job needs of each of its nodes, at least."""
    per_node = spec.workers_per_node
    return NodeNeed(
        gpus=per_node if spec.resources.device == "cuda" else 0,
        host_memory_bytes=least_node_bytes(spec, range(per_node)),
    )


def _size_of(spec: JobSpec) -> Size:
    return Size(
        dp=spec.parallel.dp,
        nodes=spec.num_nodes,
        spec_json=spec.canonical_json(),
        replica_places=replica_places(spec),
        need=need_of(spec),
    )


def replica_places(spec: JobSpec) -> tuple[tuple[int, ...], ...]:
    """By place of a node, the places that have its ranks' state, too; empty for no copies."""
    # Without names a node is called by its place.
    placement = placement_of(spec)
    if placement is None:
        return ()
    per_node = spec.workers_per_node
    return tuple(
        tuple(int(node) for node in placement.partners(range(first, first + per_node)))
        for first in range(0, spec.layout.world_size, per_node)
    )


def node_joined(hello: agents_pb2.Hello) -> ev.NodeJoined:
    """An agent's first message."""
    node = NodeId(hello.node_id)
    return ev.NodeJoined(
        node=node,
        incarnation=hello.incarnation,
        address=hello.address,
        rendezvous_port=hello.rendezvous_port,
        workers=hello.workers,
        statuses=tuple(_worker_status(node, status) for status in hello.worker_statuses),
        replica_port=hello.replica_port,
        replica_token=hello.replica_token,
        predecessor=hello.predecessor,
        capacity=capacity_of(hello.capacity) if hello.HasField("capacity") else None,
    )


def capacity_of(message: common_pb2.NodeCapacity) -> Capacity:
    """What a node has, as its agent says."""
    return Capacity(
        gpus=max(0, message.gpus),
        gpu_model=message.gpu_model[:_MAX_MODEL],
        gpu_memory_bytes=max(0, message.gpu_memory_bytes),
        cpus=max(0, message.cpus),
        memory_bytes=max(0, message.memory_bytes),
        host_memory_bytes=max(0, message.host_memory_bytes),
        host_memory_free_bytes=max(0, message.host_memory_free_bytes),
    )


def capacity_message(capacity: Capacity) -> common_pb2.NodeCapacity:
    """What a node has, for clients."""
    return common_pb2.NodeCapacity(**asdict(capacity))


def worker_exited(
    node: NodeId, job_id: str, attempt: int, rank: int, exit_: agents_pb2.WorkerExit
) -> ev.WorkerExited:
    """The end of a worker, classified."""
    found = classify(
        ExitFacts(
            code=exit_.code,
            exception_type=exit_.exception_type,
            exception_message=exit_.exception_message,
            traceback=exit_.traceback,
            stderr_tail=exit_.stderr_tail,
            out_of_memory=exit_.out_of_memory,
        )
    )
    detail = found.words
    # What a rank did last says nothing of a setting that cannot be met.
    if found.exit_class is not FailureClass.CONFIG:
        # One of another version is left out of the words.
        with suppress(ValueError):
            operation = operation_of(exit_)
            detail += "" if operation is None else f" ({operation})"
    return ev.WorkerExited(
        job_id=JobId(job_id),
        attempt=Attempt(attempt),
        node=node,
        rank=rank,
        code=exit_.code,
        fault_class=found.exit_class,
        fingerprint=fingerprint(exit_),
        detail=detail[:_MAX_DETAIL],
        traceback=(exit_.traceback or exit_.stderr_tail)[-_MAX_TRACEBACK:],
        completed_step=exit_.completed_step,
        at_s=exit_.at_s,
        stopped=exit_.stopped,
    )


def fingerprint(exit_: agents_pb2.WorkerExit) -> str:
    """The same text for the same failure, whichever rank or step it struck; "" for none.

    Type, innermost frame (file and function) and message, with numbers left out.
    """
    if not exit_.exception_type:
        return ""
    frames = _FRAME.findall(exit_.traceback)
    file, function = frames[-1] if frames else ("", "")
    message = _DIGITS.sub("#", exit_.exception_message)
    text = "\n".join((exit_.exception_type, f"{file}:{function}", message))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def command_finished(node: NodeId, result: agents_pb2.CommandResult) -> ev.CommandFinished:
    """An agent's answer to a command; findings become one verdict."""
    verdict = fold_findings(result.findings)
    return ev.CommandFinished(
        command_id=CommandId(result.command_id),
        node=node,
        ok=result.ok,
        error_kind=_error_kind(result.error_kind),
        detail=(result.detail or (verdict.reason if result.findings else ""))[:_MAX_DETAIL],
        completed_step=result.completed_step,
        # The agent answers a repeated command without what was found: that is no verdict.
        verdict=str(verdict.verdict) if result.findings else "",
        stacks=tuple(
            ev.RankStacks(
                rank=found.rank,
                place="; ".join((found.place, *found.paths))[:_MAX_DETAIL],
                text=found.text[:_MAX_TRACEBACK],
                # The agent's threads differ from node to node and say little: one is enough.
                fingerprint="agent" if found.rank < 0 else fingerprint_of(found.text),
            )
            for found in result.stacks[:_MAX_STACKS]
        ),
    )


def _error_kind(text: str) -> ErrorKind:
    try:
        return ErrorKind(text)
    except ValueError:
        # An agent of another version: why it failed is not known, only that it did.
        return ErrorKind.INTERNAL


def fold_findings(findings: Iterable[diagnostics_pb2.Finding]) -> NodeVerdict:
    """One verdict over findings as they came over the wire."""
    return fold([finding_of(message) for message in findings])


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
            message.start_workers.CopyFrom(
                agents_pb2.StartWorkers(
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
                        common_pb2.StepRange(first=each.first, last=each.last)
                        for each in attempt.skipped
                    ],
                    replayed_step=attempt.replayed_step or 0,
                    suspect_nodes=attempt.suspects,
                    chosen_starts=chosen_messages(attempt.chosen),
                )
            )
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


def _worker_status(node: NodeId, status: agents_pb2.WorkerStatus) -> ev.WorkerStatus:
    ended = None
    if not status.running:
        ended = worker_exited(node, status.job_id, status.attempt, status.rank, status.exit)
    return ev.WorkerStatus(
        job_id=JobId(status.job_id),
        attempt=Attempt(status.attempt),
        rank=status.rank,
        exit=ended,
    )


def finding_of(message: diagnostics_pb2.Finding) -> Finding:
    """A finding off the wire; words that this version does not know become the mildest."""
    return Finding(
        test=message.test,
        node=message.node,
        metric=message.metric,
        value=message.value,
        unit=message.unit,
        threshold=message.threshold if message.HasField("threshold") else None,
        threshold_source=_word(ThresholdSource, message.threshold_source, ThresholdSource.NONE),
        verdict=_word(Verdict, message.verdict, Verdict.INCONCLUSIVE),
        localises=_word(Localises, message.localises, Localises.NODE),
        detail=message.detail,
        duration_s=message.duration_s,
        peer=message.peer,
        baseline_key=message.baseline_key,
        digest=message.digest,
        digest_key=message.digest_key,
        contended_ratio=message.contended_ratio,
    )


def finding_message(finding: Finding) -> diagnostics_pb2.Finding:
    """A finding, for the wire."""
    return json_format.ParseDict(finding.to_fields(), diagnostics_pb2.Finding())


def _word(kind: type[_Word], text: str, other: _Word) -> _Word:
    try:
        return kind(text)
    except ValueError:
        return other


def chosen_messages(chosen: Iterable[ChosenStart]) -> list[common_pb2.ChosenStart]:
    """Where persons let a job go on."""
    return [
        common_pb2.ChosenStart(
            step=each.step, attempt=each.attempt, url=each.url, url_step=each.url_step
        )
        for each in chosen
    ]
