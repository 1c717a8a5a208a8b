"""What can happen to a node and to the workers there, as reported to the machine."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.capacity import Capacity
from outlast.failures import FailureClass
from outlast.ids import Attempt, JobId, NodeId


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
    # Its agent had ordered that.
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
    # Of Outlast.
    version: str = ""


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
class NodeLocated:
    """Where the cluster says that a node's host stands: see `topology`."""

    node: NodeId
    topology: str


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
class ImageNotPulled:
    """The cluster tries in vain to fetch an image of jobs, and for long enough."""

    image: str
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
    | NodeLocated
    | NodeReleased
    | NodeReplaced
    | NodeCordonRequested
    | NodeUncordonRequested
    | NodeDrainRequested
    | NodeForgetRequested
)
# What is of no one node.
ClusterNews = NodesAwaited | ImageNotPulled
