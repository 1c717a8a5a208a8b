"""What a verdict on a fault may depend on, and what it says.

What does not belong here: the rules that lead from one to the other (`policy`, `reproducing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.causes import WHEN_PEERS_DIE
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind, NonFiniteAgain, Rung
from outlast.ids import NodeId
from outlast.skipped import StepRange

# How many faults before this one `PolicyInput.blamed_before` looks back on.
BLAMED_BEFORE = 2
# A script that ran for so long did what it is to do: its imports, its data and its first steps
# are behind it.
STEADY_S = 600.0
# What a script raises before that, it raises of its own start: a wrong argument, a missing key.
EARLY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """All that a verdict may depend on."""

    evidence: tuple[Evidence, ...]
    # Verdict of the checks after the fault by node; empty before any ran.
    findings: tuple[tuple[NodeId, str], ...]
    # What they found between nodes, and each node's worst figure (1 is as good as expected).
    bad_links: tuple[tuple[NodeId, NodeId], ...]
    figures: tuple[tuple[NodeId, float], ...]
    # Nodes whose results differ in bits from what is right.
    corrupt: tuple[NodeId, ...] = ()
    # Nodes on which an earlier fault began lately.
    suspects: tuple[NodeId, ...]
    # Nodes on which each of the last faults before this one began, if machines made them all.
    blamed_before: tuple[NodeId, ...] = ()
    fault_step: int
    # None: of a script.
    total_steps: int | None = None
    # How long the job had been starting or running.
    ran_s: float = 0.0
    last_fingerprint: str
    last_fault_step: int
    # How often in a row the last failure had come back before this time.
    same_failures: int
    faults_in_row: int
    # Errors of the job's own program count as any other fault does.
    retry_program_errors: bool = False
    ladder: tuple[Rung, ...]
    in_place_restarts: int
    retry_left: int
    committed_step: int | None
    # Nodes that had a part in what the rank that failed first computed.
    computed_on: tuple[NodeId, ...] = ()
    # The step whose loss was non-finite and that is done again, and what was left out so far.
    replayed_step: int | None = None
    skipped: tuple[StepRange, ...] = ()
    # Nodes that had a part in such a step which was finite when it was done again.
    unreproduced: tuple[NodeId, ...] = ()
    non_finite_again: NonFiniteAgain = NonFiniteAgain.SKIP
    rollback_steps: int = 100
    # Free nodes that could take a place, and standbys that could take one unchecked.
    free_nodes: int = 0
    ready_standbys: int = 0
    # Nodes in evidence that could leave the job now, each with others that have its ranks' state.
    state_elsewhere: tuple[tuple[NodeId, tuple[NodeId, ...]], ...] = ()
    # Where nodes refused the job for want of capacity: whether enough others may fit, and what
    # the nodes have.
    may_fit: bool = True
    nodes_in_words: str = ""
    # How many nodes the job has, and those that a file was missing on before.
    num_nodes: int = 1
    lacking_before: tuple[NodeId, ...] = ()

    @property
    def is_script(self) -> bool:
        return self.total_steps is None

    @property
    def has_progress(self) -> bool:
        """Whether the job came further than it was at the last fault, as far as can be told."""
        return self.fault_step > self.last_fault_step or self.was_steady

    @property
    def came_late(self) -> bool:
        """Whether the fault came after a start that went well."""
        return self.fault_step >= 1 or (self.is_script and self.ran_s >= EARLY_S)

    @property
    def was_steady(self) -> bool:
        """Whether a script, which need not say what it has done, ran for long before the fault."""
        return self.is_script and self.ran_s >= STEADY_S

    @property
    def nothing_failed(self) -> bool:
        """Whether workers were stopped for what a detector reported, and for nothing else."""
        kinds = {item.kind for item in self.evidence} - {EvidenceKind.STACKS}
        return kinds == {EvidenceKind.DETECTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVerdict:
    """What to do, about which nodes, and why."""

    action: Action
    cause: Cause
    reason: str
    culprits: tuple[NodeId, ...] = ()
    fingerprint: str = ""
    error: str = ""
    spends_retry: bool = True
    # Steps that are left out from now on.
    skipped: StepRange | None = None


def is_follower(item: Evidence) -> bool:
    """Whether a rank ended as ranks do when an agent elsewhere takes its workers along."""
    return item.kind is EvidenceKind.WORKER_EXIT and item.fault_class in WHEN_PEERS_DIE


def first_failure(evidence: tuple[Evidence, ...]) -> Evidence | None:
    """The end of workers that the others followed from: a rank's, or that of all of an agent.

    The earliest one that is not a cascade wins; a lost connection is what a
    rank says when *another* one died, so it counts only if nothing else is known.
    """
    missing = [item for item in evidence if item.kind is EvidenceKind.WORKERS_MISSING]
    exits = [item for item in evidence if item.kind is EvidenceKind.WORKER_EXIT]
    initiating = [item for item in exits if not (is_follower(item) if missing else item.is_cascade)]
    ends = [*missing, *initiating] or exits
    return min(ends, key=lambda item: item.at_s, default=None)
