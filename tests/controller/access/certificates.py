"""An authority, and folders with what it signed."""

from __future__ import annotations

import datetime
from pathlib import Path

from controller.access import tokens
from controller.access.authority import LOCAL_HOSTS, Subject, issue, make_authority
from controller.access.roles import Role
from outlast.access import Access, read_tls_dir

ROLES = {"vera": Role.VIEWER, "sam": Role.SUBMITTER, "kim": Role.SUBMITTER, "olga": Role.OPERATOR}


def authority(folder: Path) -> Path:
    """A fresh one."""
    make_authority(folder, "test", 10)
    return folder


def server(ca: Path, into: Path, *hosts: str) -> Path:
    """The folder of a controller on this machine."""
    issue(ca, Subject(name="controller", hosts=(*hosts, *LOCAL_HOSTS)), 10, into)
    return into


def client(
    ca: Path, into: Path, name: str, role: str, now: datetime.datetime | None = None
) -> Access:
    """What a user, or a node, shows."""
    issue(ca, Subject(name=name, role=role), 10, into, now=now)
    return read_tls_dir(into)


def tokens_file(path: Path) -> dict[str, str]:
    """A file with a token for each role, and those tokens; `adam` is the admin."""
    made = {name: tokens.new_token() for name in (*ROLES, "adam")}
    entries = tuple(
        tokens.Entry(name=name, role=ROLES.get(name, Role.ADMIN), sha256=digest)
        for name, (_, digest) in made.items()
    )
    tokens.write(path, tokens.Known(entries=entries))
    return {name: token for name, (token, _) in made.items()}
