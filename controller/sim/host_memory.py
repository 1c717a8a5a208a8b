"""What the slots in ranks' host memory hold when an attempt stops, by the production rules.

Steps are not simulated one by one, so the last few are gone through when it matters what is
left of them: each rank seals each step in the slot that `checkpoint.core.slots` chooses. Where
somebody reads slots meanwhile, as an upload or a copy does, a rank may find none that is free,
and misses a step. All ranks agree on the newest step that each of them has, and none may use its
slot again before they agree on a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from checkpoint.core import slots
from checkpoint.core.slots import NUM_SLOTS, Slot, UploadState

# So many steps are gone through where slots are read; those before are nowhere any more.
NUM_STEPS = 12
# How ranks differ where slots are read; many of them are alike.
NUM_KINDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The steps that ranks hold: each kind of them, and the same a step ahead of the others."""

    # The newest that all have, as far as they know; -1 where they do not.
    common: int
    kinds: tuple[tuple[int, ...], ...]
    ahead: tuple[tuple[int, ...], ...]

    def of(self, rank: int, *, ahead: bool) -> tuple[int, ...]:
        """What a rank holds."""
        kinds = self.ahead if ahead else self.kinds
        return kinds[rank % len(kinds)]


def kept_after(resumed: int, done: int, *, read_share: float, random: Random) -> Kept:
    """What ranks hold that were stopped after this step.

    `read_share` is how much of the time somebody reads a slot.
    """
    ranks = [_empty() for _ in range(NUM_KINDS if read_share else 1)]
    first = max(resumed + 1, done + 1 - (NUM_STEPS if read_share else NUM_SLOTS))
    common = -1
    for step in range(first, done + 1):
        common = _agree(ranks, common)
        for kept in ranks:
            read = [index for index in range(NUM_SLOTS) if random.random() < read_share]
            _seal(kept, step, common, read)
    common = _agree(ranks, common)
    kinds = tuple(map(_steps, ranks))
    for kept in ranks:
        _seal(kept, done + 1, common, [])
    return Kept(common=common, kinds=kinds, ahead=tuple(map(_steps, ranks)))


def _agree(ranks: list[list[Slot]], known: int) -> int:
    newest = [slots.newest_sealed(kept) for kept in ranks]
    return slots.common_step(lowest=min(newest), highest=max(newest), known=known)


def _seal(kept: list[Slot], step: int, common: int, read: list[int]) -> None:
    index = slots.choose_slot(kept, step=step, common_step=common, upload=False, locked=read)
    if index is not None:
        kept[index] = _slot(index, step, sealed=True)


def _empty() -> list[Slot]:
    return [_slot(index, -1, sealed=False) for index in range(NUM_SLOTS)]


def _slot(index: int, step: int, *, sealed: bool) -> Slot:
    return Slot(index=index, sealed=sealed, step=step, attempt=1, upload=UploadState.NONE)


def _steps(kept: list[Slot]) -> tuple[int, ...]:
    return tuple(sorted(slot.step for slot in kept if slot.sealed))
