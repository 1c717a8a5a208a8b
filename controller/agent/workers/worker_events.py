"""What a node's agent hears of its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controller.agent.workers.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvents:
    """What the rest of the agent wants to hear."""

    requested: Callable[[list[Worker]], None]
    """These workers, all ranks of one attempt here, are about to be forked."""
    exited: Callable[[Worker], None]
    """A worker ended or left; `exit` says how, and its black box is still open."""
    kept_ended: Callable[[Worker], None]
    """The process of a worker that had left its attempt has ended, or is another worker's now."""
    forked: Callable[[Worker], None]
    """There is a process of a worker that was requested."""
    not_forked: Callable[[Worker], None]
    """There will be none, and the worker is not known any more."""
    changed: Callable[[], None]
    """There are new processes below the agent."""
