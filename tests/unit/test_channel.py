"""Which of several controllers a client talks to."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from outlast import channel as channels
from outlast.access import Access, Login, Logins, logins_file, of, write_logins
from outlast.addresses import addresses_of
from outlast.channel import Bearer, open_channel
from outlast.cli.connect import connector
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.client import UnavailableError
from outlast.oidc.issuer import LoginError
from outlast.ports import free_port
from outlast.v1 import access_pb2
from outlast.v1.access_pb2_grpc import AccessServicer, AccessStub, add_AccessServicer_to_server


class Answering(AccessServicer):
    """Says who it is."""

    def WhoAmI(  # the name of the method in the protocol
        self, request: access_pb2.WhoAmIRequest, context: object
    ) -> access_pb2.WhoAmIResponse:
        """Its own name in place of the caller's."""
        return access_pb2.WhoAmIResponse(name="leader")


@pytest.fixture
def leader() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    add_AccessServicer_to_server(Answering(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def frozen() -> Iterator[str]:
    """Its kernel takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def answer_at(addresses: str) -> str:
    with open_channel(addresses, Access()) as channel:
        return str(AccessStub(channel).WhoAmI(access_pb2.WhoAmIRequest(), timeout=30).name)


def test_controller_that_waits_is_passed_over_at_once(
    leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not listen. To wait for it would take longer than the test may."""
    monkeypatch.setattr(channels, "_READY_S", 3600.0)
    assert answer_at(f"127.0.0.1:{free_port()},{leader}") == "leader"
    assert answer_at(f"{leader},127.0.0.1:{free_port()}") == "leader"


def test_controller_that_is_frozen_is_passed_over_after_a_moment(
    leader: str, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_READY_S", 0.2)
    assert answer_at(f"{frozen}, {leader},") == "leader"


def test_nobody_answers_where_all_are_away() -> None:
    with pytest.raises(grpc.RpcError) as error:
        answer_at(f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("text", "found"),
    [("a:1", ("a:1",)), ("a:1, b:2", ("a:1", "b:2")), ("a:1,", ("a:1",)), ("", ("",))],
)
def test_addresses_are_what_stands_between_commas(text: str, found: tuple[str, ...]) -> None:
    assert addresses_of(text) == found


def test_login_to_one_of_several_controllers_is_that_of_all() -> None:
    """They show the same certificate, and read the same tokens."""
    access = Access(ca="an authority", token="secret")
    logins = Logins(current="a", by_name={"a": Login(address="a:1", access=access)})
    assert logins.by_address("b:2,a:1") == access
    assert logins.by_address("b:2") == Access()


def test_a_token_is_read_again_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    bearer = Bearer(of("h:1", {"OUTLAST_TOKEN_FILE": str(path), "XDG_CONFIG_HOME": str(tmp_path)}))
    assert bearer.token() == "one"
    path.write_text("two\n")
    assert bearer.token() == "two"
    # The file is empty or missing while another program replaces it.
    for content in ("", None):
        path.unlink() if content is None else path.write_text(content)
        assert bearer.token() == "two"


def test_a_token_that_is_replaced_while_a_stream_is_open_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_LOOK_S", 0.01)
    path = tmp_path / "token"
    path.write_text("one")
    bearer = Bearer(Access(token="one", token_file=str(path)))
    shown: queue.SimpleQueue[str] = queue.SimpleQueue()
    with bearer.shown_again(lambda: shown.put(bearer.token())):
        path.write_text("two")
        assert shown.get(timeout=30) == "two"
        path.write_text("three")
        assert shown.get(timeout=30) == "three"
    assert shown.empty()


def test_who_ends_while_a_token_is_renewed_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer may have the next refresh token; and a closed channel takes no call."""
    monkeypatch.setattr(channels, "_LOOK_S", 0.01)
    path = tmp_path / "token"
    path.write_text("one")
    began, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def renew(access: Access, *, refused: str = "") -> Access:
        if access.token == "two":
            began.set()
            may_end.wait(30)
            done.append("renewed")
        return access

    monkeypatch.setattr(channels, "fresh", renew)
    bearer = Bearer(Access(token="one", token_file=str(path)))
    with bearer.shown_again(lambda: done.append("shown")):
        path.write_text("two")
        assert began.wait(30)
        threading.Timer(0.1, may_end.set).start()
        # As a program does that leaves a stream where it is.
        bearer.close()
        assert done == ["renewed"]


def test_a_login_that_is_over_is_not_asked_about_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_LOOK_S", 0.01)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def renew(access: Access, *, refused: str = "") -> Access:
        if access.token == "two":
            asked.put(access.token)
            raise LoginError("it is over")
        return access

    monkeypatch.setattr(channels, "fresh", renew)
    path = tmp_path / "token"
    path.write_text("one")
    bearer = Bearer(Access(token="one", token_file=str(path)))
    before = set(threading.enumerate())
    with bearer.shown_again(lambda: None):
        (thread,) = set(threading.enumerate()) - before
        path.write_text("two")
        thread.join(30)
        assert not thread.is_alive()
        assert asked.qsize() == 1


def test_who_follows_a_job_stays_with_the_login_that_was_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    by_name = {name: Login(address=f"{name}:1", access=Access()) for name in ("a", "b")}
    write_logins(logins_file(), Logins(current="a", by_name=by_name))
    connect = connector("", DEFAULT_STATE_DIR)
    write_logins(logins_file(), Logins(current="b", by_name=by_name))
    with connect() as client:
        assert client.address == "a:1"
    write_logins(logins_file(), Logins(current="b", by_name={"b": by_name["b"]}))
    with pytest.raises(UnavailableError, match="the login 'a' is not kept any more"):
        connect()
