"""Whom a checkpoint root belongs to: the job that was the first to write there, for good.

Folders are named by job ids, whose chance part is short: controllers that share a bucket
and know nothing of each other may make the same one. Their jobs would load each other's
checkpoints and delete them. So the root has a record, created only if absent, of a mark
that a job gets when it is submitted and keeps for life. A job that goes on from another's
checkpoints (`checkpoint.load`) has a root of its own and reads the other's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError, decode_checked, encode_checked
from checkpoint.errors import RootTakenError
from checkpoint.storage.storage import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A job, distinguished from every other of the same id by its mark."""

    job_id: str
    mark: str

    def to_json(self) -> bytes:
        return encode_checked({"job_id": self.job_id, "mark": self.mark})


def owner_problem(storage: Storage) -> str:
    """What is wrong with the record of the root's owner; "" when it is whole.

    So too where there is none: a copied checkpoint belongs to nobody until a job goes on there.

    Raises:
        StorageUnavailableError: storage does not say.
    """
    try:
        record = decode_checked(storage.read_bytes(names.OWNER))
        record.text("job_id")
        record.text("mark")
    except FileNotFoundError:
        return ""
    except RecordError as error:
        return f"{names.OWNER}: {error}"
    return ""


def claim(storage: Storage, owner: Owner) -> None:
    """Make the root the job's own; nothing happens where it is already.

    Raises:
        RootTakenError: it is another's.
        StorageUnavailableError: storage does not say.
    """
    record = owner.to_json()
    if storage.put_if_absent(names.OWNER, record):
        return
    try:
        found = decode_checked(storage.read_bytes(names.OWNER)).text("job_id")
    except (RecordError, FileNotFoundError) as error:
        # A record that nobody can read must not lock the job out of its own checkpoints.
        logger.warning("damaged record replaced: %s/%s: %s", storage.url, names.OWNER, error)
        storage.write_bytes(names.OWNER, record)
        return
    raise RootTakenError(
        f"checkpoint.url: {storage.url} belongs to another job {found}, submitted elsewhere or "
        "earlier; submit with another checkpoint.url, and to go on from its checkpoints say "
        f"checkpoint.load: {storage.url}. If that job is gone for good, delete the folder"
    )
