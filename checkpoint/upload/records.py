"""A checkpoint's manifest and commit record, as they get to storage.

Both are created only where no sound one is: a coordinator that takes over finds what one before
it has written, and what is committed is never replaced.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError, sha256
from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.describe import Describer
from outlast.crashpoints import CrashPoint, reach

logger = logging.getLogger(__name__)


class Records:
    """Writes the records of one job's checkpoints."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._describer = Describer()

    def put_manifest(self, manifest: Manifest) -> bytes:
        """Write the manifest, and torch's description first; returns the one that holds.

        One that is there was made of the same parts by a coordinator before us, which may
        have committed it in the meantime: neither it nor what it names is ever replaced.
        """
        folder = names.attempt_folder(manifest.step, manifest.attempt)
        path = f"{folder}/{names.MANIFEST}"
        found = self._sound_manifest(path)
        if found is not None:
            return found
        raw = self._described(manifest).to_json()
        reach(CrashPoint.DESCRIPTION_STORED)
        if not self._storage.put_if_absent(path, raw):
            found = self._sound_manifest(path)
            if found is not None:
                return found
            self._storage.write_bytes(path, raw)
        return raw

    def put_commit(self, commit: CommitRecord, manifest: bytes) -> CommitRecord:
        """Create the commit record; returns the one that is there afterwards.

        It is always read back, with the manifest: a store that says it has created a file and
        has not would make a checkpoint that nobody finds again.
        """
        path = names.commit_path(commit.step)
        if self._storage.put_if_absent(path, commit.to_json()):
            if self._holds(commit, manifest):
                return commit
            return self._storage.read_commit(commit.step)[0]
        try:
            return self._storage.read_commit(commit.step)[0]
        except CorruptCheckpointError as error:
            # A damaged record must not keep a whole checkpoint from existing.
            logger.warning("committed checkpoint set aside: %s", error)
            self._storage.quarantine_step(commit.step)
        self._storage.put_if_absent(path, commit.to_json())
        return self._storage.read_commit(commit.step)[0]

    def _sound_manifest(self, path: str) -> bytes | None:
        """The manifest that is in storage; None when there is none or it is damaged."""
        try:
            found = self._storage.read_bytes(path)
            Manifest.from_json(found)
        except FileNotFoundError:
            return None
        except RecordError as error:
            logger.warning("damaged manifest replaced: %s: %s", path, error)
            return None
        return found

    def _described(self, manifest: Manifest) -> Manifest:
        """The manifest that names torch's description, which it writes beside the payloads."""
        description = self._describer.description(manifest)
        folder = names.attempt_folder(manifest.step, manifest.attempt)
        self._storage.write_bytes(f"{folder}/{names.METADATA}", description)
        return replace(manifest, metadata_sha256=sha256(description))

    def _holds(self, commit: CommitRecord, manifest: bytes) -> bool:
        """Whether both records are in storage just as they were written."""
        folder = names.attempt_folder(commit.step, commit.attempt)
        wanted = {
            names.commit_path(commit.step): commit.to_json(),
            f"{folder}/{names.MANIFEST}": manifest,
        }
        try:
            return all(self._storage.read_bytes(path) == raw for path, raw in wanted.items())
        except FileNotFoundError:
            return False
