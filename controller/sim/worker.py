"""One rank's process, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.agent.core.workers import WorkerKey
from controller.sim.checkers import FAILED
from controller.sim.exits import left_behind
from outlast.failures import FailureClass
from outlast.ids import Attempt, JobId, NodeId
from outlast.v1 import agents_pb2
from outlast.worker_contract import CLEAN_CODES, KILLED, STOPPED_CODES, WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.agent import Agent
    from controller.sim.world import World

# Exits that a node's hardware may have brought about.
_OF_HARDWARE = (FailureClass.DEVICE, FailureClass.NCCL, FailureClass.UNKNOWN)


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One rank's process."""

    agent: Agent
    node: NodeId
    job_id: JobId
    attempt: Attempt
    rank: int
    is_running: bool = True
    # Its agent has stopped it or gone before it, so that its end is no fault.
    is_stopped: bool = False
    # Its agent believes that it has ended.
    is_hidden: bool = False
    # It was asked to leave its attempt after a step.
    lives_on: bool = False
    # It has left its attempt, and its process lives for the next one.
    is_kept: bool = False
    exit: agents_pb2.WorkerExit | None = None
    completed_step: int = -1

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.job_id, self.attempt, self.rank)

    def end(self, code: int, exit_class: FailureClass, which: str = "") -> None:
        """The process ends by itself or by a fault; `which` tells errors of users apart."""
        world = self.agent.world
        if not self.is_running or (
            code == WorkerExitCode.FAILED and world.nodes[self.node].is_stuck
        ):
            return
        self._finish(world, code)
        if exit_class in _OF_HARDWARE:
            world.checkers.suspect(self.node, FAILED)
        self._report(code, exit_class, which)

    def end_without_number(self) -> None:
        """The loss that it computed is not a number."""
        self.end(WorkerExitCode.FAILED, FailureClass.NON_FINITE)

    def end_with_other_bits(self) -> None:
        """It computed other bits than another replica did."""
        self.end(WorkerExitCode.FAILED, FailureClass.CORRUPT)

    def kill(self) -> None:
        """The agent kills it on a command."""
        self.is_stopped = True
        if self.agent.node.is_stuck:
            return
        if self.is_running:
            self._finish(self.agent.world, KILLED)
            self._report(KILLED, FailureClass.KILLED_BY_SIGNAL)
        self.let_go()

    def leave(self) -> None:
        """The agent has it leave its attempt on a command, and live on."""
        self.is_stopped = True
        if self.is_running and not self.agent.node.is_stuck:
            self.is_kept = True
            self._finish(self.agent.world, WorkerExitCode.STOPPED)
            self._report(WorkerExitCode.STOPPED, FailureClass.NONE)

    def stop_after_step(self) -> None:
        """Its attempt ends with a step that all ranks have agreed on."""
        if self.lives_on:
            self.leave()
        else:
            self.end(WorkerExitCode.STOPPED, FailureClass.CLEAN)

    def let_go(self) -> None:
        """A process that was kept ends, or takes part in another attempt."""
        if self.is_kept:
            self.is_kept = False
            self.agent.kept_ended(self)

    def _report(self, code: int, exit_class: FailureClass, which: str = "") -> None:
        world = self.agent.world
        self.exit = left_behind(int(code), exit_class, which)
        self.exit.completed_step = self.completed_step
        self.exit.at_s = world.now_s
        self.exit.stopped = self.is_stopped and code in STOPPED_CODES
        world.trace("exit", self.node, f"{self.job_id}/a{self.attempt}/r{self.rank} {code}")
        if self.is_hidden:
            # Its agent has said before that it ended; now it is true.
            self.agent.report_end(self, is_last=False)
        else:
            self.agent.worker_ended(self)

    def vanish(self, *, silently: bool) -> None:
        """Its agent or its whole node died, and it with them."""
        self.is_kept = False
        if self.is_running:
            self.is_stopped = True
            self.is_running = False
            self.agent.world.trainings.worker_gone(self, silently=silently)

    def _finish(self, world: World, code: int) -> None:
        training = world.trainings.get(self.job_id, self.attempt)
        if training is not None:
            self.completed_step = training.step_to_report(training.completed(world.now_s))
        self.is_running = False
        world.checkers.worker_ended(self)
        if code not in CLEAN_CODES or self.is_stopped:
            world.trainings.worker_gone(self)
