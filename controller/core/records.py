"""What the controller remembers: jobs, nodes, incidents and open commands.

All are frozen; a change makes a new record, and the new record *is* the state change
that the journal stores. So folding the journal is nothing but keeping the last
record of each id.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from controller.core.accounting import NOTHING_YET, Account
from controller.core.capacity import NOTHING_NEEDED, Capacity, NodeNeed, image_of
from controller.core.incident_record import Evidence
from controller.core.kinds import NonFiniteAgain, Rung, Wanted
from controller.core.states import TERMINAL, JobState, NodeState
from controller.core.topology import Path, parsed
from outlast.chosen import ChosenStart
from outlast.ids import Attempt, IncidentId, JobId, NodeId
from outlast.layout import Layout
from outlast.skipped import StepRange

NO_ATTEMPT = Attempt(0)
# No spares are kept for jobs in these.
_AT_REST = (*TERMINAL, JobState.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of replicas that a job may train with, and what follows from it."""

    dp: int
    nodes: int
    spec_json: str
    replica_node_indexes: tuple[tuple[int, ...], ...] = ()
    replica_shift: int = 0
    any_shift_bytes: int = 0
    need: NodeNeed = NOTHING_NEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What the controller must know of a job's spec, at the size that it has now."""

    nodes: int
    workers_per_node: int
    standby: int
    # None: a script, which is done when all of its ranks have ended with exit code 0.
    total_steps: int | None
    retry_budget: int
    in_place_restarts: int
    first_step_timeout_s: float
    stop_timeout_s: float
    preflight_timeout_s: float
    diagnose_timeout_s: float
    ladder: tuple[Rung, ...] = (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE)
    # By index of a node, those of the nodes that have its state, too; empty when host memory is
    # not copied between nodes.
    replica_node_indexes: tuple[tuple[int, ...], ...] = ()
    # By how many places a node's copies are away from it, 0 where there are none, and the host
    # memory that a node needs where they may be any other number of places away.
    replica_shift: int = 0
    any_shift_bytes: int = 0
    # Largest first, the wanted one before all; empty when the job has one size only.
    sizes: tuple[Size, ...] = ()
    # How long missing nodes are waited for, and the least time between growing and growing.
    shrink_after_s: float = 0.0
    grow_after_s: float = 0.0
    tp: int = 1
    pp: int = 1
    # Replicas that divide experts among them.
    ep: int = 1
    # Ranks that divide sequences among them.
    cp: int = 1
    non_finite_again: NonFiniteAgain = NonFiniteAgain.SKIP
    rollback_steps: int = 100
    # Of each node, besides its worker places.
    need: NodeNeed = NOTHING_NEEDED
    # How long the last checkpoint may take after the last step; 0: it is not waited for.
    last_checkpoint_s: float = 0.0
    # Whether nodes are checked before the job first uses them.
    preflight: bool = True
    # Whether errors of the job's own program are retried like any other fault.
    retry_program_errors: bool = False
    # Whether ranks that a fault leaves alive keep their processes.
    heals: bool = False
    # Jobs of a higher one come first; whether it has those of a lower one make room.
    priority: int = 0
    preempts: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def is_script(self) -> bool:
        """Whether its ranks are a program of the user's own."""
        return self.total_steps is None

    @property
    def wanted_nodes(self) -> int:
        """Nodes of the size that the user wants, whatever the present one is."""
        return self.sizes[0].nodes if self.sizes else self.nodes

    def model_node_indexes(self, rank: int) -> tuple[int, ...]:
        """Indexes of the nodes that hold the model of `rank`: each has a part in its loss."""
        layout = Layout(tp=self.tp, pp=self.pp, dp=self.world_size // (self.tp * self.pp))
        # Each of those that divide experts or sequences has computed for the others, too.
        joined = math.lcm(self.ep, self.cp)
        part = layout.coordinate(rank).dp // joined
        ranks = (
            each for each in range(self.world_size) if layout.coordinate(each).dp // joined == part
        )
        return tuple(dict.fromkeys(each // self.workers_per_node for each in ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A node that a job is kept off as long as its agent is the same: for want of capacity, or of
    a file that other nodes have.
    """

    node: NodeId
    incarnation: str
    detail: str
    # When it is asked again: what it lacks is only in use. None: it does not have it.
    until_s: float | None = None
    # How often it has refused in a row.
    times: int = 1
    # What it has, where that is too little: nodes with no more do not fit either.
    capacity: Capacity | None = None
    # It has the room, and something that the job reads is not there.
    is_missing_file: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job. `nodes` has one place per node in rank order; None is a free place.

    `spec_json`, `plan` and `nodes` are of its present size.
    """

    job_id: JobId
    name: str
    request_id: str
    spec_json: str
    checkpoint_url: str
    plan: JobPlan
    submitted_s: float
    state: JobState
    since_s: float
    reason: str
    # Who submitted it; "" where nobody was asked who he is.
    owner: str = ""
    wanted: Wanted = Wanted.RUN
    # The ladder of recovery paused it, and no person has resumed or cancelled it since.
    needs_person: bool = False
    attempt: Attempt = NO_ATTEMPT
    nodes: tuple[NodeId | None, ...] = ()
    # Nodes that must pass preflight before the next start; where the state's patience ends.
    unchecked: tuple[NodeId, ...] = ()
    deadline_s: float | None = None
    incident: IncidentId | None = None
    num_incidents: int = 0
    # In journals of older versions only: by now changes of their own (`State.done`).
    done_ranks: tuple[int, ...] = ()
    # While it stops in order to grow: the step after which its ranks stopped, -1 at first.
    grow_step: int | None = None
    # The job that it stops for, as soon as `grow_step` is in storage; how often that was so.
    yields_to: JobId | None = None
    num_yields: int = 0
    # Whether it waits because its owner has as many nodes as he may have.
    held_back: bool = False
    # Last step that any rank is known to have completed.
    high_step: int = 0
    committed_step: int | None = None
    # When that was noted; None in journals of older versions.
    committed_s: float | None = None
    retry_left: int = 0
    # Faults since a newer checkpoint was last committed.
    faults_in_row: int = 0
    # What failed last, how far training was then, and how often in a row it came back since.
    last_fingerprint: str = ""
    last_fault_step: int = -1
    same_failures: int = 0
    # The step with a non-finite loss that is done again, and the nodes that had a part in it.
    replayed_step: int | None = None
    replayed_on: tuple[NodeId, ...] = ()
    # Nodes that had a part in such a step, which was finite when it was done again.
    unreproduced: tuple[NodeId, ...] = ()
    # Steps that are left out, in the order in which that was decided.
    skipped: tuple[StepRange, ...] = ()
    # Where persons let it go on, oldest first.
    chosen: tuple[ChosenStart, ...] = ()
    # How many of them an attempt has trained from: the others can be called off.
    num_begun: int = 0
    restarts: int = 0
    # What decides the bits of the present attempt, and where that changed, in words.
    environment: str = ""
    environment_changes: tuple[str, ...] = ()
    data_left_out: tuple[str, ...] = ()
    # In one pass over the data of training; 0: not known.
    num_samples: int = 0
    # Nodes that ran some attempt and have not been ordered to forget the job.
    held_by: tuple[NodeId, ...] = ()
    error: str = ""
    # Of the rank whose end made it fail.
    exit_code: int | None = None
    finished_s: float | None = None
    # What its time went into so far.
    account: Account = NOTHING_YET
    # Of this attempt's waits for checkpoints, the seconds that are in the account.
    stalled_s: float = 0.0
    # Where this attempt went on from; None before all ranks have done a step.
    resumed_step: int | None = None
    # Nodes that do not fit it, found out when it was to start there.
    misfits: tuple[Misfit, ...] = ()
    # Answers to this attempt's starts by nodes on which a file is missing, until all have answered.
    lacking: tuple[Evidence, ...] = ()
    # Uploads from host memory that a person asked for; makes command ids unique.
    num_pushes: int = 0

    @property
    def mark(self) -> str:
        """Tells the job from any other of the same id, of this controller or another."""
        text = f"{self.job_id}\n{self.request_id}\n{self.submitted_s!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def submitted_spec_json(self) -> str:
        """The spec as it was submitted, whatever the present size is."""
        return self.plan.sizes[0].spec_json if self.plan.sizes else self.spec_json

    @property
    def catch_up_step(self) -> int:
        """The step that the present attempt must complete to be past the last fault."""
        return max(self.high_step, self.replayed_step or 0)

    @property
    def wants_nodes(self) -> bool:
        """Whether it trains or will go on by itself, so that spares are kept for it."""
        is_wanted = self.wanted is Wanted.RUN and self.state not in _AT_REST
        return is_wanted and not self.held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node of the fleet."""

    node: NodeId
    state: NodeState
    since_s: float
    reason: str
    incarnation: str
    address: str
    rendezvous_port: int
    workers: int
    job: JobId | None = None
    cordoned: bool = False
    # Suites asked of it, for command ids; in a row that could not run; passed while VALIDATING.
    num_suites: int = 0
    unrun_suites: int = 0
    passes: int = 0
    checked_s: float | None = None
    # The checkpoints' URL that its last passed checks tried; "": none.
    checked_storage: str = ""
    # When the present state should be looked at again.
    timer_s: float | None = None
    # When quarantines began, newest last, within the retirement window.
    quarantines_s: tuple[float, ...] = ()
    # When it left a job to be checked, newest last, within the same window.
    taken_out_s: tuple[float, ...] = ()
    # The incident for which it did so last.
    taken_out_for: IncidentId | None = None
    # Id of the quarantine session until the node may be used again; the cluster keeps it closed.
    quarantine: str = ""
    # When that session began.
    quarantined_s: float | None = None
    # Incarnations of agents: it could not kill its workers; it said that it ends. "" for none.
    stuck: str = ""
    left: str = ""
    # Of agents before this one, the newest last: none of them may come back.
    superseded: tuple[str, ...] = ()
    # When its agent was stopped in order of late, under a job at work, newest last.
    stops_s: tuple[float, ...] = ()
    # Where its agent takes copies of host memory, 0 for nowhere, and what it wants to hear.
    replica_port: int = 0
    replica_token: str = ""
    # None from an agent that does not say.
    capacity: Capacity | None = None

    @property
    def path(self) -> Path:
        """Where it stands, as far as that is known."""
        return () if self.capacity is None else parsed(self.capacity.topology)

    @property
    def image(self) -> str:
        """The job's image that its agent runs in; "" for that of the agents."""
        return image_of(self.capacity)

    def session_of(self, began_s: float) -> str:
        """Id of the quarantine session of this node that began then."""
        return f"{self.node}/{began_s:.0f}"

    @property
    def has_left(self) -> bool:
        """Whether its agent ended in order, and no other has come since."""
        return self.left != "" and self.left == self.incarnation

    @property
    def is_stuck(self) -> bool:
        """Whether workers that nobody can kill are still there, as far as is known."""
        return self.stuck == self.incarnation
