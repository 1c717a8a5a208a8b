"""A PostgreSQL server of the tests' own: in a temporary folder, on a socket in it, with a login."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from controller.store.backend import DatabaseTakenError
from controller.store.database import Database

PASSWORD = "correct-horse-battery"
USER = "outlast"
_START_S = 60


def program(name: str) -> str | None:
    """Where a program of PostgreSQL's is: on the PATH, or where Debian has it."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


needs_postgres = pytest.mark.skipif(
    program("initdb") is None or importlib.util.find_spec("psycopg") is None,
    reason="PostgreSQL or psycopg is not installed; `make test-postgres` installs both",
)


class Server:
    """A running server; `stop` and `start` keep its data."""

    def __init__(self) -> None:
        # Not below pytest's folders: those are root's only, and a socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="outlast-pg-"))
        self._data = self.folder / "data"
        self.password_file = self.folder / "pgpass"
        self._num_databases = 0
        # PostgreSQL refuses to run as root.
        self._user = "nobody" if os.geteuid() == 0 else None
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self._user:
            for path in (self.folder, secret):
                shutil.chown(path, self._user)
        self._run(
            *("initdb", "--pgdata", str(self._data), "--username", USER, "--no-sync"),
            *("--auth", "scram-sha-256", "--pwfile", str(secret)),
            *("--encoding", "UTF8", "--locale", "C"),
        )
        self.password_file.write_text(f"*:*:*:*:{PASSWORD}\n")
        self.password_file.chmod(0o600)
        self.start()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        settings = f"-c listen_addresses= -k {self.folder} -c fsync=off"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", log, "-o", settings, "start")

    def stop(self) -> None:
        """Cut every connection, and end it."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")

    def close(self) -> None:
        """End it, and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder)

    def make_database(self) -> str:
        """The URL of a new database, without the password."""
        self._num_databases += 1
        name = f"journal{self._num_databases}"
        self.sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://{USER}@/{name}?host={self.folder}"

    def sql(self, database: str, statement: str) -> str:
        """What psql prints for a statement."""
        place = ("-h", str(self.folder), "-U", USER, "-d", database)
        return self._run("psql", "-X", "-At", "-v", "ON_ERROR_STOP=1", *place, "-c", statement)

    def _run(self, name: str, *arguments: str) -> str:
        path = program(name)
        assert path is not None
        # The server keeps what it is given: a pipe would be waited for.
        with tempfile.TemporaryFile() as output:
            code = subprocess.call(
                [path, *arguments],
                user=self._user,
                cwd="/",
                env={**os.environ, "PGPASSWORD": PASSWORD, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_START_S,
            )
            output.seek(0)
            text = output.read().decode().strip()
        assert code == 0, f"{name}: {text}"
        return text


def is_claimed(database: Database) -> bool:
    """Whether the database could be claimed; a session that has it ends when the server comes
    to it."""
    try:
        database.claim()
    except DatabaseTakenError:
        return False
    return True
