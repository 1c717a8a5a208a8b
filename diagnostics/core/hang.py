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

Scripts that report no operations leave less to go by, and mostly no rank is named:

- A rank that is stopped, so that the kernel does not run it, is the culprit, even if others idle.
- A silent rank that waits in the kernel, where no signal reaches it (storage or a device that does
  not answer), is the culprit while other ranks are asleep.
- Where all are asleep, which fell silent first says nothing: ranks may enter a collective and wait
  there while the one that will hang still works. Their stacks may say more.
- Where one rank is silent and the others use a CPU, it may wait for them while they work, or they
  may spin in a collective and wait for it. That is not known to be a hang, and no analysis of it
  is asked for.

What does not belong here: deciding *that* a job hangs, and reading stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from diagnostics.core.describe_ranks import name, shared_group, state_of, where
from diagnostics.core.rank_facts import POINT_TO_POINT, Groups, RankFacts
from diagnostics.core.waits import Waits, by_targets, first_circle, waits_of
from outlast.blackbox.records import Group, Op
from outlast.layout import Layout

# Of ranks that are busy elsewhere, named one by one.
_MAX_TOLD = 4
# Of ranks that wait in a circle, likewise.
_MAX_IN_CIRCLE = 16


class HangKind(StrEnum):
    """What kind of stall it is."""

    MISSING = "missing"  # ranks without a process or a black box
    STOPPED = "stopped"  # ranks that the kernel does not run
    BUSY_ELSEWHERE = "busy_elsewhere"  # waited-for ranks that are in no operation
    ORDER_MISMATCH = "order_mismatch"  # a cycle of waits
    OPERATION_MISMATCH = "operation_mismatch"  # one place, different operations
    IN_KERNEL = "in_kernel"  # silent ranks that wait where no signal reaches them
    UNREPORTED = "unreported"  # ranks that report no operations
    TRANSPORT = "transport"  # all entered, none comes out
    NOT_WAITING = "not_waiting"  # no rank waits for another


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
    def is_program_error(self) -> bool:
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
        groups = {} if layout is None else Groups(layout).of(gone[0])
        reason = f"{name(gone)} gone; the others wait{shared_group(groups, gone)}"
        return _verdict(HangKind.MISSING, gone, waiting, reason)
    stopped = tuple(rank for rank in facts if facts[rank].is_stopped)
    if stopped:
        return _stopped(facts, stopped, waiting)
    if not waiting:
        return _none_waits(facts)
    waits = waits_of(facts, waiting)
    for find in (_operation_mismatch, _busy_elsewhere, _order_mismatch):
        verdict = find(facts, waiting, waits)
        if verdict is not None:
            return verdict
    return _transport(facts, waiting, waits)


def _stopped(
    facts: Mapping[int, RankFacts], stopped: tuple[int, ...], waiting: Sequence[int]
) -> HangVerdict:
    """Ranks whose process is there and is not run: nothing else they show matters."""
    first = facts[stopped[0]]
    reason = (
        f"{name(stopped)} stopped by a signal or a debugger "
        f"(rank {first.rank} {where(first)}); the others wait"
        f"{shared_group(first.members, stopped)}"
    )
    return _verdict(HangKind.STOPPED, stopped, waiting, reason)


def _none_waits(facts: Mapping[int, RankFacts]) -> HangVerdict:
    """No rank is known to wait for another."""
    silent = [rank for rank in facts if facts[rank].reports_no_steps]
    if not silent:
        reason = "no rank is inside an operation that waits for another"
        return _verdict(HangKind.NOT_WAITING, (), (), reason)
    unwakable = tuple(rank for rank in silent if facts[rank].is_unwakable)
    if unwakable and len(unwakable) < len(facts):
        reason = (
            f"{name(unwakable)} in the kernel, not to be woken: storage or a device that does not "
            f"answer ({state_of(facts[unwakable[0]])}); the others may wait for it"
            f"{shared_group(facts[unwakable[0]].members, unwakable)}"
        )
        return _verdict(HangKind.IN_KERNEL, unwakable, (), reason)
    does = "does" if len(silent) == 1 else "do"
    reason = f"{name(silent)} {does} not report operations: what each waits for is not known"
    return _verdict(HangKind.UNREPORTED, (), (), reason)


def _operation_mismatch(
    facts: Mapping[int, RankFacts], waiting: Sequence[int], waits: Waits
) -> HangVerdict | None:
    """Two members at the same place of their group, in different operations.

    Broadcasts are different where their roots are: each may wait for the other's.
    """
    # Of each group's members, by the operation's number: what they run there.
    known: dict[tuple[Group, int], dict[int, dict[tuple[Op, int], int]]] = {}
    for rank in waiting:
        mine = facts[rank]
        if mine.op in POINT_TO_POINT:
            continue
        members = mine.members.get(mine.group, ())
        key = (mine.group, id(members))
        if key not in known:
            known[key] = _first_in_each(mine.group, members, facts)
        runs = known[key].get(mine.seq, {})
        others = [first for run, first in runs.items() if run != (mine.op, mine.root)]
        if others:
            member = min(others, key=members.index)
            reason = (
                f"rank {rank} is {where(mine)} while rank {member} is {where(facts[member])}: "
                "the program runs different operations on ranks of one group"
            )
            both = (rank, member)
            return _verdict(HangKind.OPERATION_MISMATCH, both, waiting, reason)
    return None


def _first_in_each(
    group: Group, members: Sequence[int], facts: Mapping[int, RankFacts]
) -> dict[int, dict[tuple[Op, int], int]]:
    """By number, the operations of a group that members are in, with the first member in each."""
    found: dict[int, dict[tuple[Op, int], int]] = {}
    for member in members:
        other = facts.get(member)
        if other is None or not other.inside or other.op in POINT_TO_POINT:
            continue
        if other.group is group:
            found.setdefault(other.seq, {}).setdefault((other.op, other.root), member)
    return found


def _busy_elsewhere(
    facts: Mapping[int, RankFacts], waiting: Sequence[int], waits: Waits
) -> HangVerdict | None:
    """Waited-for ranks that are in no operation themselves."""
    waiters: dict[int, list[list[int]]] = {}
    for targets, ranks in by_targets(waits):
        for target in targets:
            if not facts[target].inside:
                waiters.setdefault(target, []).append(ranks)
    if not waiters:
        return None
    culprits = tuple(sorted(waiters, key=lambda rank: (facts[rank].since_s, rank)))
    parts = [
        f"rank {rank} is in no operation ({_whereabouts(facts[rank])}) "
        f"and {name([*chain(*waiters[rank])])} wait for it"
        for rank in culprits[:_MAX_TOLD]
    ]
    if len(culprits) > _MAX_TOLD:
        parts.append(f"so it is with {name(culprits[_MAX_TOLD:])}")
    reason = "; ".join(parts) + shared_group(facts[culprits[0]].members, culprits)
    return _verdict(HangKind.BUSY_ELSEWHERE, culprits, waiting, reason)


def _whereabouts(facts: RankFacts) -> str:
    if facts.reports_no_steps:
        return state_of(facts)
    return f"phase {state_of(facts)}, {where(facts)}"


def _order_mismatch(
    facts: Mapping[int, RankFacts], waiting: Sequence[int], waits: Waits
) -> HangVerdict | None:
    """A circle of ranks that wait for each other."""
    circle = first_circle(waits)
    if not circle:
        return None
    steps = ", ".join(f"rank {rank} {where(facts[rank])}" for rank in circle[:_MAX_IN_CIRCLE])
    more = f" and {len(circle) - _MAX_IN_CIRCLE} more" if len(circle) > _MAX_IN_CIRCLE else ""
    reason = f"ranks wait for each other in a circle ({steps}{more}): operations out of order"
    return _verdict(HangKind.ORDER_MISMATCH, circle, waiting, reason)


def _transport(facts: Mapping[int, RankFacts], waiting: Sequence[int], waits: Waits) -> HangVerdict:
    """Ranks that wait for nobody and still do not come out of their operation."""
    heads = [rank for rank in waiting if not waits[rank]]
    heads.sort(key=lambda rank: (facts[rank].since_s, rank))
    first = facts[heads[0]]
    reason = (
        f"{name(tuple(sorted(heads)))} entered and none comes out (first: rank {first.rank} "
        f"{where(first)}): a link or a device among them{shared_group(first.members, heads)}"
    )
    return _verdict(HangKind.TRANSPORT, tuple(heads), waiting, reason)


def _verdict(
    kind: HangKind, culprits: tuple[int, ...], waiting: Sequence[int], reason: str
) -> HangVerdict:
    blamed = frozenset(culprits)
    victims = tuple(rank for rank in waiting if rank not in blamed)
    return HangVerdict(kind=kind, culprits=culprits, victims=victims, reason=reason)
