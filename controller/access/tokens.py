"""The file of tokens: who may call, in which role, until when; and who else issues tokens.

    - {name: alice, role: submitter, sha256: 9f86d0…, until: 2027-06-30}
    - {issuer: https://login.example, audience: outlast, name: email, roles: {ml: submitter}}

Tokens are 256 random bits, so that one round of SHA-256 is enough: there is nothing to guess. The
file has no token in it, and is read anew once it has changed.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controller.access.issuers import NAME, NAME_ALLOWED, Issuer, issuer_of
from controller.access.roles import ROLES, Caller, Role
from outlast import private
from outlast.access import AccessError, LoginsBusyError, locked_folder
from outlast.errors import FatalError

# What a token looks like to those who search for lost ones.
PREFIX = "outlast_"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 4 << 20
_FIELDS = ("name", "role", "sha256", "until")


class TokensError(FatalError):
    """The file of tokens cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One token that somebody has."""

    name: str
    role: Role
    sha256: str
    until: datetime.date | None = None
    """The last day, UTC."""

    @property
    def caller(self) -> Caller:
        """Who shows it."""
        return Caller(name=self.name, role=self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a file says."""

    entries: tuple[Entry, ...] = ()
    issuers: tuple[Issuer, ...] = ()


def check_name(name: str) -> None:
    """Raises:
    TokensError: it is none for a caller.
    """
    if not NAME.fullmatch(name):
        raise TokensError(f"the name is {name!r}; allowed: {NAME_ALLOWED}")


def new_token() -> tuple[str, str]:
    """A token, and its digest."""
    token = PREFIX + secrets.token_urlsafe(32)
    return token, digest(token)


def digest(token: str) -> str:
    """What the file has of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def find(token: str, entries: Iterable[Entry], today: datetime.date) -> Entry | None:
    """The entry of a token that still holds. How long it takes says nothing of them."""
    given = digest(token)
    found = [entry for entry in entries if hmac.compare_digest(entry.sha256, given)]
    return next((each for each in found if each.until is None or today <= each.until), None)


def read(path: Path) -> Known:
    """All of a file.

    Raises:
        TokensError: it cannot be read, or has something else in it.
    """
    try:
        with path.open("rb") as file:
            document = yaml.safe_load(file.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise TokensError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TokensError(f"{path} is not YAML: {error}") from error
    if not isinstance(document, list):
        raise TokensError(f"{path} has no list of tokens; `outlast tokens add` writes it")
    entries: list[Entry] = []
    issuers: list[Issuer] = []
    for at, each in enumerate(document, 1):
        where = f"{path}, entry {at}"
        if isinstance(each, dict) and "issuer" in each:
            issuers.append(_issuer(each, where))
        else:
            entries.append(_entry(each, where))
    if len({entry.name for entry in entries}) < len(entries):
        raise TokensError(f"{path} has a name twice; each caller has one token")
    return Known(entries=tuple(entries), issuers=tuple(issuers))


def change(path: Path, changed: Callable[[Known], Known]) -> None:
    """Write the file anew with what `changed` makes of it, while no other command does.

    Raises:
        TokensError: it cannot be read, written or locked.
    """
    try:
        with locked_folder(path.parent):
            write(path, changed(read(path) if path.exists() else Known()))
    except (AccessError, LoginsBusyError) as error:
        raise TokensError(str(error)) from error


def write(path: Path, known: Known) -> None:
    """Write the file anew, for its owner only.

    Raises:
        TokensError: it cannot be written.
    """
    document = [
        {
            "name": entry.name,
            "role": entry.role.word,
            "sha256": entry.sha256,
            **({"until": entry.until.isoformat()} if entry.until else {}),
        }
        for entry in known.entries
    ]
    document += [issuer.document() for issuer in known.issuers]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.replace_bytes(path, yaml.safe_dump(document, sort_keys=False).encode())
    except OSError as error:
        raise TokensError(f"{path} cannot be written: {error.strerror or error}") from error


def _issuer(given: Any, where: str) -> Issuer:
    try:
        return issuer_of(given)
    except ValueError as error:
        raise TokensError(f"{where}: {error}") from error


def _entry(given: Any, where: str) -> Entry:
    if not isinstance(given, dict):
        raise TokensError(f"{where} is {given!r}; allowed: the fields {', '.join(_FIELDS)}")
    if unknown := [str(name) for name in given if name not in _FIELDS]:
        raise TokensError(f"{where}: {unknown[0]} is not known; allowed: {', '.join(_FIELDS)}")
    name, role, sha256 = (str(given.get(field, "")) for field in _FIELDS[:3])
    if not NAME.fullmatch(name):
        raise TokensError(f"{where}: name is {name!r}; allowed: {NAME_ALLOWED}")
    if role not in ROLES:
        raise TokensError(f"{where}: role is {role!r}; allowed: {', '.join(ROLES)}")
    if not _DIGEST.fullmatch(sha256):
        raise TokensError(f"{where}: sha256 is {sha256!r}; allowed: 64 digits 0-9 and a-f")
    return Entry(name=name, role=ROLES[role], sha256=sha256, until=_day(given.get("until"), where))


def _day(given: object, where: str) -> datetime.date | None:
    if given is None or (isinstance(given, datetime.date) and type(given) is datetime.date):
        return given
    try:
        return datetime.date.fromisoformat(str(given))
    except ValueError as error:
        raise TokensError(
            f"{where}: until is {given!r}; allowed: a day, such as 2027-06-30"
        ) from error
