"""What cannot be, in a rank's black box and in what its node's agent reports.

Only what no healthy process says: a step that a job does not have, another node's rank, a
number that is none. A lie that may be true (a committed step, an end of one of its own
workers) is believed, and is nothing that a check at the edge could find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.v1 import agents_pb2

_FAR = 2**63 - 1
# A sum of two of these has no 64 bits.
_HALF = 2**62
# May be a step, but of no job here.
_BEYOND = 2**40
NAN = math.nan


@dataclass(frozen=True)
class Case:
    """Whose reports are bad: an attempt of a job, a rank of it that is here, one elsewhere."""

    job_id: str
    attempt: int
    own: int
    foreign: int


def events(case: Case) -> Iterator[agents_pb2.AgentEvent]:
    """Events of the agent; each must be acknowledged, and none may count."""
    from outlast.v1 import agents_pb2

    for kind in _kinds(case):
        yield agents_pb2.AgentEvent(job_id=case.job_id, attempt=case.attempt, at_s=1.0, **kind)
    made = agents_pb2.ProgressMade(completed_step=7, resumed_step=0)
    steps = _steps(step=7, loss=1e9, tokens=1)
    others = [(job_id, case.attempt) for job_id in ("no-such-job", "../../etc", "\x00", "a" * 300)]
    others += [(case.job_id, attempt) for attempt in (-1, case.attempt + 1, _HALF, _FAR)]
    for job_id, attempt in others:
        yield agents_pb2.AgentEvent(job_id=job_id, attempt=attempt, progress=made)
        yield agents_pb2.AgentEvent(job_id=job_id, attempt=attempt, step_reports=steps)
    yield agents_pb2.AgentEvent(job_id=case.job_id, attempt=case.attempt, at_s=NAN)


def _kinds(case: Case) -> Iterator[dict[str, Any]]:
    """Of the right job and attempt, and worth nothing all the same."""
    from outlast.v1 import agents_pb2

    for changed in (
        {"duration_s": NAN},
        {"duration_s": math.inf},
        {"duration_s": -1.0},
        {"tokens": _HALF},
        {"tokens": _HALF},
        {"tokens": _FAR},
        {"tokens": -1},
        {"step": 0},
        {"step": -_FAR},
        {"step": _BEYOND},
        {"step": _FAR},
        {"attempt": case.attempt + 5},
        {"attempt": -_FAR},
    ):
        # Anything of it that counted would be in the curve.
        yield {"step_reports": _steps(**{"step": 7, "loss": 1e9, "tokens": 1, **changed})}
    for step in (_BEYOND, _HALF, _FAR, -_FAR):
        yield {"progress": agents_pb2.ProgressMade(completed_step=step, resumed_step=step)}
        yield {"checkpoint_committed": agents_pb2.CheckpointCommitted(step=step, total_s=NAN)}
    for rank in (case.foreign, 2**20, -1):
        exit_ = agents_pb2.WorkerExit(code=-9, at_s=NAN, completed_step=_FAR)
        yield {"worker_exited": agents_pb2.WorkerExited(rank=rank, exit=exit_)}
    yield {"host_sign": agents_pb2.HostSign(subject="No Such Subject", message="x" * 100_000)}
    yield {"command_result": agents_pb2.CommandResult(command_id="no such command\n")}
    unknown = agents_pb2.CommandResult(command_id="x", error_kind="No Such Kind", detail="y")
    yield {"command_result": unknown}


def _steps(**report: Any) -> agents_pb2.StepReports:
    from outlast.v1 import agents_pb2, common_pb2

    return agents_pb2.StepReports(reports=[common_pb2.StepReport(**report)])


def summaries(case: Case) -> list[agents_pb2.RankSummary]:
    """Ranks in a heartbeat: others' and its own."""
    from outlast.v1 import agents_pb2

    own = agents_pb2.RankSummary(
        job_id=case.job_id,
        attempt=case.attempt,
        rank=case.own,
        phase="no-such-phase" * 10,
        completed_step=-1,
        resumed_step=-1,
        last_operation=agents_pb2.Operation(op="\x1b[31m" * 2_000, group="x" * 999, detail=-9),
        last_op_age_s=NAN,
        step_age_s=-math.inf,
        stalled_s=NAN,
        stall_limit_s=-1.0,
        entered={"no-such-group": _FAR},
        process_state="??",
        use=agents_pb2.RankUse(peak_memory_bytes=_FAR, pipeline_busy_s=NAN, expected_bubble=NAN),
    )
    found = [own]
    for changed in (
        {"rank": case.foreign},
        {"rank": -1},
        {"job_id": "no-such-job"},
        {"attempt": case.attempt + 1},
        {"completed_step": _FAR},
        {"completed_step": _BEYOND},
        {"resumed_step": -_FAR},
    ):
        other = agents_pb2.RankSummary()
        other.CopyFrom(own)
        for name, value in changed.items():
            setattr(other, name, value)
        found.append(other)
    return found


def write_into(box: Any) -> None:
    """Note completed steps, and a present, that cannot be. The rank's next step mends it."""
    from outlast import blackbox
    from outlast.blackbox import file

    for step, tokens, end_ns in (
        (_FAR, 1, 0),
        (-_FAR, 1, 0),
        (7, _FAR, 0),
        (7, -_FAR, 0),
        (_BEYOND, 1, 2**64 - 1),
        (_BEYOND, 1, 0),
    ):
        box.completed(
            blackbox.StepRecord(
                step=step,
                loss=NAN,
                grad_norm=NAN,
                learning_rate=-math.inf,
                tokens=tokens,
                start_ns=2**62,
                end_ns=end_ns,
                eval_loss=math.inf,
            )
        )
    for word in (file.PHASE, file.OP_GROUP, file.OP_SEQ, file.COMPLETED):
        box._words[word] = -_FAR
    box._words[file.PHASE] = 99
