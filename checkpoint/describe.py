"""torch's own description of a checkpoint, the file `.metadata`, made without torch here.

A child process imports torch and makes it from the manifest: agents must not import
torch, and its tools only believe what its own classes have pickled. One layout has one
description, whatever the step, so the child runs once and its result is kept.

What does not belong here: what the description says (`dcp.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from checkpoint.core import names
from checkpoint.core.manifest import Manifest
from checkpoint.core.sealed import sha256
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage import Storage

# Importing torch takes seconds, and far more beside training that has every core.
DEADLINE_S = 120.0
_CHECK_S = 0.2


class DescriptionError(Exception):
    """torch's description could not be made; the checkpoint is whole without it."""


class Describer:
    """Makes the description of one layout after another. Used by one thread.

    `describe` makes one from a manifest's bytes.
    """

    def __init__(self, describe: Callable[[bytes], bytes]) -> None:
        self._describe = describe
        self._layout = ""
        self._description = b""

    def description(self, manifest: Manifest) -> bytes:
        """What torch's tools read of this checkpoint.

        Raises:
            DescriptionError: it cannot be made here.
        """
        layout = manifest.layout_digest
        if layout != self._layout:
            self._description = self._describe(manifest.to_json())
            self._layout = layout
        return self._description


def describe_in_child(manifest: bytes, *, is_stopping: Callable[[], bool]) -> bytes:
    """Let a child process describe a manifest; it has the priority of the calling thread.

    Raises:
        DescriptionError: it did not, or not in time, or `is_stopping` said to end.
    """
    command = [sys.executable, "-m", "checkpoint.dcp"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        description, said = _answer(child, manifest, is_stopping)
    if child.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise DescriptionError(lines[-1] if lines else f"exit code {child.returncode}")
    return description


def _answer(
    child: subprocess.Popen[bytes], question: bytes | None, is_stopping: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """What a child writes to its output and to its error output until it ends."""
    ends_at = time.monotonic() + DEADLINE_S
    while True:
        try:
            return child.communicate(question, timeout=_CHECK_S)
        except subprocess.TimeoutExpired:
            # It is being written already.
            question = None
            if is_stopping() or time.monotonic() > ends_at:
                child.kill()
                raise DescriptionError(f"not made in {DEADLINE_S:g} s") from None


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
