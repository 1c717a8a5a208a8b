"""What a job that is submitted is called, and where its checkpoints go."""

from __future__ import annotations

import secrets
from collections.abc import Container
from typing import NoReturn

import grpc

from controller.core.changes import State
from controller.core.requests import named
from controller.grpc_errors import Context, abort
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


async def refuse_name(state: State, name: str, context: Context) -> NoReturn:
    """Answer that a job of this name has not ended."""
    taken = named(state, name)
    owner = f"job {taken.job_id} ({taken.state})" if taken is not None else "another job"
    await abort(
        context,
        grpc.StatusCode.ALREADY_EXISTS,
        f"name: {name!r} is the name of {owner}, which has not ended; cancel that one, wait "
        "for its end, or submit under another name (--set name=...)",
        reason="JOB_NAME_TAKEN",
        metadata={} if taken is None else {"job": taken.job_id},
    )
