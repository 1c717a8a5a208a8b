"""A machine of the simulated fleet: what outlives its agent, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controller.agent.core.ledger import CommandLedger, Result
from controller.core.capacity import Capacity
from controller.sim.host_memory import Part
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import JobId, NodeId

if TYPE_CHECKING:
    from controller.sim.agent import Agent
    from controller.sim.attempt import SimJob


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
    # Sealed states in host memory, by job; each rank of how many.
    memory: dict[JobId, dict[tuple[int, int], tuple[Part, ...]]] = field(default_factory=dict)
    # Copies of those of ranks of other nodes, where jobs keep replicas.
    replicas: dict[JobId, dict[tuple[int, int], tuple[Part, ...]]] = field(default_factory=dict)
    # How often its host memory was lost or freed.
    num_lost: int = 0
    sickness: str = ""
    # Its checks show that it computes other bits than it should.
    is_corrupt: bool = False
    # The class of exit of workers that use its broken devices; "" while they are not broken.
    device_exit: FailureClass = FailureClass.NONE
    # Whatever is wrong with it, its checks do not see it.
    passes_checks: bool = False
    # It reports workers as ended that it was ordered to stop, and leaves them running.
    hides_workers: bool = False
    check_delay_s: float = 0.0
    # How many times as long as usual steps take with it.
    slowness: float = 1.0
    is_stuck: bool = False
    refuses_start: bool = False
    # A mount that jobs read has gone.
    lacks_file: bool = False
    standby_until_s: float = 0.0
    ledger: dict[str, object] = field(default_factory=dict)
    # The newest attempt of each job that it was asked to stop, as long as its ledger is there.
    stopped: dict[JobId, int] = field(default_factory=dict)
    # The incarnation of its last agent, if that one ended in order.
    left: str = ""

    def load_ledger(self, max_results: int) -> CommandLedger:
        if not self.ledger:
            return CommandLedger(max_results=max_results)
        return CommandLedger.from_json(self.ledger, max_results=max_results)

    def lacks_memory(self, job: JobId, jobs: Mapping[JobId, SimJob]) -> Result | None:
        """The refusal of a job that needs more host memory than there is; None when it fits."""
        if self.capacity is None:
            return None
        needed, total = jobs[job].memory_bytes, self.capacity.host_memory_bytes
        used = sum(jobs[other].memory_bytes for other in self.memory if other != job)
        if needed > total:
            detail = f"needs {needed} bytes of host memory, {total} in all"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.MISFIT)
        if needed > total - used:
            detail = f"needs {needed} bytes of host memory, {used} of {total} are used"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.OCCUPIED)
        return None

    def lose_memory(self) -> None:
        """The machine goes dark."""
        self.memory.clear()
        self.replicas.clear()
        self.num_lost += 1

    def free_memory(self, job: JobId) -> None:
        """A job needs it no more."""
        self.memory.pop(job, None)
        self.replicas.pop(job, None)
        self.num_lost += 1

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
