"""What each kind of command consists of, in order.

Steps of the machine itself are decided and timed here: `LEAVE`, `ASK`, `KILL`, `DATA_LOADER` and
`FORGET_WORKERS`.
All others are done by the agent process, one at a time for each command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from controller.agent.core.ledger import CommandKind


class Step(StrEnum):
    """A part of a command."""

    CHECK = "check"
    """Refuse what makes no sense on this node, before anything is touched."""
    STACKS = "stacks"
    """Collect the stacks of the workers that are about to be stopped."""
    LEAVE = "leave"
    """Ask the workers to leave their attempt at once, and wait for them to have left or ended."""
    ASK = "ask"
    """Have the workers end after a step (SIGTERM), or leave after it and live on, and wait for that
    until the time of the command is over."""
    KILL = "kill"
    """Send SIGKILL, and wait for the workers to end."""
    LEFTOVERS = "leftovers"
    """Wait for the ends of what the workers left in their cgroups and process groups."""
    PREFLIGHT = "preflight"
    """Refuse what does not fit this node just now, and find out what else is to be done."""
    HAND_OVER = "hand over"
    """Leave host memory of ranks that are elsewhere now to those that have none, free the rest."""
    FOLDERS = "folders"
    """Make the workers' folders."""
    KEEP_COPIES = "keep copies"
    """Send and keep copies of host memory, and fetch what this node lacks."""
    FREE_COPIES = "free copies"
    """Free the copies of an attempt that had somebody to bring them to."""
    FORK = "fork"
    """Fork all workers or none."""
    DATA_LOADER = "data loader"
    """Begin to keep a process that reads data for all workers."""
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
        Step.PREFLIGHT,
        # The slots of ranks that are elsewhere are nobody's once all workers are gone, and go to
        # ranks without a folder. Copies come into folders, and ranks wait for them from their fork.
        Step.HAND_OVER,
        Step.FOLDERS,
        Step.KEEP_COPIES,
        Step.FREE_COPIES,
        Step.FORK,
        # Workers are not held up by it: they need data last.
        Step.DATA_LOADER,
        Step.FORGET_WORKERS,
        Step.CLEAN_UP,
    ),
    CommandKind.STOP: (Step.STACKS, Step.LEAVE, Step.ASK, Step.KILL, Step.LEFTOVERS),
    # What checks use may be held by processes that were kept.
    CommandKind.SUITE: (Step.KILL, Step.SUITE),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What preflight finds on the node, and a start depends on."""

    has_strays: bool
    """Host memory of the job has slots of ranks that are elsewhere now."""
    keeps_copies: bool
    """Other nodes keep copies of what the attempt has in host memory, or have the same."""
    shares_data: bool = False
    """Several ranks here read data, and share it."""


def is_needed(step: Step, facts: StartFacts | None) -> bool:
    """Whether a step has anything to do, as far as preflight knows."""
    if facts is None:
        return True
    match step:
        case Step.HAND_OVER:
            return facts.has_strays
        case Step.KEEP_COPIES:
            return facts.keeps_copies
        case Step.FREE_COPIES:
            # A smaller size may have nobody to bring copies to.
            return not facts.keeps_copies
        case Step.DATA_LOADER:
            return facts.shares_data
        case _:
            return True
