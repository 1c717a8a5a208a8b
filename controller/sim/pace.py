"""How long things take in a simulated world, drawn from its seed.

`Pace` is that of the seeds, which look for mistakes: everything is drawn from wide ranges,
so that orders of events differ. `durations.SourcedPace` is that of simulations that make
statements about time.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from controller.agent.core.ledger import MAX_RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """What a world leaves out, so that thousands of nodes can be simulated."""

    # Whether reports of a first step arrive at once, instead of through the network.
    progress_at_once: bool = False
    # How many ranks say that they lost the one that failed, before all are stopped anyway.
    max_cascade: int | None = None
    # Whether messages that change nothing are sent: acknowledgements, and exits of workers that
    # were stopped.
    idle_messages: bool = True
    # How many answers each agent remembers: a thousand in each of 12,500 need gigabytes.
    max_results: int = MAX_RESULTS
    # One change in so many goes through the journal's text and back.
    codec_every: int = 1
    # After one batch in so many, the machine's whole state is compared with the journal's.
    compare_every: int = 1


WHOLE = Fidelity()


class Pace:
    """Wide ranges without a claim."""

    # A rank waits for its peers this long; then it gives up.
    rendezvous_timeout_s = 300.0
    hang_timeout_s = 300.0

    def __init__(self, random: Random) -> None:
        self.random = random

    def fork_s(self) -> float:
        """From the order to start until a worker is there."""
        return self.random.uniform(0.05, 0.5)

    def stop_s(self) -> float:
        """From the order to stop until the node's workers are dead."""
        return self.random.uniform(0.05, 1.0)

    def judge_s(self) -> float:
        """Until it is known who holds up a job that hangs."""
        return self.random.choice((0.01, 2.0, 8.0))

    def suite_s(self) -> float:
        """The checks of one node before it is used."""
        return self.random.uniform(5.0, 40.0)

    def search_s(self) -> float:
        """The checks of a job's nodes, and of the links between them, after a fault."""
        return self.random.uniform(20.0, 90.0)

    def provision_s(self) -> float:
        """Until the cluster has brought a new node."""
        return self.random.uniform(300.0, 900.0)

    def restore_s(self, usual_s: float, *, from_memory: bool) -> float:
        """From the last worker's start until all train: groups, and state."""
        return usual_s * self.random.uniform(0.5, 2.0)

    def upload_s(self, usual_s: float) -> float:
        """From a checkpoint's step until it is committed."""
        return usual_s * self.random.uniform(0.5, 2.0)
