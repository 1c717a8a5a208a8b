"""Reports to the controller about checkpoints of this node's jobs, in memory and in storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from checkpoint.core.manifest import CommitRecord
from checkpoint.stage.damage import Damage
from checkpoint.upload.commit import Committed
from controller.agent.core.buffer import Weight
from controller.agent.workers.worker import Worker
from outlast.blackbox import Phase, Reader
from outlast.clock import node_time_s
from outlast.crashpoints import CrashPoint, reach
from outlast.v1 import agents_pb2


class CheckpointReports:
    """Hears of uploads and copies, and says it upward."""

    def __init__(
        self,
        emit: Callable[[agents_pb2.AgentEvent, Weight], None],
        newest_attempt: Callable[[str], int],
        running: Callable[[], Sequence[Worker]],
    ) -> None:
        self._emit = emit
        self._newest_attempt = newest_attempt
        self._running = running
        # What became of uploads, counted.
        self.upload_ends = Counter[str]()

    def upload_committed(self, job_id: str, committed: Committed) -> None:
        """A checkpoint is in storage, whole."""
        reach(CrashPoint.COMMIT_HEARD)
        message = agents_pb2.CheckpointCommitted(
            step=committed.step,
            size_bytes=committed.size_bytes,
            upload_s=committed.upload_s,
            total_s=committed.total_s,
            is_behind=committed.is_behind,
            stalled_s=self._stalled_s(job_id),
            saved_by_attempt=committed.attempt,
        )
        self._emit_of_job(job_id, agents_pb2.AgentEvent(checkpoint_committed=message))
        self.upload_ends["committed"] += 1
        reach(CrashPoint.COMMIT_TOLD)

    def upload_found(self, job_id: str, found: CommitRecord) -> None:
        """A checkpoint was in storage before this agent looked: nobody may have heard of it."""
        message = agents_pb2.CheckpointCommitted(
            step=found.step, size_bytes=found.size_bytes, saved_by_attempt=found.attempt
        )
        self._emit_of_job(job_id, agents_pb2.AgentEvent(checkpoint_committed=message))

    def upload_trouble(self, job_id: str, step: int, stage: str, detail: str) -> None:
        """A checkpoint did not get to storage; training goes on."""
        trouble = agents_pb2.CheckpointTrouble(step=step, stage=stage, detail=detail)
        self._emit_of_job(job_id, agents_pb2.AgentEvent(checkpoint_trouble=trouble))
        self.upload_ends["trouble"] += 1

    def storage_awaited(self, job_id: str, detail: str) -> None:
        """The job's storage does not answer as it is to start."""
        trouble = agents_pb2.CheckpointTrouble(step=0, stage="start", detail=detail)
        self._emit_of_job(job_id, agents_pb2.AgentEvent(checkpoint_trouble=trouble))

    def memory_damaged(self, job_id: str, damage: Damage) -> None:
        """Host memory of this node did not hold what was written to it; the slot is not used."""
        sign = agents_pb2.HostSign(
            subject="silent_corruption", what=f"rank {damage.rank}", message=damage.what
        )
        self._emit_of_job(job_id, agents_pb2.AgentEvent(host_sign=sign))

    def replica_trouble(self, job_id: str, step: int, detail: str) -> None:
        """A copy did not get to another node, or a lost one's state is nowhere in memory."""
        trouble = agents_pb2.CheckpointTrouble(step=step, stage="replica", detail=detail)
        self._emit_of_job(job_id, agents_pb2.AgentEvent(checkpoint_trouble=trouble))

    def _stalled_s(self, job_id: str) -> float:
        """How long the slowest rank here has waited for its copies to host memory."""
        uses = (
            worker.look(Reader.time_use) for worker in self._running() if worker.job_id == job_id
        )
        stalls = (use.phases_s.get(Phase.CHECKPOINT, 0.0) for use in uses if use is not None)
        return max(stalls, default=0.0)

    def _emit_of_job(self, job_id: str, event: agents_pb2.AgentEvent) -> None:
        """Emit what belongs to a job, whichever attempt sealed the checkpoint."""
        event.job_id = job_id
        event.attempt = self._newest_attempt(job_id)
        event.at_s = node_time_s()
        self._emit(event, Weight.LASTING)
