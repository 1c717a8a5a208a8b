"""What agents report, in the machine's words: one message in, what it says out.

Pure functions, without memory: what only counts together with earlier messages is in the
tables beside this.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from controller.core import events as ev
from controller.core.capacity import Capacity
from controller.core.edge.operations import operation_of
from controller.core.node_events import NodeJoined, NodeLeft, WorkerExited, WorkerStatus
from diagnostics.core.exits import ExitFacts, classify
from diagnostics.core.finding import CheckVerdict, Finding, Localises, ThresholdSource
from diagnostics.core.stacks import fingerprint_of
from diagnostics.core.verdicts import NodeVerdict, fold
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, CommandId, JobId, NodeId
from outlast.v1 import agents_pb2, common_pb2, diagnostics_pb2

# A frame of a traceback: the file and the function.
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_DIGITS = re.compile(r"\d+")
# Bounds on what one agent may make the journal keep, per exit.
_MAX_DETAIL = 2_000
_MAX_TRACEBACK = 16_000
_MAX_STACKS = 64
_MAX_MODEL = 100

_Word = TypeVar("_Word", ThresholdSource, CheckVerdict, Localises)

# Of one heartbeat, in its order.
RanksByAttempt = Mapping[tuple[JobId, Attempt], Sequence[agents_pb2.RankSummary]]


def by_attempt(beat: agents_pb2.Heartbeat) -> RanksByAttempt:
    """The ranks of a heartbeat, nearly always of one attempt of one job."""
    found: dict[tuple[JobId, Attempt], list[agents_pb2.RankSummary]] = {}
    for summary in beat.ranks:
        key = (JobId(summary.job_id), Attempt(summary.attempt))
        found.setdefault(key, []).append(summary)
    return found


def events_of(node: NodeId, event: agents_pb2.AgentEvent) -> list[ev.Event]:
    """The machine's events in what an agent reports, where nothing earlier counts."""
    match event.WhichOneof("kind"):
        case "command_result":
            return [command_finished(node, event.command_result)]
        case "worker_exited":
            exited = event.worker_exited
            return [worker_exited(node, event.job_id, event.attempt, exited.rank, exited.exit)]
        case "checkpoint_committed":
            return [_committed(event)]
        case "checkpoint_trouble":
            return [_checkpoint_failed(node, event)]
        case "goodbye":
            return [NodeLeft(node=node, incarnation=event.goodbye.incarnation)]
        case _:
            return []


def _committed(event: agents_pb2.AgentEvent) -> ev.CheckpointCommitted:
    committed = event.checkpoint_committed
    return ev.CheckpointCommitted(
        job_id=JobId(event.job_id),
        step=committed.step,
        is_behind=committed.is_behind,
        attempt=event.attempt,
        stalled_s=committed.stalled_s,
        saved_by=committed.saved_by_attempt,
    )


def _checkpoint_failed(node: NodeId, event: agents_pb2.AgentEvent) -> ev.CheckpointFailed:
    trouble = event.checkpoint_trouble
    is_awaited = trouble.stage == "start"
    return ev.CheckpointFailed(
        job_id=JobId(event.job_id),
        node=node,
        step=trouble.step,
        detail=trouble.detail if is_awaited else f"{trouble.stage}: {trouble.detail}",
        at_s=event.at_s,
        was_stored=trouble.stage == "load",
        was_copied=trouble.stage == "replica",
        is_awaited=is_awaited,
    )


def node_joined(hello: agents_pb2.Hello) -> NodeJoined:
    """An agent's first message."""
    node = NodeId(hello.node_id)
    return NodeJoined(
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
        version=hello.version,
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
        image=message.image,
        topology=message.topology,
    )


def worker_exited(
    node: NodeId, job_id: str, attempt: int, rank: int, exit_: agents_pb2.WorkerExit
) -> WorkerExited:
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
    detail = found.message
    # What a rank did last says nothing of a setting that cannot be met.
    if found.exit_class is not FailureClass.CONFIG:
        # One of another version is left out of the words.
        with suppress(ValueError):
            operation = operation_of(exit_)
            detail += "" if operation is None else f" ({operation})"
    return WorkerExited(
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
                location="; ".join((found.location, *found.paths))[:_MAX_DETAIL],
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


def _worker_status(node: NodeId, status: agents_pb2.WorkerStatus) -> WorkerStatus:
    ended = None
    if not status.running:
        ended = worker_exited(node, status.job_id, status.attempt, status.rank, status.exit)
    return WorkerStatus(
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
        verdict=_word(CheckVerdict, message.verdict, CheckVerdict.INCONCLUSIVE),
        localises=_word(Localises, message.localises, Localises.NODE),
        detail=message.detail,
        duration_s=message.duration_s,
        peer=message.peer,
        baseline_key=message.baseline_key,
        digest=message.digest,
        digest_key=message.digest_key,
        contended_ratio=message.contended_ratio,
    )


def _word(kind: type[_Word], text: str, other: _Word) -> _Word:
    try:
        return kind(text)
    except ValueError:
        return other
