"""What each kind of command consists of, in order.

Steps of the machine itself are decided and timed here: `ASK`, `KILL` and `FORGET_WORKERS`.
All others are done by the agent process, one at a time for each command.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from controller.agent.core.ledger import CommandKind


class Step(StrEnum):
    """A part of a command."""

    CHECK = "check"
    """Refuse what makes no sense on this node, before anything is touched."""
    STACKS = "stacks"
    """Collect the stacks of the workers that are about to be stopped."""
    ASK = "ask"
    """Send SIGTERM, and wait for the workers to end until the time of the command is over."""
    KILL = "kill"
    """Send SIGKILL, and wait for the workers to end."""
    LEFTOVERS = "leftovers"
    """Wait for the ends of what the workers left in their cgroups and process groups."""
    PREPARE = "prepare"
    """Preflight, host memory, replicas, launches."""
    FORK = "fork"
    """Fork all workers or none."""
    FORGET_WORKERS = "forget workers"
    """Drop dead workers: of older attempts after a start, of the whole job when it is over."""
    CLEAN_UP = "clean up"
    """Delete old attempts, follow uploads."""
    DRAIN = "drain"
    """Finish the uploads and replicas of a job."""
    FREE = "free"
    """Free the host memory of a job."""
    SUITE = "suite"
    PUSH = "push"


STEPS: Mapping[CommandKind, tuple[Step, ...]] = {
    CommandKind.START: (
        Step.CHECK,
        # The controller stops an attempt before it starts the next; a stop that was lost
        # must not leave two attempts side by side.
        Step.KILL,
        Step.LEFTOVERS,
        Step.PREPARE,
        Step.FORK,
        Step.FORGET_WORKERS,
        Step.CLEAN_UP,
    ),
    CommandKind.STOP: (Step.STACKS, Step.ASK, Step.KILL, Step.LEFTOVERS),
    CommandKind.SUITE: (Step.SUITE,),
    CommandKind.FORGET: (
        Step.CHECK,
        Step.KILL,
        Step.LEFTOVERS,
        Step.DRAIN,
        Step.FORGET_WORKERS,
        Step.FREE,
    ),
    CommandKind.PUSH: (Step.CHECK, Step.PUSH),
}
