"""What a job that is submitted is called, and where its checkpoints go."""

from __future__ import annotations

import secrets
from collections.abc import Container

from outlast.ids import JobId, job_id

_TOKEN_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_TOKEN_LENGTH = 5


def new_job_id(name: str, taken: Container[JobId]) -> JobId:
    """An id that no job has."""
    while True:
        token = "".join(secrets.choice(_TOKEN_ALPHABET) for _ in range(_TOKEN_LENGTH))
        if (new_id := job_id(name, token)) not in taken:
            return new_id


def root_of(url: str) -> str:
    """A checkpoint root, which `wrong_with_place` finds right, as a URL."""
    if url.startswith("/"):
        return f"file://{url.rstrip('/')}"
    return url.rstrip("/")
