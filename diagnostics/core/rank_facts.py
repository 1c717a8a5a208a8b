"""One rank of a job as its black box shows it, and the groups that it takes part in.

What does not belong here: what is concluded from them (`diagnostics.core.hang`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast.blackbox.records import Group, Op, Operation, Phase
from outlast.layout import Layout

POINT_TO_POINT = (Op.SEND, Op.RECV)
_NO_OPERATION = Operation(op=Op.NONE, group=Group.WORLD, seq=0, is_inside=False)
# Stopped by a signal, or by a debugger.
_STOPPED_STATES = ("T", "t")
_UNWAKABLE_STATE = "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank as its black box shows it."""

    rank: int
    phase: Phase
    # The operation entered last.
    op: Op
    group: Group
    seq: int
    # Whether it is still inside that operation.
    inside: bool
    # Members of each group it takes part in, itself included, in group order.
    members: Mapping[Group, tuple[int, ...]]
    # When it entered the operation, or else left it; 0.0 when unknown.
    since_s: float = 0.0
    # The other end of a send or receive, when known.
    peer: int | None = None
    # Of a broadcast: whose tensor all are to have, as a place in the group; -1 when unknown.
    root: int = -1
    # Sequence number entered last, of groups other than `group`, when known.
    entered: Mapping[Group, int] = field(default_factory=dict)
    # State letter of its process, as `ps` shows it; "" when unknown.
    process_state: str = ""
    # Whether it is a script that has reported neither a step nor an operation: `phase` and `op`
    # say nothing then.
    reports_no_steps: bool = False
    # For how long it has not moved; of such a script: shown no sign of life.
    stalled_s: float = 0.0

    @property
    def is_unwakable(self) -> bool:
        """Whether it waits in the kernel, where no signal reaches it."""
        return self.process_state == _UNWAKABLE_STATE

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel does not run its process."""
        return self.process_state in _STOPPED_STATES

    def entered_last(self, group: Group) -> int:
        """Sequence number of the group's operation that it entered last.

        Unknown counts as none: a member whose last operation was elsewhere has, in
        a hang, either not come here yet or is itself stuck over there.
        """
        if self.op is not Op.NONE and self.group is group:
            return self.seq
        return self.entered.get(group, 0)


class Groups:
    """The groups of a job's ranks, each made once: members share one tuple."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._num_ranks = layout.world_size
        self._known: dict[tuple[Group, int], tuple[int, ...]] = {}

    def of(self, rank: int) -> dict[Group, tuple[int, ...]]:
        """The ranks of each group that `rank` takes part in.

        Raises:
            ValueError: the rank is not in the layout.
        """
        # Without the layout's coordinates: a job may have 100,000 ranks.
        if not 0 <= rank < self._num_ranks:
            self._layout.coordinate(rank)
        tp = self._layout.tp
        stage_size = tp * self._layout.dp
        stage, place = divmod(rank, stage_size)
        pipeline = self._group(Group.PP, place, rank)
        groups = {
            Group.WORLD: self._group(Group.WORLD, 0, rank),
            Group.TP: self._group(Group.TP, rank // tp, rank),
            Group.DP: self._group(Group.DP, stage * tp + rank % tp, rank),
            Group.PP: pipeline,
        }
        more = [Group.CP] if self._layout.cp > 1 else []
        more += [Group.EP, Group.EXPERT_DP] if self._layout.ep > 1 else []
        for group in more:
            members = self._layout.group_of(group.name.lower(), rank)
            groups[group] = self._group(group, members[0], rank)
        # The first and the last stage share the embedding's gradient.
        if rank in (pipeline[0], pipeline[-1]):
            groups[Group.EMBEDDING] = self._group(Group.EMBEDDING, pipeline[0], rank)
        return groups

    def _group(self, group: Group, number: int, rank: int) -> tuple[int, ...]:
        found = self._known.get((group, number))
        if found is None:
            found = self._known[group, number] = self._members(group, rank)
        return found

    def _members(self, group: Group, rank: int) -> tuple[int, ...]:
        if group is Group.WORLD:
            return tuple(range(self._layout.world_size))
        if group is Group.EMBEDDING:
            pipeline = self._layout.group_of("pp", rank)
            return tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
        return self._layout.group_of(group.name.lower(), rank)


def facts_of(
    rank: int,
    phase: Phase,
    operation: Operation | None,
    groups: Groups,
    *,
    since_s: float = 0.0,
    entered: Mapping[Group, int] | None = None,
    process_state: str = "",
    reports_no_steps: bool = False,
    stalled_s: float = 0.0,
) -> RankFacts:
    """The facts in a heartbeat.

    `entered` has the sequence number entered last of each group.
    """
    last = operation or _NO_OPERATION
    members = groups.of(rank)
    return RankFacts(
        rank=rank,
        phase=phase,
        op=last.op,
        group=last.group,
        seq=last.seq,
        inside=last.is_inside,
        root=last.root,
        members=members,
        peer=_peer_of(last, members),
        since_s=since_s,
        entered=entered or {},
        process_state=process_state,
        reports_no_steps=reports_no_steps,
        stalled_s=stalled_s,
    )


def _peer_of(operation: Operation, members: Mapping[Group, tuple[int, ...]]) -> int | None:
    """The other end of a send or receive."""
    group = members.get(operation.group, ())
    is_known = operation.op in POINT_TO_POINT and 0 <= operation.peer < len(group)
    return group[operation.peer] if is_known else None
