"""Pins and leases: what keeps a checkpoint from being deleted besides its age.

A pin is a person's word and holds until it is taken back. A lease is a reader's, and
holds for a while: readers die without saying so. A reader that takes longer renews it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Iterator

from checkpoint.core import names
from checkpoint.core.retention import is_lease_held
from checkpoint.errors import StorageUnavailableError
from checkpoint.storage.storage import Storage

logger = logging.getLogger(__name__)

# A restore reads terabytes in minutes; one that takes longer renews its lease.
LEASE_S = 3600.0


class Lease:
    """One reader's word that it needs a checkpoint."""

    def __init__(self, storage: Storage, step: int) -> None:
        self._storage = storage
        self._path = names.lease_path(step, uuid.uuid4().hex)

    def renew(self) -> None:
        """Hold it for another `LEASE_S`.

        Storage that cannot be written to has nobody who deletes either, so this does
        not fail: it logs.
        """
        try:
            self._storage.write_bytes(self._path, json.dumps({"lasts_s": LEASE_S}).encode())
        except StorageUnavailableError as error:
            logger.info("reading without a lease: %s", error)

    def end(self) -> None:
        """Give it back; one that cannot be given back ends by itself."""
        with contextlib.suppress(StorageUnavailableError):
            self._storage.delete_file(self._path)


@contextlib.contextmanager
def reading(storage: Storage, step: int) -> Iterator[Lease]:
    """Keep the checkpoint of `step` from being deleted while the block runs."""
    lease = Lease(storage, step)
    lease.renew()
    try:
        yield lease
    finally:
        lease.end()


def leased_steps(storage: Storage, *, now_s: float) -> set[int]:
    """Steps that somebody is reading; `now_s` is the store's own time."""
    return {
        step
        for entry in storage.entries(names.LEASES)
        if (step := names.parse_lease(entry.name)) is not None
        and is_lease_held(entry.written_at_s, now_s=now_s, lasts_s=LEASE_S)
    }


def drop_expired_leases(storage: Storage, *, now_s: float) -> None:
    """Delete the leases of readers that died."""
    for entry in storage.entries(names.LEASES):
        if not is_lease_held(entry.written_at_s, now_s=now_s, lasts_s=LEASE_S):
            storage.delete_file(f"{names.LEASES}/{entry.name}")


def pinned_steps(storage: Storage) -> set[int]:
    """Steps that people want to keep."""
    found = (names.parse_commit(entry.name) for entry in storage.entries(names.PINS))
    return {step for step in found if step is not None}


def pin_reason(storage: Storage, step: int) -> str:
    """Why people want to keep it; "" where nobody said so."""
    try:
        found = json.loads(storage.read_bytes(names.pin_path(step)))
    except (FileNotFoundError, ValueError):
        return ""
    return str(found.get("reason", "")) if isinstance(found, dict) else ""


def pin(storage: Storage, step: int, reason: str) -> None:
    """Keep the checkpoint of `step` until `unpin`, whatever retention says."""
    storage.write_bytes(names.pin_path(step), json.dumps({"reason": reason}).encode())


def unpin(storage: Storage, step: int) -> None:
    """Leave the checkpoint of `step` to retention again."""
    storage.delete_file(names.pin_path(step))
