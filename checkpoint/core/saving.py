"""When a state is saved, and what is to become of it: decided alike on all ranks.

What the ranks hold comes from an agreement among all of them; what follows from it is the same
everywhere, so that a step is uploaded, or copied to other nodes, by every rank or by none.

What does not belong here: which slot a rank takes (`slots.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.core.slots import common_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What all ranks have in host memory, put together."""

    lowest_sealed: int
    """Of the newest step that each has sealed."""
    highest_sealed: int
    upload_busy: bool
    """An upload of some rank has not ended."""
    newest_replicated: int
    """The newest step of which every rank has a copy elsewhere."""
    replica_busy: bool
    """A copy of some rank is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What is to become of a state; fields as `checkpoint.stage.stager.Stager.save` has them."""

    upload: bool
    replicate: bool
    common_step: int
    replicated_step: int


class SavePlan:
    """What is due, from one save to the next."""

    def __init__(
        self,
        *,
        storage_interval_steps: int,
        memory_interval_steps: int = 1,
        is_replicated: bool = False,
    ) -> None:
        """`is_replicated`: copies of host memory go to other nodes."""
        self._storage_interval_steps = storage_interval_steps
        self._memory_interval_steps = memory_interval_steps
        self._is_replicated = is_replicated
        self._upload_due = False
        # Of which all ranks were last asked to bring a copy to another node.
        self._replicating_step = -1
        # The newest of which all have brought one.
        self._replicated_step = -1
        self._common_step = -1

    def resumed(self, step: int) -> None:
        """Training goes on after `step`; where it came out of host memory, every rank holds it."""
        self._replicating_step = self._common_step = step

    def agreed(self, held: Held) -> None:
        """Note what all ranks hold now."""
        self._common_step = common_step(
            lowest=held.lowest_sealed, highest=held.highest_sealed, known=self._common_step
        )

    def order(self, step: int, held: Held, *, stopping: bool) -> SaveOrder | None:
        """What to do with the state after `step`; None: nothing.

        `stopping`: no other step follows. What that leaves in storage, any node and any layout
        can go on from.
        """
        if step % self._storage_interval_steps == 0 or stopping:
            self._upload_due = True
        # An upload that is due waits for the one under way, except before a stop: there is no
        # later step to take its place.
        upload = self._upload_due and (stopping or not held.upload_busy)
        if not (upload or stopping or step % self._memory_interval_steps == 0):
            return None
        return SaveOrder(
            upload=upload,
            replicate=self._replicates(step, held),
            common_step=self._common_step,
            replicated_step=self._replicated_step,
        )

    def saved(self, order: SaveOrder) -> None:
        """The order was carried out."""
        if order.upload:
            self._upload_due = False

    def _replicates(self, step: int, held: Held) -> bool:
        """Whether a copy of `step` is to go to another node: one at a time, on all ranks alike."""
        if not self._is_replicated or held.replica_busy:
            return False
        # Every rank was asked for this one and no rank for a later one: where the least of
        # what they have is as new, all have it.
        if held.newest_replicated >= self._replicating_step:
            self._replicated_step = self._replicating_step
        self._replicating_step = step
        return True
