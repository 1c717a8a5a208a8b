"""Everything that can happen to the machine. Past tense; nothing here is a request
to a part of Outlast. Times inside events are those of whoever saw it happen; the
machine's own time comes beside the event.

Healthy heartbeats are not here: `liveness` turns silence into events at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.capacity import Capacity
from controller.core.records import Cause, JobPlan
from outlast.chosen import ChosenStart
from outlast.failures import ErrorKind, FailureClass
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
    """These ended jobs and closed incidents are older, or more, than is kept; see `retention`."""

    jobs: tuple[JobId, ...] = ()
    incidents: tuple[IncidentId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker ended. `code` is minus the signal if one killed it."""

    job_id: JobId
    attempt: Attempt
    node: NodeId
    rank: int
    code: int
    fault_class: FailureClass
    fingerprint: str
    detail: str
    traceback: str
    completed_step: int
    at_s: float
    # Its agent had told it to.
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One line of what an agent finds on its node when it joins."""

    job_id: JobId
    attempt: Attempt
    rank: int
    # None while the worker runs.
    exit: WorkerExited | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent opened a session; `statuses` is all that is true on its node."""

    node: NodeId
    incarnation: str
    address: str
    rendezvous_port: int
    workers: int
    statuses: tuple[WorkerStatus, ...]
    replica_port: int = 0
    replica_token: str = ""
    # The agent before it on the node, if that one ended in order.
    predecessor: str = ""
    capacity: Capacity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """The node's agent was asked to end, and does so in order, its workers with it."""

    node: NodeId
    incarnation: str
    # By this controller, which ends itself and takes its nodes along.
    is_ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    """The session ended without a newer one taking its place."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLate:
    """No heartbeat for `heartbeat_late_s`."""

    node: NodeId
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """No heartbeat for `heartbeat_lost_s`: one of the two signals that a loss needs."""

    node: NodeId
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """No heartbeat for `heartbeat_silent_s`: enough on its own."""

    node: NodeId
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeard:
    """A heartbeat arrived from a node that was late or worse."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """The cluster says that the node does not exist any more, or does not work."""

    node: NodeId
    detail: str
    at_s: float
    # False when the host may well be healthy: someone took the node away.
    blames_host: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """The cluster takes back that the node is gone."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClosed:
    """Others want nothing new on the node's host; an empty reason opens it again."""

    node: NodeId
    reason: str
    # Not only closed: somebody says that it is broken.
    is_broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased:
    """The cluster wants a node back that nobody needs; ignored when somebody does."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReplaced:
    """Another machine has the name of a node that was given up; what it did wrong is over."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAwaited:
    """How it stands with nodes that the cluster brings; "" when it brings none."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCordonRequested:
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUncordonRequested:
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrainRequested:
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgetRequested:
    """Ignored unless the node was given up and nobody hears of it."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """Where a process stood before it was stopped; rank -1 is the node's agent."""

    rank: int
    place: str
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
class NodeFound:
    """What a search says of one node."""

    node: NodeId
    # pass, warn, fail, inconclusive, skip or error.
    verdict: str
    detail: str
    # Its worst figure against that figure's yardstick, 1 is as good as expected; None when
    # nothing could be compared.
    figure: float | None = None
    # Its results differ in bits from what is right.
    is_corrupt: bool = False


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
    is_users: bool = False


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


NodeEvent = (
    NodeJoined
    | NodeLeft
    | NodeDisconnected
    | NodeLate
    | NodeLost
    | NodeSilent
    | NodeHeard
    | NodeGone
    | NodeBack
    | NodeClosed
    | NodeReleased
    | NodeReplaced
    | NodeCordonRequested
    | NodeUncordonRequested
    | NodeDrainRequested
    | NodeForgetRequested
)
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
    | NodesAwaited
    | NodeEvent
)
