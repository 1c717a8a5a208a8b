"""Host memory of a simulated node as the steps of orders find it and leave it.

Which of these steps is done, and in which order, the production machine decides. What they rely on
is checked here: nobody uses host memory that is handed over, no folder of a rank is there before,
and at the fork no slot of a rank that is elsewhere is left, and what is missing is being fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.agent.core.steps import StartFacts, Step
from controller.sim.order import Order
from controller.sim.promises import Promises
from outlast.ids import Attempt, JobId

if TYPE_CHECKING:
    from controller.sim.agent import Agent


class OrderMemory:
    """What one agent does with host memory at a start, and when a job is over."""

    def __init__(self, agent: Agent, promises: Promises) -> None:
        self._agent, self._node = agent, agent.node
        self._fail = promises.fail
        # The attempt of each job whose copies are sent and kept, and whose folders are there.
        self._copying: dict[JobId, Attempt] = {}
        self._folders: dict[JobId, Attempt] = {}

    def facts(self, order: Order) -> StartFacts:
        """What preflight finds."""
        job = self._agent.world.jobs[order.job]
        return StartFacts(
            has_strays=self._has_strays(order),
            keeps_copies=job.replicas,
            shares_data=len(order.message.start_workers.ranks) > 1,
        )

    def do(self, order: Order, step: Step) -> None:
        """Do a step."""
        job = order.job
        match step:
            case Step.HAND_OVER:
                self._hand_over(order)
            case Step.FOLDERS:
                self._folders[job] = order.attempt
            case Step.KEEP_COPIES:
                if self._folders.get(job) != order.attempt:
                    self._fail(f"{order.command.command_id} fetches copies into no folder")
                self._copying[job] = order.attempt
            case Step.FREE_COPIES:
                self._copying.pop(job, None)
                self._node.replicas.pop(job, None)
            case Step.DRAIN:
                self._copying.pop(job, None)
            case _:
                raise AssertionError(f"{step.value} is no step of host memory")

    def check_fork(self, order: Order) -> None:
        """Workers are about to be forked."""
        job, name = order.job, order.command.command_id
        if self._has_strays(order):
            self._fail(f"{name} forks, and host memory has slots of ranks that are elsewhere")
        if self._agent.world.jobs[job].replicas and self._copying.get(job) != order.attempt:
            self._fail(f"{name} forks, and nobody fetches the copies that its ranks wait for")

    def _has_strays(self, order: Order) -> bool:
        ranks = order.message.start_workers.ranks
        return any(rank not in ranks for _, rank in self._node.memory.get(order.job, {}))

    def _hand_over(self, order: Order) -> None:
        """What strays fits no other rank of the simulation."""
        name, ranks = order.command.command_id, order.message.start_workers.ranks
        if any(not worker.is_hidden for worker in self._agent.running(order.job)):
            self._fail(f"{name} hands over host memory that workers still use")
        if self._folders.get(order.job) == order.attempt:
            self._fail(f"{name} hands over host memory to ranks that have folders already")
        held = self._node.memory.get(order.job, {})
        for key in [key for key in held if key[1] not in ranks]:
            del held[key]
