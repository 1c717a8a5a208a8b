"""One PostgreSQL server for all tests of a session, and a database for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new database; the password is where libpq looks for it."""
    monkeypatch.setenv("PGPASSFILE", str(server.password_file))
    return server.make_database()
