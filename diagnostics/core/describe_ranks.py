"""Ranks and where they stand, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diagnostics.core.rank_facts import RankFacts
from outlast.blackbox.records import Group, Op, Operation

# Of runs of ranks in one sentence: what fits a line, where one rank in eight differs.
_MAX_RUNS = 16
# Of a process that shows no sign of life, by the letter that `ps` has for it.
_STATES = {"S": ", asleep", "D": ", in the kernel, not to be woken"}


def where_all_stand(ranks: Sequence[RankFacts]) -> list[str]:
    """Each place at which ranks stand, with the ranks: one line per place, the rarest first."""
    places: dict[tuple[object, ...], list[RankFacts]] = {}
    for facts in sorted(ranks, key=lambda facts: facts.rank):
        at: tuple[object, ...] = (facts.op, facts.group, facts.seq, facts.root, facts.inside)
        if facts.reports_no_steps:
            at = (*at, _is_silent(facts), facts.process_state)
        places.setdefault((*at, facts.phase, facts.is_stopped), []).append(facts)
    lines: dict[str, list[int]] = {}
    for alike in places.values():
        # Of silent ones, who is silent for the shortest: "for so long" is true of all.
        first = min(alike, key=lambda facts: facts.stalled_s)
        stopped = ", stopped" if first.is_stopped else ""
        place = f"{where(first)} ({state_of(first)}{stopped})"
        lines.setdefault(place, []).extend(facts.rank for facts in alike)
    rarest_first = sorted(lines, key=lambda place: (len(lines[place]), sorted(lines[place])))
    return [f"{name(lines[place])} {place}" for place in rarest_first]


def state_of(facts: RankFacts) -> str:
    """What is known of a rank beside its operation: its phase, or its signs of life."""
    if not facts.reports_no_steps:
        return facts.phase.name.lower()
    if not _is_silent(facts):
        return "it reports no steps"
    state = _STATES.get(facts.process_state, "")
    return f"no output and hardly any CPU time for {facts.stalled_s:.0f} s{state}"


def _is_silent(facts: RankFacts) -> bool:
    return facts.reports_no_steps and facts.stalled_s > 0.0


def shared_group(groups: Mapping[Group, tuple[int, ...]], ranks: Sequence[int]) -> str:
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
    _, _, group_name, members = min(shared)
    return f"; the smallest group that they share is {group_name} {name(members)}"


def where(facts: RankFacts) -> str:
    """A rank's last operation, in words."""
    if facts.reports_no_steps:
        return "at an operation that is not known"
    if facts.op is Op.NONE:
        return "before its first operation"
    root = facts.root
    return str(
        Operation(
            op=facts.op, group=facts.group, seq=facts.seq, detail=root, is_inside=facts.inside
        )
    )


def name(ranks: Sequence[int]) -> str:
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
