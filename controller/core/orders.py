"""What the controller orders of an agent: commands, and the record of one that is open."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.ids import Attempt, CommandId, JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Start the node's ranks of an attempt.

    The same for every node, so that one row of the journal has the orders of all: which ranks
    those are, and all else, follows from the `AttemptRecord` (see `starts`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Stop every worker of the job up to and including this attempt."""

    graceful: bool
    timeout_s: float
    # Note where every worker stands before it is stopped.
    capture_stacks: bool = False
    # Those that can leave the attempt and live on, for the next start of the same ranks.
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSuite:
    """Run a suite of checks."""

    suite: str
    timeout_s: float
    # Of the job that the node is checked for, "" for none.
    checkpoint_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJob:
    """The job has ended here: finish its uploads and free its host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCheckpoint:
    """Upload the newest step of the job that host memory holds."""

    checkpoint_url: str
    timeout_s: float
    # Tells the job's checkpoints from those of another of the same id.
    owner: str


Command = StartWorkers | StopWorkers | RunSuite | ForgetJob | PushCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """An intent: journalled before it is sent, open until its result arrives."""

    command_id: CommandId
    node: NodeId
    job: JobId | None
    attempt: Attempt
    issued_s: float
    command: Command
