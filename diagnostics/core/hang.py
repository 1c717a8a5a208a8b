"""Who makes a job stand still: wait-for edges between ranks, and where they end.

A rank inside a collective waits for every member of its group that has not
entered that operation yet; a rank inside a send or receive waits for its peer.
Following these edges from any stuck rank ends

- at a rank that nobody can follow further because it is in no operation: it is
  busy elsewhere (loading data, writing a checkpoint, user code), and it is the
  culprit;
- in a cycle: the ranks entered their operations in different orders, which is
  a mistake in the program;
- at ranks that all entered the same operation and do not come out: the
  transport between them, or one of their devices.

The rank that complains loudest, or first, is nearly always a victim.

What does not belong here: deciding *that* a job hangs, and reading stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outlast.blackbox.records import Group, Op, Operation, Phase
from outlast.layout import Layout

_NO_OPERATION = Operation(op=Op.NONE, group=Group.WORLD, seq=0, is_inside=False)
_POINT_TO_POINT = (Op.SEND, Op.RECV)
# Stopped by a signal, or by a debugger.
_STOPPED_STATES = ("T", "t")
# Of runs of ranks in one sentence: what fits a line, where one rank in eight differs.
_MAX_RUNS = 16
# Of ranks that are busy elsewhere, told one by one.
_MAX_TOLD = 4


class HangKind(StrEnum):
    """What kind of stall it is."""

    MISSING = "missing"  # ranks without a process or a black box
    STOPPED = "stopped"  # ranks that the kernel does not run
    BUSY_ELSEWHERE = "busy_elsewhere"  # waited-for ranks that are in no operation
    ORDER_MISMATCH = "order_mismatch"  # a cycle of waits
    OPERATION_MISMATCH = "operation_mismatch"  # one place, different operations
    TRANSPORT = "transport"  # all entered, none comes out
    NOT_WAITING = "not_waiting"  # no rank waits for another


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """The ranks to look at, and why.

    `culprits` are ordered by when they went quiet, earliest first. For a
    mismatch or a transport fault they are all ranks involved, since none of
    them is known to be the one at fault. Of several, `reason` has the smallest
    group that they share, where that is not the whole job.
    """

    kind: HangKind
    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    reason: str

    @property
    def is_users(self) -> bool:
        """Whether the program itself is at fault: no other node would do better."""
        return self.kind in (HangKind.ORDER_MISMATCH, HangKind.OPERATION_MISMATCH)


def analyse(
    ranks: Sequence[RankFacts], missing: Sequence[int] = (), *, layout: Layout | None = None
) -> HangVerdict:
    """Why `ranks` stand still; `missing` are ranks without a process or black box.

    With `layout`, the groups of the missing are known as well.
    """
    facts = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: rank.rank)}
    waiting = tuple(rank for rank in facts if facts[rank].inside)
    if missing:
        gone = tuple(sorted(missing))
        groups = {} if layout is None else members_of(gone[0], layout)
        reason = f"{_name(gone)} gone; the others wait{_shared_group(groups, gone)}"
        return _verdict(HangKind.MISSING, gone, waiting, reason)
    stopped = tuple(rank for rank in facts if facts[rank].process_state in _STOPPED_STATES)
    if stopped:
        return _stopped(facts, stopped, waiting)
    if not waiting:
        return _verdict(
            HangKind.NOT_WAITING, (), (), "no rank is inside an operation that waits for another"
        )
    edges = {rank: _waits_for(facts[rank], facts) for rank in waiting}
    for find in (_operation_mismatch, _busy_elsewhere, _order_mismatch):
        verdict = find(facts, waiting, edges)
        if verdict is not None:
            return verdict
    return _transport(facts, waiting, edges)


def where_all_stand(ranks: Sequence[RankFacts]) -> list[str]:
    """Each place at which ranks stand, with the ranks: one line per place, the rarest first."""
    places: dict[str, list[int]] = {}
    for facts in sorted(ranks, key=lambda facts: facts.rank):
        stopped = ", stopped" if facts.process_state in _STOPPED_STATES else ""
        place = f"{_where(facts)} ({facts.phase.name.lower()}{stopped})"
        places.setdefault(place, []).append(facts.rank)
    rarest_first = sorted(places, key=lambda place: (len(places[place]), places[place]))
    return [f"{_name(tuple(places[place]))} {place}" for place in rarest_first]


def facts_of(
    rank: int,
    phase: Phase,
    operation: Operation | None,
    layout: Layout,
    *,
    since_s: float = 0.0,
    entered: Mapping[Group, int] | None = None,
    process_state: str = "",
) -> RankFacts:
    """The facts in a heartbeat.

    `entered` has the sequence number entered last of each group.
    """
    last = operation or _NO_OPERATION
    return RankFacts(
        rank=rank,
        phase=phase,
        op=last.op,
        group=last.group,
        seq=last.seq,
        inside=last.is_inside,
        root=last.root,
        members=members_of(rank, layout),
        since_s=since_s,
        entered=entered or {},
        process_state=process_state,
    )


def members_of(rank: int, layout: Layout) -> dict[Group, tuple[int, ...]]:
    """The ranks of each group that `rank` takes part in."""
    pipeline = layout.group_of("pp", rank)
    groups = {
        Group.WORLD: tuple(range(layout.world_size)),
        Group.TP: layout.group_of("tp", rank),
        Group.DP: layout.group_of("dp", rank),
        Group.PP: pipeline,
    }
    # The first and the last stage share the embedding's gradient.
    if rank in (pipeline[0], pipeline[-1]):
        groups[Group.EMBEDDING] = tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
    return groups


def _waits_for(waiter: RankFacts, facts: Mapping[int, RankFacts]) -> tuple[int, ...]:
    """The ranks that `waiter` cannot go on without, in group order."""
    if waiter.op in _POINT_TO_POINT:
        peers = _peers(waiter)
        return tuple(peer for peer in peers if peer in facts and not _meets(waiter, facts[peer]))
    members = waiter.members.get(waiter.group, ())
    return tuple(
        member
        for member in members
        if member != waiter.rank
        and member in facts
        and _entered(facts[member], waiter.group) < waiter.seq
    )


def _peers(waiter: RankFacts) -> tuple[int, ...]:
    """The other end of a send or receive: as recorded, or else both neighbours."""
    if waiter.peer is not None:
        return (waiter.peer,)
    pipeline = waiter.members.get(waiter.group, ())
    if waiter.rank not in pipeline:
        return ()
    at = pipeline.index(waiter.rank)
    return tuple(dict.fromkeys((*pipeline[max(0, at - 1) : at], *pipeline[at + 1 : at + 2])))


def _meets(waiter: RankFacts, other: RankFacts) -> bool:
    """Whether `other` is inside the opposite half of the waiter's exchange."""
    opposite = Op.RECV if waiter.op is Op.SEND else Op.SEND
    return other.inside and other.op is opposite and waiter.rank in _peers(other)


def _entered(member: RankFacts, group: Group) -> int:
    """Sequence number of the group's operation that `member` entered last.

    Unknown counts as none: a member whose last operation was elsewhere has, in
    a hang, either not come here yet or is itself stuck over there.
    """
    if member.op is not Op.NONE and member.group is group:
        return member.seq
    return member.entered.get(group, 0)


def _stopped(
    facts: Mapping[int, RankFacts], stopped: tuple[int, ...], waiting: Sequence[int]
) -> HangVerdict:
    """Ranks whose process is there and is not run: nothing else they show matters."""
    first = facts[stopped[0]]
    reason = (
        f"{_name(stopped)} stopped by a signal or a debugger "
        f"(rank {first.rank} {_where(first)}); the others wait"
        f"{_shared_group(first.members, stopped)}"
    )
    return _verdict(HangKind.STOPPED, stopped, waiting, reason)


def _operation_mismatch(
    facts: Mapping[int, RankFacts],
    waiting: Sequence[int],
    edges: Mapping[int, tuple[int, ...]],
) -> HangVerdict | None:
    """Two members at the same place of their group, in different operations.

    Broadcasts are different where their roots are: each may wait for the other's.
    """
    for rank in waiting:
        mine = facts[rank]
        if mine.op in _POINT_TO_POINT:
            continue
        for member in mine.members.get(mine.group, ()):
            other = facts.get(member)
            if other is None or not other.inside or other.op in _POINT_TO_POINT:
                continue
            is_same_place = (other.group, other.seq) == (mine.group, mine.seq)
            if is_same_place and (other.op, other.root) != (mine.op, mine.root):
                reason = (
                    f"rank {rank} is {_where(mine)} while rank {member} is {_where(other)}: "
                    "the program runs different operations on ranks of one group"
                )
                both = (rank, member)
                return _verdict(HangKind.OPERATION_MISMATCH, both, waiting, reason)
    return None


def _busy_elsewhere(
    facts: Mapping[int, RankFacts],
    waiting: Sequence[int],
    edges: Mapping[int, tuple[int, ...]],
) -> HangVerdict | None:
    """Waited-for ranks that are in no operation themselves."""
    waiters: dict[int, list[int]] = {}
    for rank in waiting:
        for target in edges[rank]:
            if not facts[target].inside:
                waiters.setdefault(target, []).append(rank)
    if not waiters:
        return None
    culprits = tuple(sorted(waiters, key=lambda rank: (facts[rank].since_s, rank)))
    parts = [
        f"rank {rank} is in no operation (phase {facts[rank].phase.name.lower()}, "
        f"{_where(facts[rank])}) and {_name(tuple(waiters[rank]))} wait for it"
        for rank in culprits[:_MAX_TOLD]
    ]
    if len(culprits) > _MAX_TOLD:
        parts.append(f"so it is with {_name(culprits[_MAX_TOLD:])}")
    reason = "; ".join(parts) + _shared_group(facts[culprits[0]].members, culprits)
    return _verdict(HangKind.BUSY_ELSEWHERE, culprits, waiting, reason)


def _order_mismatch(
    facts: Mapping[int, RankFacts],
    waiting: Sequence[int],
    edges: Mapping[int, tuple[int, ...]],
) -> HangVerdict | None:
    """A cycle of waits: found by walking edges until a rank comes up again."""
    done: dict[int, None] = {}
    for start in waiting:
        path: dict[int, None] = {}
        cycle = _walk(start, edges, path, done)
        if cycle:
            steps = ", ".join(f"rank {rank} {_where(facts[rank])}" for rank in cycle)
            reason = f"ranks wait for each other in a circle ({steps}): operations out of order"
            return _verdict(HangKind.ORDER_MISMATCH, cycle, waiting, reason)
    return None


def _walk(
    start: int,
    edges: Mapping[int, tuple[int, ...]],
    path: dict[int, None],
    done: dict[int, None],
) -> tuple[int, ...]:
    """The first cycle on a depth-first walk from `start`; empty when there is none.

    With its own stack: a job has more ranks than Python has frames.
    """
    stack = [(start, iter(edges.get(start, ())))]
    path[start] = None
    while stack:
        rank, targets = stack[-1]
        for target in targets:
            if target in path:
                ranks = list(path)
                return tuple(ranks[ranks.index(target) :])
            if target not in done:
                path[target] = None
                stack.append((target, iter(edges.get(target, ()))))
                break
        else:
            stack.pop()
            del path[rank]
            done[rank] = None
    return ()


def _transport(
    facts: Mapping[int, RankFacts],
    waiting: Sequence[int],
    edges: Mapping[int, tuple[int, ...]],
) -> HangVerdict:
    """Ranks that wait for nobody and still do not come out of their operation."""
    heads = [rank for rank in waiting if not edges[rank]]
    heads.sort(key=lambda rank: (facts[rank].since_s, rank))
    first = facts[heads[0]]
    reason = (
        f"{_name(tuple(sorted(heads)))} entered and none comes out (first: rank {first.rank} "
        f"{_where(first)}): a link or a device among them{_shared_group(first.members, heads)}"
    )
    return _verdict(HangKind.TRANSPORT, tuple(heads), waiting, reason)


def _shared_group(groups: Mapping[Group, tuple[int, ...]], ranks: Sequence[int]) -> str:
    """The smallest group that all of `ranks` are in, in words; "" when that is all there are.

    `groups` are those of one of them.
    """
    world = groups.get(Group.WORLD, ())
    shared = [
        # A pipeline of two stages is its own embedding group, and better known by its name.
        (len(members), group is Group.EMBEDDING, group.name.lower(), members)
        for group, members in groups.items()
        if len(members) < len(world) and set(ranks) <= set(members)
    ]
    if len(ranks) < 2 or not shared:
        return ""
    _, _, name, members = min(shared)
    return f"; the smallest group that they share is {name} {_name(members)}"


def _verdict(
    kind: HangKind, culprits: tuple[int, ...], waiting: Sequence[int], reason: str
) -> HangVerdict:
    victims = tuple(rank for rank in waiting if rank not in culprits)
    return HangVerdict(kind=kind, culprits=culprits, victims=victims, reason=reason)


def _where(facts: RankFacts) -> str:
    """A rank's last operation, in words."""
    if facts.op is Op.NONE:
        return "before its first operation"
    root = facts.root
    return str(
        Operation(
            op=facts.op, group=facts.group, seq=facts.seq, detail=root, is_inside=facts.inside
        )
    )


def _name(ranks: Sequence[int]) -> str:
    """Ranks in words, those that follow each other as one: "ranks 0-5, 8, 12-15"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(_run(run) for run in runs[:_MAX_RUNS])
    rest = sum(len(run) for run in runs[_MAX_RUNS:])
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _run(run: Sequence[int]) -> str:
    # Two are not worth a range.
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
