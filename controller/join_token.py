"""The join token: what an agent must know to be let in by a controller that asks for one.

A file with one token per line. The controller takes any of them and agents present the first,
so that a token is replaced without a moment in which nobody may join: add the new one as the
second line everywhere, make it the first, take the old one out. The file is read anew for each
session, on both sides. It travels as `authorization: Bearer TOKEN`, which a controller looks
at before it reads any message.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path

from outlast.channel import HEADER, SCHEME, bearer
from outlast.errors import FatalError

# The token of a local cluster, in its state directory.
FILE_NAME = "join-token"
_TOKEN = re.compile(r"[-A-Za-z0-9._~+/=]{16,512}")
_MAX_FILE_BYTES = 16_384
ALLOWED = "16 to 512 letters, digits and -._~+/= on a line of its own"
REMEDY = (
    "start the agent with --join-token-file FILE (or OUTLAST_JOIN_TOKEN_FILE), a copy of the file "
    "that the controller was started with"
)


class JoinTokenError(FatalError):
    """A file of join tokens cannot be used."""


def read(path: Path) -> tuple[str, ...]:
    """The tokens of a file, one at least.

    Raises:
        JoinTokenError: it cannot be read, or it has something else in it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("ascii", errors="replace")
    except OSError as error:
        why = error.strerror or error
        raise JoinTokenError(f"the join token file {path} cannot be read: {why}") from error
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise JoinTokenError(f"the join token file {path} is empty; it must have {ALLOWED}")
    for number, token in enumerate(tokens, 1):
        if not _TOKEN.fullmatch(token):
            raise JoinTokenError(
                f"the join token file {path} has something else than a token as number {number}; "
                f"allowed: {ALLOWED}"
            )
    return tokens


def make_if_missing(path: Path) -> None:
    """Write a file with a fresh token, for its owner only, unless there is one.

    Raises:
        JoinTokenError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if path.exists():
            return
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        draft.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise JoinTokenError(f"the join token file {path} cannot be made: {why}") from error


def metadata(path: Path | None) -> tuple[tuple[str, str], ...]:
    """What an agent says of itself before its first message.

    Raises:
        JoinTokenError: the file cannot be used.
    """
    return () if path is None else ((HEADER, bearer(read(path)[0])),)


def is_right(given: str, tokens: tuple[str, ...]) -> bool:
    """Whether a header has one of these tokens. How long it takes says nothing about them."""
    presented = given.removeprefix(SCHEME).encode()
    matches = [hmac.compare_digest(presented, token.encode()) for token in tokens]
    return given.startswith(SCHEME) and any(matches)
