"""The file of tokens."""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from controller.access import tokens
from controller.access.callers import Callers
from controller.access.issuers import Issuer
from controller.access.roles import Caller, Role
from tests.controller.access.certificates import tokens_file

TODAY = datetime.date(2026, 11, 28)
NOON = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)


def entry(name: str, token: str, **changes: object) -> tokens.Entry:
    values = {"name": name, "role": Role.VIEWER, "sha256": tokens.digest(token), **changes}
    return tokens.Entry(**values)  # type: ignore[arg-type]  # as the test gives them


def test_a_file_comes_back_as_it_was_written_and_has_no_token(tmp_path: Path) -> None:
    token, digest = tokens.new_token()
    path = tmp_path / "new" / "tokens.yaml"
    written = tokens.Known(
        entries=(
            entry("alice", token, role=Role.ADMIN),
            entry("ci@lab", "other", until=TODAY),
        ),
        issuers=(
            Issuer(issuer="https://login.example", audience="a", roles={"ml": Role.SUBMITTER}),
            Issuer(
                issuer="https://k8s.example",
                audience="outlast",
                role_claim="sub",
                roles={"system:serviceaccount:ci:runner": Role.ADMIN},
                keys="/etc/keys.json",
            ),
        ),
    )
    tokens.write(path, written)
    assert tokens.read(path) == written
    assert token not in path.read_text()
    assert digest in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_differ_and_are_long() -> None:
    made = {tokens.new_token()[0] for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"outlast_[-_A-Za-z0-9]{43}", token) for token in made)


def test_a_token_holds_to_the_end_of_its_last_day() -> None:
    entries = [entry("alice", "a", until=TODAY), entry("kim", "k")]
    tomorrow = TODAY + datetime.timedelta(days=1)
    assert tokens.find("a", entries, TODAY) == entries[0]
    assert tokens.find("a", entries, tomorrow) is None
    assert tokens.find("k", entries, tomorrow) == entries[1]
    assert tokens.find("x", entries, TODAY) is None


DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has no list of tokens"),
        ("{a: 1}", "has no list of tokens"),
        ("- [", "is not YAML"),
        ("- 7", "entry 1 is 7; allowed: the fields name, role, sha256, until"),
        (f"- {{name: a b, role: viewer, sha256: {DIGEST}}}", "name is 'a b'; allowed"),
        (f"- {{name: a, role: root, sha256: {DIGEST}}}", "role is 'root'; allowed: viewer"),
        ("- {name: a, role: viewer, sha256: xyz}", "sha256 is 'xyz'; allowed: 64 digits"),
        (f"- {{name: a, role: viewer, sha256: {DIGEST}, until: soon}}", "until is 'soon'"),
        (f"- {{name: a, role: viewer, sha256: {DIGEST}, token: x}}", "token is not known"),
        (f"- &one {{name: a, role: viewer, sha256: {DIGEST}}}\n- *one", "has a name twice"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(tokens.TokensError, match=re.escape(wrong)):
        tokens.read(path)


def test_a_file_that_is_not_there_is_no_open_door(tmp_path: Path) -> None:
    with pytest.raises(tokens.TokensError, match="cannot be read"):
        Callers(tmp_path / "tokens.yaml")


def test_a_changed_file_holds_at_once_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    tokens.write(path, tokens.Known(entries=(entry("alice", "a"),)))
    callers = Callers(path, now=lambda: NOON)
    assert callers.by_token("a") == Caller(name="alice", role=Role.VIEWER)
    tokens.write(path, tokens.Known(entries=(entry("kim", "k"),)))
    assert callers.by_token("a") is None
    assert callers.by_token("k") == Caller(name="kim", role=Role.VIEWER)
    for broken in ("- {", None):
        path.write_text(broken) if broken is not None else path.unlink()
        assert callers.by_token("k") is not None
        assert callers.by_token("a") is None


@pytest.mark.parametrize("header", ["", "k", "Basic k", "bearer k", "Bearer  k", "Bearer"])
def test_a_header_of_another_form_is_nobodys(tmp_path: Path, header: str) -> None:
    path = tmp_path / "tokens.yaml"
    tokens.write(path, tokens.Known(entries=(entry("kim", "k"),)))
    callers = Callers(path, now=lambda: NOON)
    assert callers.by_header(header) is None
    assert callers.by_header("Bearer k") is not None


def test_a_file_that_is_replaced_stays_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    tokens.write(path, tokens.Known(entries=(entry("kim", "k"),)))
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 4242, 4343)
    before = path.stat()
    tokens.write(path, tokens.Known())
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        *(before.st_uid, before.st_gid),
        before.st_mode,
    )
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_file_that_could_not_be_read_is_read_again_once_it_can(tmp_path: Path) -> None:
    """`chmod` changes neither the file's time of writing nor its size nor its inode."""
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)
    callers = Callers(path)
    right, before = path.read_bytes(), path.stat()
    kept = tuple(each for each in tokens.read(path).entries if each.name != "vera")
    tokens.write(tmp_path / "new.yaml", tokens.Known(entries=kept))
    without = (tmp_path / "new.yaml").read_bytes().ljust(len(right), b"\n")
    path.write_bytes(b"{" * len(right))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert callers.by_token(given["vera"]) is not None
    path.write_bytes(without)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert callers.by_token(given["vera"]) is None
    assert callers.by_token(given["sam"]) is not None


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    names = [f"u{number}" for number in range(12)]

    def add(name: str) -> None:
        entry = tokens.Entry(name=name, role=Role.VIEWER, sha256=tokens.new_token()[1])
        tokens.change(path, lambda known: replace(known, entries=(*known.entries, entry)))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(add, names))
    assert sorted(each.name for each in tokens.read(path).entries) == sorted(names)


def test_a_file_whose_disk_failed_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)
    callers = Callers(path)
    kept = tuple(each for each in tokens.read(path).entries if each.name != "vera")
    tokens.write(path, tokens.Known(entries=kept))

    def fails(self: Path, *arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        assert callers.by_token(given["vera"]) is not None
    assert callers.by_token(given["vera"]) is None


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens.yaml"
    tokens.change(path, lambda known: known)
    assert tokens.read(path) == tokens.Known()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_without_locks_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks only what is open for writing, which a folder never is."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "tokens.yaml"
    tokens.change(path, lambda known: known)
    assert tokens.read(path) == tokens.Known()
