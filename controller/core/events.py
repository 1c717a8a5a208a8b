"""Everything that can happen to the machine. Past tense; nothing here is a request
to a part of Outlast. Times inside events are those of whoever saw it happen; the
machine's own time comes beside the event.

Healthy heartbeats are not here: `liveness` turns silence into events at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.incident_cut import IncidentCut
from controller.core.kinds import Cause
from controller.core.node_events import ClusterNews, NodeEvent, NodeFound, WorkerExited
from controller.core.records import JobPlan
from outlast.chosen import ChosenStart
from outlast.failures import ErrorKind
from outlast.ids import Attempt, CommandId, IncidentId, JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """The controller has folded its journal and listens again."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The moment that `wake_at` named has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A user submitted a valid spec."""

    job_id: JobId
    name: str
    request_id: str
    spec_json: str
    checkpoint_url: str
    plan: JobPlan
    owner: str = ""
    """Who submitted it; "" where nobody is asked who he is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelRequested:
    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPauseRequested:
    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumeRequested:
    """A user lets a paused job go on: from its newest state, or from where they have chosen.

    A choice holds for the attempt that it names as the last one before; of another it is late.
    """

    job_id: JobId
    chosen: ChosenStart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPushRequested:
    """A user wants what a paused job has in host memory in storage."""

    job_id: JobId
    # "" for where its checkpoints go anyway.
    checkpoint_url: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsExpired:
    """These ended jobs, closed incidents, parts of incidents and former nodes are older, or more,
    than is kept; see `retention`.
    """

    jobs: tuple[JobId, ...] = ()
    incidents: tuple[IncidentId, ...] = ()
    cuts: tuple[IncidentCut, ...] = ()
    nodes: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """Where a process stood before it was stopped; rank -1 is the node's agent."""

    rank: int
    location: str
    text: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFinished:
    """An agent carried a command out, or refused it."""

    command_id: CommandId
    node: NodeId
    ok: bool
    # NONE when ok.
    error_kind: ErrorKind
    detail: str
    # For StopWorkers: last step that any local rank completed, -1 when none.
    completed_step: int = -1
    # For RunSuite: pass, warn, fail, inconclusive or error over all findings.
    verdict: str = ""
    # For StopWorkers that looks first.
    stacks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsSearched:
    """A search between a fault and the restart has ended."""

    search: str
    job_id: JobId
    nodes: tuple[NodeFound, ...]
    # Pairs that do not work with each other, though both ends work with others.
    links: tuple[tuple[NodeId, NodeId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdvanced:
    """Every rank completed a step; sent for the first one of an attempt and when
    the attempt passes the step that the last fault interrupted."""

    job_id: JobId
    attempt: Attempt
    completed_step: int
    resumed_step: int
    at_s: float
    split: str = ""
    # What decides the bits of the arithmetic, and what of it changed, in words.
    environment: str = ""
    environment_changes: tuple[str, ...] = ()
    data_left_out: tuple[str, ...] = ()
    # In one pass over the data of training; 0: not known.
    num_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStalled:
    """No step was completed for longer than the job allows."""

    job_id: JobId
    attempt: Attempt
    stalled_s: float
    culprit_ranks: tuple[int, ...]
    detail: str
    # How long it may take, and where that comes from.
    limit: str = ""
    # Where each rank stood.
    stood: str = ""
    # The job's own program is at fault, not a node.
    is_program_error: bool = False
    # The ranks all stand in one operation: none of them is known to be the one at fault.
    are_alike: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """A detector found something while the job trains.

    `detail` has the measured value, the limit and where that comes from.
    """

    job_id: JobId
    attempt: Attempt
    cause: Cause
    node: NodeId | None
    rank: int | None
    detail: str
    at_s: float
    # The spec wants the ladder of recovery to deal with it.
    acts: bool = False
    # What it is about, when that is a step.
    step: int | None = None
    # How often it was found since it was last reported.
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionEnded:
    """What a detector found is true no more."""

    job_id: JobId
    cause: Cause
    node: NodeId | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """A checkpoint became visible in storage, verified by its commit record.

    `is_behind` says that storage has been too slow for the job's interval for a while;
    `stalled_s` for how long `attempt` has waited for copies to host memory so far.
    """

    job_id: JobId
    step: int
    is_behind: bool = False
    attempt: int = 0
    stalled_s: float = 0.0
    # The attempt whose state it is; 0 from an agent that does not say.
    saved_by: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """An upload was given up, a checkpoint could not be loaded, or a copy of host memory did not
    get to another node; training goes on. Or a start waits for storage that does not answer."""

    job_id: JobId
    node: NodeId
    step: int
    detail: str
    at_s: float
    was_stored: bool = False
    was_copied: bool = False
    is_awaited: bool = False


Event = (
    ControllerStarted
    | TimePassed
    | JobSubmitted
    | JobCancelRequested
    | JobPauseRequested
    | JobResumeRequested
    | CheckpointPushRequested
    | RecordsExpired
    | WorkerExited
    | CommandFinished
    | FaultsSearched
    | JobAdvanced
    | JobStalled
    | Detected
    | DetectionEnded
    | CheckpointCommitted
    | CheckpointFailed
    | ClusterNews
    | NodeEvent
)
