"""Tokens that are renewed in the file of logins, and the issuer's certificate."""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast import access as access_module
from outlast.access import (
    Access,
    AccessError,
    Login,
    Logins,
    LoginsBusyError,
    change_logins,
    logins_file,
    read_logins,
    renewing,
    write_logins,
)
from outlast.oidc import http
from outlast.oidc.http import Web
from outlast.oidc.issuer import (
    Answer,
    IssuerUnavailableError,
    LoginError,
    OidcClient,
    Session,
    tokens_in,
)
from outlast.oidc.renewal import fresh
from outlast.ports import free_port
from tests.cli.running import outlast
from tests.controller.access.device_issuer import CLIENT, DeviceIssuer


@pytest.fixture
def issuer() -> Iterator[DeviceIssuer]:
    made = DeviceIssuer()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return logins_file()


def kept(path: Path, issuer: DeviceIssuer) -> Access:
    """A login of a token that has expired."""
    issuer.current = "refresh"
    client = OidcClient(issuer=issuer.url, client_id=CLIENT, scope="openid groups", ca="")
    session = Session(id="s", client=client, refresh_token="refresh")
    shown = Access(token=issuer.token(exp=1.0), session=session)
    login = Login(address="127.0.0.1:7070", access=shown)
    write_logins(path, Logins(current="lab", by_name={"lab": login}))
    return shown


def test_logins_are_read_as_they_were_written(path: Path, issuer: DeviceIssuer) -> None:
    written = kept(path, issuer)
    assert read_logins(path).by_name["lab"].access == written


def test_many_calls_at_once_renew_a_token_once(path: Path, issuer: DeviceIssuer) -> None:
    expired = kept(path, issuer)
    barrier = threading.Barrier(8)

    def renew(_: int) -> Access:
        barrier.wait(30)
        return fresh(expired)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(renew, range(8)))
    assert len(issuer.forms("refresh_token")) == 1
    assert {each.token for each in found} == {read_logins(path).by_name["lab"].access.token}
    assert fresh(found[0]) is found[0]


def test_a_login_that_was_renamed_is_renewed(path: Path, issuer: DeviceIssuer) -> None:
    expired = kept(path, issuer)
    login = read_logins(path).by_name["lab"]
    write_logins(path, Logins(current="", by_name={"other": login}))
    assert fresh(expired).token == read_logins(path).by_name["other"].access.token


def test_a_change_keeps_what_another_one_wrote(path: Path) -> None:
    def add(name: str) -> None:
        entry = Login(address="127.0.0.1:7070", access=Access(token=name))
        change_logins(path, lambda now: replace(now, by_name={**now.by_name, name: entry}))

    names = [f"login-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, names))
    assert sorted(read_logins(path).by_name) == names


def test_a_command_that_never_ends_holds_up_no_other_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "_LOCK_S", 0.1)
    change_logins(path, lambda now: now)
    with path.with_name("logins.yaml.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LoginsBusyError, match=r"has had .*logins.yaml.lock locked for 0.1 s"):
            change_logins(path, lambda now: now)


def test_a_session_that_is_renewed_holds_up_no_other_and_no_change(
    path: Path, issuer: DeviceIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = kept(path, issuer)
    assert expired.session is not None
    monkeypatch.setattr(access_module, "_LOCK_S", 0.1)
    with renewing(path, "another"):
        assert fresh(expired).token != expired.token
    write_logins(path, Logins(current="lab", by_name={"lab": Login(address="a:1", access=expired)}))
    with renewing(path, expired.session.id):
        change_logins(path, lambda now: replace(now, current=""))
        with pytest.raises(LoginsBusyError, match="locked for"):
            fresh(expired)
        # Until it has expired, it is used.
        assert fresh(expired, lambda: 0.0) is expired
    assert len(issuer.forms("refresh_token")) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id_token": None, "access_token": None}, "has neither id_token nor access_token"),
        ({"id_token": "a\nb"}, "no text of printable characters"),
        ({"id_token": "a" * 70_000}, "id_token of 70000 letters; allowed: 65536"),
    ],
)
def test_a_new_refresh_token_is_kept_whatever_comes_with_it(
    path: Path, issuer: DeviceIssuer, changes: dict[str, Any], why: str
) -> None:
    expired = kept(path, issuer)
    issuer.changes = changes
    with pytest.raises(LoginError, match=why):
        fresh(expired)
    session = read_logins(path).by_name["lab"].access.session
    assert session is not None
    assert session.refresh_token == issuer.current != "refresh"
    issuer.changes = {}
    assert fresh(expired).token != expired.token


@pytest.mark.parametrize("given", ["a\nb", "a" * 70_000, 7])
def test_a_refresh_token_that_cannot_be_kept_is_refused(
    path: Path, issuer: DeviceIssuer, given: object
) -> None:
    expired = kept(path, issuer)
    issuer.changes = {"refresh_token": given}
    with pytest.raises(LoginError, match="gave a refresh_token"):
        fresh(expired)
    assert read_logins(path).by_name["lab"].access == expired


def test_a_null_is_no_refresh_token() -> None:
    document = {"id_token": "a.b.c", "refresh_token": None}
    assert tokens_in(Answer(status=200, document=document)).refresh_token == ""


def test_ctrl_c_keeps_the_refresh_token_that_is_under_way(path: Path, issuer: DeviceIssuer) -> None:
    expired = kept(path, issuer)
    issuer.before_refresh = _thread.interrupt_main
    with pytest.raises(KeyboardInterrupt):
        fresh(expired)
    access = read_logins(path).by_name["lab"].access
    assert access.token != expired.token
    assert access.session is not None
    assert access.session.refresh_token == issuer.current != "refresh"


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_a_token_holds_as_long_as_it_says_whatever_the_clock_shows(
    path: Path, issuer: DeviceIssuer, ahead_s: float
) -> None:
    """From its iat to its exp, which is an hour here."""
    expired = kept(path, issuer)
    here_s = time.time() + ahead_s
    issuer.changes = {"id_token": issuer.token(iat=time.time())}
    now = fresh(expired, lambda: here_s, refused=expired.token)
    assert len(issuer.forms("refresh_token")) == 1
    assert fresh(now, lambda: here_s + 3500.0) is now
    assert read_logins(path).by_name["lab"].access == now
    fresh(now, lambda: here_s + 3595.0)
    assert len(issuer.forms("refresh_token")) == 2


def test_a_token_that_the_controller_refused_is_renewed_once(
    path: Path, issuer: DeviceIssuer
) -> None:
    expired = kept(path, issuer)
    now = fresh(expired)
    assert fresh(now, refused=now.token).token != now.token
    # Another command has renewed it by then.
    assert fresh(now, refused=now.token).token == read_logins(path).by_name["lab"].access.token
    assert len(issuer.forms("refresh_token")) == 2


def test_a_lock_goes_with_its_session(path: Path, issuer: DeviceIssuer) -> None:
    fresh(kept(path, issuer))
    assert path.with_name("logins.yaml.s.lock").exists()
    change_logins(path, lambda now: replace(now, by_name={}))
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "logins.yaml",
        "logins.yaml.lock",
    ]


def test_a_file_system_without_locks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(AccessError, match=r"lock cannot be locked: No locks available; have it in"):
        change_logins(path, lambda now: now)


def test_an_issuer_that_nobody_is_at_may_be_there_later(path: Path, issuer: DeviceIssuer) -> None:
    expired = kept(path, issuer)
    assert expired.session is not None
    away = replace(expired.session.client, issuer=f"http://127.0.0.1:{free_port()}")
    shown = replace(expired, session=replace(expired.session, client=away))
    login = Login(address="127.0.0.1:7070", access=shown)
    write_logins(path, Logins(current="lab", by_name={"lab": login}))
    with pytest.raises(IssuerUnavailableError, match=r"cannot be renewed now: .*refused"):
        fresh(shown)
    assert read_logins(path).by_name["lab"].access == shown
    # Until it has expired, it is used.
    assert fresh(shown, lambda: 0.0) is shown


def test_an_issuer_on_this_machine_is_asked_without_a_proxy(
    issuer: DeviceIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Web().endpoints(issuer.url).token == f"{issuer.url}/token"


def test_an_issuer_that_sends_headers_for_ever_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "WHOLE_S", 0.2)
    over = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not over.wait(0.01):
                connection.sendall(b"X")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(IssuerUnavailableError, match=r"does not answer: nothing within 0.2 s"):
            Web().endpoints(url)
        over.set()
        thread.join(30)


def test_an_issuers_certificate_is_verified(tmp_path: Path) -> None:
    authority, folder = str(tmp_path / "ca"), str(tmp_path / "tls")
    assert outlast("certs", "init", authority).returncode == 0
    assert outlast("certs", "issue", authority, folder, "--host", "a.example").returncode == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls" / "tls.crt", tmp_path / "tls" / "tls.key")
    encrypted = DeviceIssuer()
    encrypted.server.socket = context.wrap_socket(encrypted.server.socket, server_side=True)
    url = encrypted.url.replace("http:", "https:")
    encrypted.discovery.update(issuer=url, token_endpoint=url, device_authorization_endpoint=url)
    try:
        with pytest.raises(LoginError, match=r"is not trusted: .*; --oidc-ca takes the authority"):
            Web().endpoints(url)
        ca = (tmp_path / "ca" / "ca.crt").read_text()
        assert Web(ca).endpoints(url).token == url
    finally:
        encrypted.close()
