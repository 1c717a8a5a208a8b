"""One rank's process, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.agent.core.workers import WorkerKey
from controller.core import events as ev
from controller.sim.checkers import FAILED
from outlast.failures import FailureClass
from outlast.ids import Attempt, JobId, NodeId
from outlast.worker_contract import CLEAN_CODES, KILLED, STOPPED_CODES, WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.agent import Agent
    from controller.sim.world import World

# Exits that a node's hardware may have brought about.
_OF_HARDWARE = (FailureClass.DEVICE, FailureClass.NCCL, FailureClass.UNKNOWN)
# Exits of which a traceback says where the program was.
_RAISED = (FailureClass.USER_ERROR, FailureClass.PROGRAM_ERROR, FailureClass.MISSING)


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's process."""

    agent: Agent
    node: NodeId
    job_id: JobId
    attempt: Attempt
    rank: int
    is_running: bool = True
    # The agent has told it to end, so that its end is no fault.
    told: bool = False
    # Its agent believes that it has ended.
    is_hidden: bool = False
    exit: ev.WorkerExited | None = None
    completed_step: int = -1

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.job_id, self.attempt, self.rank)

    def end(self, code: int, fault_class: FailureClass, fingerprint: str, detail: str) -> None:
        """The process ends by itself or by a fault."""
        world = self.agent.world
        if not self.is_running or (
            code == WorkerExitCode.FAILED and world.nodes[self.node].is_stuck
        ):
            return
        self._finish(world, code)
        if fault_class in _OF_HARDWARE:
            world.checkers.suspect(self.node, FAILED)
        self._report(code, fault_class, fingerprint, detail)

    def end_without_number(self) -> None:
        """The loss that it computed is not a number."""
        self.end(
            WorkerExitCode.FAILED, FailureClass.NON_FINITE, "0bad", "NonFiniteLossError: loss nan"
        )

    def end_with_other_bits(self) -> None:
        """It computed other bits than another replica did."""
        detail = "SilentCorruptionError: this replica computed other bits"
        self.end(WorkerExitCode.FAILED, FailureClass.CORRUPT, "0b17", detail)

    def kill(self) -> None:
        """The agent kills it on a command."""
        self.told = True
        if self.is_running and not self.agent.node.is_stuck:
            self._finish(self.agent.world, KILLED)
            self._report(KILLED, FailureClass.KILLED_BY_SIGNAL, "", "killed by SIGKILL")

    def _report(self, code: int, fault_class: FailureClass, fingerprint: str, detail: str) -> None:
        world = self.agent.world
        self.exit = ev.WorkerExited(
            job_id=self.job_id,
            attempt=self.attempt,
            node=self.node,
            rank=self.rank,
            code=int(code),
            fault_class=fault_class,
            fingerprint=fingerprint,
            detail=f"{detail} (rank {self.rank})" if code else "",
            traceback=f"Traceback: {detail}" if fault_class in _RAISED else "",
            completed_step=self.completed_step,
            at_s=world.now_s,
            stopped=self.told and code in STOPPED_CODES,
        )
        world.trace("exit", self.node, f"{self.job_id}/a{self.attempt}/r{self.rank} {code}")
        if self.is_hidden:
            # Its agent has said before that it ended; now it is true.
            self.agent.report_end(self, is_last=False)
        else:
            self.agent.worker_ended(self)

    def vanish(self, *, silently: bool) -> None:
        """Its agent or its whole node died, and it with them."""
        if self.is_running:
            self.told = True
            self.is_running = False
            self.agent.world.trainings.worker_gone(self, silently=silently)

    def _finish(self, world: World, code: int) -> None:
        training = world.trainings.get(self.job_id, self.attempt)
        if training is not None:
            self.completed_step = training.completed(world.now_s)
        self.is_running = False
        world.checkers.worker_ended(self)
        if code not in CLEAN_CODES or self.told:
            world.trainings.worker_gone(self)
