"""What becomes of a slot that does not hold what was sealed: it is refused, and reported.

Whoever finds one (a rank that restores, an upload, a copy to another node) leaves a note in
the job's host memory, from which the agent reports it. So nothing is lost when the finder dies
with its attempt, and a slot is reported once: it is not sealed any more.

What does not belong here: finding it (`slot_sums.py`), and what the controller makes of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoint.errors import DamagedMemoryError
from checkpoint.stage.slotfile import SlotFile

logger = logging.getLogger(__name__)

_FOLDER = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A slot that was refused; `what` says all of it in words."""

    rank: int
    slot: int
    step: int
    attempt: int
    what: str


def refuse(job_dir: Path, slot: SlotFile, error: DamagedMemoryError) -> None:
    """Let nobody use a slot any more, and leave a note of it. Nobody may be filling it."""
    leave_note(job_dir, error)
    slot.invalidate()


def leave_note(job_dir: Path, error: DamagedMemoryError) -> None:
    """Leave a note for `take_notes` below the job's host memory."""
    damage = Damage(
        rank=error.rank,
        slot=error.slot,
        step=error.step,
        attempt=error.attempt,
        what=f"step {error.step}, {error.what}",
    )
    folder = job_dir / _FOLDER
    name = f"{damage.rank}-{damage.slot}-{damage.attempt}-{damage.step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}"
        draft.write_text(json.dumps(asdict(damage)))
        draft.rename(folder / f"{name}.json")
    except OSError:
        # Full host memory must not keep the slot from being refused.
        logger.exception("damaged host memory is not on record: %s", error)


def take_notes(job_dir: Path) -> list[Damage]:
    """The notes that were left since the last call."""
    found = []
    for path in sorted((job_dir / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Damage(**json.loads(path.read_text())))
        path.unlink(missing_ok=True)
    return found
