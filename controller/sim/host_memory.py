"""What the slots in ranks' host memory hold when an attempt stops, by the production rules.

Steps are not simulated one by one, so the last few are gone through when it matters what is
left of them: each rank seals each step in the slot that `checkpoint.core.slots` chooses. Where
somebody reads slots meanwhile, as an upload or a copy does, a rank may find none that is free,
and misses a step. All ranks agree on the newest step that each of them has, and none may use its
slot again before they agree on a later one. Where copies go to other nodes, they are of one step
at a time, and all ranks keep the newest that has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from checkpoint.core import slots
from checkpoint.core.slots import (
    NUM_HELD_SLOTS,
    NUM_SLOTS,
    NUM_SLOTS_WITH_REPLICAS,
    ReplicaState,
    Slot,
    UploadState,
)

# So many steps are gone through where slots are read or copied; those before are nowhere any more.
NUM_STEPS = 12
# How ranks differ where slots are read; many of them are alike.
NUM_KINDS = 3


class Part(NamedTuple):
    """What is sealed of one rank: a later attempt counts as newer, whatever the step."""

    attempt: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The steps that ranks hold: each kind of them, and the same a step ahead of the others."""

    # The newest that all have, as far as they know; -1 where they do not.
    common: int
    kinds: tuple[tuple[int, ...], ...]
    ahead: tuple[tuple[int, ...], ...]
    # Steps whose copies have arrived, in that order: all ranks keep the last one, too.
    copied: tuple[int, ...]
    # Whether another one was on its way, which is torn now.
    is_copying: bool

    def of(self, rank: int, *, ahead: bool) -> tuple[int, ...]:
        """What a rank holds."""
        kinds = self.ahead if ahead else self.kinds
        return kinds[rank % len(kinds)]


@dataclass(slots=True)
class _Copies:
    """The copy that is on its way from all ranks, and those that have arrived."""

    takes_steps: int
    under_way: int = -1
    begun: int = -1
    arrived: list[int] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return self.arrived[-1] if self.arrived else -1

    def begin(self, ranks: list[list[Slot]], step: int) -> None:
        """Bring this step to other nodes, if all ranks have it and nothing else is on its way."""
        have_it = all(any(each.sealed and each.step == step for each in kept) for kept in ranks)
        if self.takes_steps and self.under_way < 0 and have_it:
            self.under_way = self.begun = step
            _mark(ranks, step, ReplicaState.WANTED)

    def arrive(self, ranks: list[list[Slot]], now: int) -> None:
        """What has been on its way for long enough is there."""
        if self.under_way >= 0 and now - self.begun >= self.takes_steps:
            _mark(ranks, self.under_way, ReplicaState.DONE)
            self.arrived.append(self.under_way)
            self.under_way = -1


def kept_after(
    resumed: int,
    done: int,
    *,
    read_share: float,
    random: Random,
    copy_steps: int = 0,
    is_from_memory: bool = False,
) -> Kept:
    """What ranks hold that were stopped after this step.

    `read_share` is how much of the time somebody reads a slot, `copy_steps` for how many steps a
    copy is on its way (0: nothing is copied), `is_from_memory` says that the step resumed from
    was in host memory.
    """
    num_slots = NUM_SLOTS_WITH_REPLICAS if copy_steps else NUM_SLOTS
    ranks = [_empty(num_slots) for _ in range(NUM_KINDS if read_share else 1)]
    copies = _Copies(copy_steps)
    first = max(resumed + 1, done + 1 - (NUM_STEPS if read_share or copy_steps else NUM_SLOTS))
    common = -1
    if is_from_memory and first == resumed + 1:
        common = resumed
        for kept in ranks:
            kept[0] = _slot(0, resumed, sealed=True)
        # The node that kept copies before may be gone.
        copies.begin(ranks, resumed)
    for step in range(first, done + 1):
        common = _agree(ranks, common)
        copies.arrive(ranks, step)
        for kept in ranks:
            read = [index for index in range(num_slots) if random.random() < read_share]
            _seal(kept, step, common, copies.newest, read)
        copies.begin(ranks, step)
    common = _agree(ranks, common)
    kinds = tuple(map(_steps, ranks))
    for kept in ranks:
        _seal(kept, done + 1, common, copies.newest, [])
    return Kept(
        common=common,
        kinds=kinds,
        ahead=tuple(map(_steps, ranks)),
        copied=tuple(copies.arrived),
        is_copying=copies.under_way >= 0,
    )


def held_after(held: Sequence[Part], arrived: Sequence[Part], *, is_torn: bool) -> tuple[Part, ...]:
    """The copies of a rank that its holder has, after these arrived one after the other.

    `is_torn` says that the next one was on its way: it has taken a place, too.
    """
    places = [
        _slot(index, part.step, sealed=True, attempt=part.attempt)
        for index, part in enumerate(held)
    ]
    places += [_slot(index, -1, sealed=False) for index in range(len(held), NUM_HELD_SLOTS)]
    kept = dict(enumerate(held))
    needed: list[tuple[int, int]] = []
    for part in arrived:
        index = slots.choose_held(places, needed=needed)
        kept[index] = part
        places[index] = _slot(index, part.step, sealed=True, attempt=part.attempt)
        needed = [(part.attempt, part.step)]
    if is_torn:
        kept.pop(slots.choose_held(places, needed=needed), None)
    return tuple(kept.values())


def without_stale(parts: tuple[Part, ...], resumed: int) -> tuple[Part, ...]:
    """What is left of these when training goes on from this step."""
    if all(part.step <= resumed for part in parts):
        return parts
    facts = [_slot(index, part.step, sealed=True) for index, part in enumerate(parts)]
    stale = slots.stale_slots(facts, resumed_step=resumed)
    return tuple(part for index, part in enumerate(parts) if index not in stale)


def _mark(ranks: list[list[Slot]], step: int, state: ReplicaState) -> None:
    for kept in ranks:
        for index, slot in enumerate(kept):
            if slot.sealed and slot.step == step:
                kept[index] = replace(slot, replica=state)


def _agree(ranks: list[list[Slot]], known: int) -> int:
    newest = [slots.newest_sealed(kept) for kept in ranks]
    return slots.common_step(lowest=min(newest), highest=max(newest), known=known)


def _seal(kept: list[Slot], step: int, common: int, copied: int, read: list[int]) -> None:
    index = slots.choose_slot(
        kept, step=step, common_step=common, replicated_step=copied, upload=False, locked=read
    )
    if index is not None:
        kept[index] = _slot(index, step, sealed=True)


def _empty(num_slots: int) -> list[Slot]:
    return [_slot(index, -1, sealed=False) for index in range(num_slots)]


def _slot(index: int, step: int, *, sealed: bool, attempt: int = 1) -> Slot:
    return Slot(index=index, sealed=sealed, step=step, attempt=attempt, upload=UploadState.NONE)


def _steps(kept: list[Slot]) -> tuple[int, ...]:
    return tuple(sorted(slot.step for slot in kept if slot.sealed))
