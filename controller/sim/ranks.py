"""What the black boxes of simulated ranks show, as an agent puts it into a heartbeat."""

from __future__ import annotations

from controller.sim.attempt import Phase, Training
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

_PHASES = {
    Phase.GATHERING: "groups",
    Phase.RESTORING: "restore",
    Phase.DONE: "finished",
}


def heartbeat_of(
    training: Training, node: NodeId, now_s: float, *, with_ended: bool = False
) -> agents_pb2.AgentMessage:
    """A heartbeat of a node with its running ranks of an attempt, or all that have begun."""
    completed = training.step_to_report(training.seen_step(now_s))
    ranks = [
        _summary(training, rank, completed, now_s)
        for rank in training.ranks_on(node)
        if rank in training.joined and (with_ended or training.joined[rank].is_running)
    ]
    beat = agents_pb2.Heartbeat(at_s=now_s, ranks=ranks)
    return agents_pb2.AgentMessage(heartbeat=beat)


def progress_of(training: Training, now_s: float) -> agents_pb2.AgentEvent | None:
    """How far the ranks of a node are, once they have completed a step.

    Those of a script that says nothing of its steps are at step 0 as soon as it runs.
    """
    completed, resumed = training.step_to_report(training.completed(now_s)), _resumed(training)
    if completed <= resumed:
        return None
    progress = agents_pb2.ProgressMade(
        completed_step=completed, resumed_step=resumed, completed_at_s=now_s
    )
    # Times are of the node's clock; the number is given when it is kept for sending.
    return agents_pb2.AgentEvent(
        seq=1,
        job_id=training.job.job_id,
        attempt=training.attempt,
        at_s=now_s,
        progress=progress,
    )


def _summary(training: Training, rank: int, completed: int, now_s: float) -> agents_pb2.RankSummary:
    summary = agents_pb2.RankSummary(
        job_id=training.job.job_id,
        attempt=training.attempt,
        rank=rank,
        phase=_PHASES.get(training.phase, "forward_backward"),
        completed_step=completed,
        resumed_step=_resumed(training),
        reports_no_steps=training.job.is_silent,
    )
    if training.phase is Phase.HUNG:
        _stand(summary, training, now_s)
    return summary


def _resumed(training: Training) -> int:
    return -1 if training.job.is_silent else training.resumed


def _stand(summary: agents_pb2.RankSummary, training: Training, now_s: float) -> None:
    """Where a rank of an attempt that hangs stands, and for how long.

    Without a rank that holds up the others, none is in an operation: all of them wait for the
    data's file system, for instance.
    """
    summary.stalled_s = now_s - training.frozen_s
    summary.stall_limit_s = training.stall_limit_s
    summary.stall_limit_source = "learned" if training.stall_limit_s else ""
    if training.job.is_silent:
        summary.stall_limit_source = f"recovery.hang_timeout_s is {training.stall_limit_s:g} s"
        return
    if training.culprit is None or training.culprit == summary.rank:
        summary.phase = "data"
    if training.culprit is None:
        return
    is_inside = training.culprit != summary.rank
    sequence = summary.completed_step + (2 if is_inside else 1)
    summary.last_operation.CopyFrom(
        agents_pb2.Operation(
            op="all_reduce", group="world", sequence=sequence, detail=-1, is_inside=is_inside
        )
    )
    summary.entered["world"] = sequence
