"""torch's own description of a checkpoint, the file `.metadata`: made once, and checked.

What does not belong here: what the description says (`dcp.py`).
"""

from __future__ import annotations

from checkpoint.core import names
from checkpoint.core.checked_json import sha256
from checkpoint.core.manifest import Manifest
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.storage import Storage
from checkpoint.torch_format import dcp


class Describer:
    """Describes one layout after another: one has one description, whatever the step."""

    def __init__(self) -> None:
        self._layout = ""
        self._description = b""

    def description(self, manifest: Manifest) -> bytes:
        """What torch's tools read of this checkpoint."""
        layout = manifest.layout_digest
        if layout != self._layout:
            self._description = dcp.describe(manifest)
            self._layout = layout
        return self._description


def check_description(storage: Storage, manifest: Manifest) -> None:
    """Raise CorruptCheckpointError unless the description in storage is the manifest's."""
    if not manifest.metadata_sha256:
        return
    path = f"{names.attempt_folder(manifest.step, manifest.attempt)}/{names.METADATA}"
    try:
        found = storage.read_bytes(path)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(manifest.step, f"{path} is missing") from error
    if sha256(found) != manifest.metadata_sha256:
        raise CorruptCheckpointError(manifest.step, f"{path} is not what the manifest names")
