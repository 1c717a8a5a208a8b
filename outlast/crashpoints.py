"""Named moments at which a test can kill a process, to see what a crash there leaves behind.

They lie at the boundaries of everything that a crash must not tear: the stages of a
checkpoint, the start of workers, restore, cleaning up, and the controller's journal.
To try them on a deployment of your own, start the controller and the agents with
`OUTLAST_CRASH_DIR` set to a folder that all of their processes see, and at any time put a
file there that has the name of a point:

    touch $OUTLAST_CRASH_DIR/uploader.part-sent

The process that comes to that point next takes the file away and sends itself SIGKILL, so
one process dies and a file that is gone has been hit. A number in the file says how many
times the point is passed before (processes that share it may count it wrongly by a few).

Without the variable a point costs one comparison. Nothing here is for error handling: a
process at a crash point gets no chance to clean up.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from outlast.enums import StrEnum

FOLDER_VARIABLE = "OUTLAST_CRASH_DIR"


class CrashPoint(StrEnum):
    """Every moment that has a name; each is reached at one place of the code."""

    # A standby process, and the worker that it makes.
    STANDBY_FORKING = "standby.forking"
    STANDBY_FORKED = "standby.forked"
    WORKER_FORKED = "worker.forked"
    # A worker makes its slots of host memory: files not yet under their names, then all of them.
    SLOTS_ALLOCATED = "worker.slots-allocated"
    SLOTS_MADE = "worker.slots-made"
    # A worker restores; the last one is before states of an abandoned past are dropped.
    RESTORE_BEGUN = "worker.restore-begun"
    RESTORE_FROM_MEMORY = "worker.restore-from-memory"
    RESTORE_FROM_STORAGE = "worker.restore-from-storage"
    RESTORE_SET_ASIDE = "worker.restore-set-aside"
    RESTORED = "worker.restored"
    # All ranks have agreed on the newest step that everybody holds.
    STEP_AGREED = "worker.step-agreed"
    # A worker saves a step to host memory.
    SLOT_CHOSEN = "worker.slot-chosen"
    SLOT_INVALID = "worker.slot-invalid"
    SLOT_HALF_COPIED = "worker.slot-half-copied"
    SLOT_COPIED = "worker.slot-copied"
    SLOT_HEADER_WRITTEN = "worker.slot-header-written"
    SLOT_SEALED = "worker.slot-sealed"
    UPLOAD_WITHDRAWN = "worker.upload-withdrawn"
    # An agent sends a part of a checkpoint to storage.
    UPLOAD_BEGUN = "uploader.begun"
    FILE_BEGUN = "uploader.file-begun"
    PART_SENT = "uploader.part-sent"
    PARTS_SENT = "uploader.parts-sent"
    PAYLOAD_STORED = "uploader.payload-stored"
    RECORD_STORED = "uploader.record-stored"
    UPLOAD_DONE = "uploader.done"
    # An agent commits a checkpoint whose parts have arrived, or gives it up.
    PARTS_ARRIVED = "coordinator.parts-arrived"
    DESCRIPTION_STORED = "coordinator.description-stored"
    MANIFEST_STORED = "coordinator.manifest-stored"
    COMMITTED = "coordinator.committed"
    RECORDS_DELETED = "coordinator.records-deleted"
    GIVING_UP = "coordinator.giving-up"
    # An agent deletes what retention does not keep, and what dead uploads left.
    CLEANING = "cleaner.begun"
    COMMIT_DELETED = "cleaner.commit-deleted"
    STEP_DELETED = "cleaner.step-deleted"
    REMAINS_DELETED = "cleaner.remains-deleted"
    CLEANED = "cleaner.done"
    # An agent's plan of uploads, what it tells of them, and the end of a job.
    PLAN_MADE = "agent.plan-made"
    PLAN_KEPT = "agent.plan-kept"
    COMMIT_HEARD = "agent.commit-heard"
    COMMIT_TOLD = "agent.commit-told"
    JOB_FORGOTTEN = "agent.job-forgotten"
    UPLOADS_DRAINED = "agent.uploads-drained"
    MEMORY_FREED = "agent.memory-freed"
    # A controller hears of a checkpoint; its journal, and what it does after.
    CHECKPOINT_HEARD = "controller.checkpoint-heard"
    CHANGES_DECIDED = "controller.changes-decided"
    CHANGES_KEPT = "controller.changes-kept"
    EFFECTS_RUN = "controller.effects-run"


# Read once, here: any process of a deployment may come to a point, and has no argument for it.
_folder = os.environ.get(FOLDER_VARIABLE)


def reach(point: CrashPoint) -> None:
    """Say that this process is at `point`; it ends here when that is what somebody wants."""
    if _folder is not None and _is_wanted(Path(_folder) / point.value):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_wanted(order: Path) -> bool:
    """Whether the order is to end now, and ours to carry out."""
    try:
        left = int(order.read_text() or "0")
        if left > 0:
            order.write_text(str(left - 1))
            return False
        order.unlink()
    except (FileNotFoundError, ValueError):
        # Nobody wants it; or another process was first, or is counting in this moment.
        return False
    return True
