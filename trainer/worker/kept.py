"""What the process of a rank has from one attempt to the next: groups without their backends,
the model's memory, mapped slots.

Joining another attempt with the same part in it, a rank makes none of these anew: on a GPU slots
stay pinned, and what was compiled stays with its model. Values come from the step that all ranks
agree upon, as for a rank that is made anew; where that is the step that they hold, they stay.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from checkpoint.restore.restore import SealedStep
from checkpoint.stage.stager import Stager
from trainer.optim.lamb import FlatLamb
from trainer.parallel.mesh import Mesh
from trainer.parallel.zero import DataParallel
from trainer.worker.assignment import Assignment
from trainer.worker.body import Body
from trainer.worker.loop import TrainLoop


@dataclass(slots=True)
class Kept:
    """Nothing, until an attempt has made it."""

    # What the rest was made for.
    _place: tuple[object, ...] | None = None
    mesh: Mesh | None = None
    body: Body | None = None
    saver: Stager | None = None
    _data_parallel: DataParallel | None = None
    _loop: TrainLoop | None = None
    _present: SealedStep | None = None

    def prepare(self, assignment: Assignment) -> None:
        """Drop what is of no use for this part."""
        place = (
            assignment.spec_json,
            assignment.rank,
            (assignment.device, assignment.local_rank),
            assignment.memory_dir,
        )
        if place == self._place:
            return
        self._place, had_some = place, self.body is not None
        saver, self.saver = self.saver, None
        self.mesh = self.body = self._present = None
        if saver is not None:
            saver.close()
        if had_some:
            # Before the next model takes as much memory.
            gc.collect()

    def keep(self, mesh: Mesh, body: Body) -> None:
        """What can be used again, once the attempt is left."""
        self.mesh, self.body = mesh, body

    def note_listener(self, data_parallel: DataParallel) -> None:
        """What has hooks in the model, until the attempt is left."""
        self._data_parallel = data_parallel

    def follow(self, loop: TrainLoop) -> None:
        """From now on this changes the values."""
        self._loop = loop

    def take_present(self) -> SealedStep | None:
        """The step that the model and its optimizer hold, if they do; they are about to change."""
        present, self._present = self._present, None
        return present

    def distrust(self) -> None:
        """The attempt ended with more than a lost peer: its values are not to be gone on with."""
        self._loop = None

    def leave(self, attempt: int, *, is_void: bool) -> None:
        """Let go of all that belongs to the attempt. Its device has nothing under way.

        `is_void`: what that had under way may have come to nothing.
        """
        loop, self._loop = self._loop, None
        step = None if loop is None or (is_void and self._may_be_spoilt()) else loop.present_step
        self._present = None if step is None else SealedStep(step, attempt)
        if self.saver is not None:
            self.saver.leave()
        if self._data_parallel is not None:
            self._data_parallel.detach()
            self._data_parallel = None
        if self.mesh is not None:
            self.mesh.disconnect()
        # What was under way has parts in the buffers, and in the connections, until it is gone.
        gc.collect()
        if self.body is not None:
            self.body.flat.forget()

    def _may_be_spoilt(self) -> bool:
        """Whether other ranks have a part in an update, or in the memory of what it changes."""
        body = self.body
        assert body is not None, "or there was no loop"
        shares_memory = body.flat.level > 0 and not body.flat.has_master
        return shares_memory or isinstance(body.optimizer, FlatLamb)
