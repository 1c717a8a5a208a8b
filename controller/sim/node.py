"""A machine of the simulated fleet: what outlives its agent, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.agent.core.ledger import CommandLedger
from controller.core.capacity import Capacity
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId

if TYPE_CHECKING:
    from controller.sim.agent import Agent


@dataclass(slots=True, eq=False)
class Node:
    """A machine: what outlives its agent, and what is wrong with it."""

    name: NodeId
    number: int
    workers: int
    capacity: Capacity | None = None
    is_on: bool = True
    agent: Agent | None = None
    num_incarnations: int = 0
    # Sealed steps in host memory, by job; each rank of how many.
    memory: dict[JobId, dict[tuple[int, int], tuple[int, ...]]] = field(default_factory=dict)
    # The same of the node before it in rank order, where jobs keep replicas.
    replicas: dict[JobId, dict[tuple[int, int], tuple[int, ...]]] = field(default_factory=dict)
    sickness: str = ""
    # Its checks show that it computes other bits than it should.
    is_corrupt: bool = False
    # The class of exit of workers that use its broken devices; "" while they are not broken.
    device_exit: FailureClass = FailureClass.NONE
    # Whatever is wrong with it, its checks do not see it.
    passes_checks: bool = False
    # It says that workers have ended which it was told to stop, and leaves them as they are.
    hides_workers: bool = False
    check_delay_s: float = 0.0
    is_stuck: bool = False
    refuses_start: bool = False
    # A mount that jobs read has gone.
    lacks_file: bool = False
    standby_until_s: float = 0.0
    ledger: dict[str, object] = field(default_factory=dict)
    # The incarnation of its last agent, if that one ended in order.
    left: str = ""

    def load_ledger(self, max_results: int) -> CommandLedger:
        if not self.ledger:
            return CommandLedger(max_results=max_results)
        return CommandLedger.from_json(self.ledger, max_results=max_results)

    def agent_dies(self, *, silently: bool) -> None:
        """The agent ends, and with it the standby process and every worker."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        # The real ledger is on disk before anything is done, so what is in memory is there too.
        self.ledger = agent.ledger.to_json()
        for worker in agent.running():
            worker.vanish(silently=silently)
        for worker in agent.workers.values():
            agent.world.checkers.worker_ended(worker)
