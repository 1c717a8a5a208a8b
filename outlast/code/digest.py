"""How an archive of code is named, and how large one may be."""

from __future__ import annotations

import hashlib
import re
from typing import IO

# What a controller takes unless its configuration says otherwise: code, and not data or weights.
DEFAULT_MAX_BYTES = 64 * 2**20
# Read, and sent, at a time.
CHUNK_BYTES = 2**20
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest_of(file: IO[bytes]) -> str:
    """The digest of all that is left to read."""
    found = hashlib.sha256()
    while data := file.read(CHUNK_BYTES):
        found.update(data)
    return f"sha256:{found.hexdigest()}"


def file_name(digest: str) -> str:
    """A digest as the name of a file.

    Raises:
        ValueError: it is none.
    """
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"is {digest[:80]!r}; allowed: sha256: and 64 hexadecimal digits")
    return digest.removeprefix("sha256:")
