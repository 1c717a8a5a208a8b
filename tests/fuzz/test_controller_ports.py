"""Both ports of a controller: it answers, refuses or hangs up, and is as large as before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import importlib
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.roles import RULES
from controller.web.api import Api
from controller.web.gateway import Gateway
from controller.web.login import LoginRoutes
from outlast.client import Client
from outlast.v1 import agents_pb2
from tests.controller.processes import Controller, controller
from tests.fuzz.inputs import COUNT, damaged, descriptors, memory_bytes, nested, noise, several

AT_ONCE = 8
# Of allocators that keep what they have had; what grows with the number of inputs is more.
MAX_GROWTH_BYTES = 96 << 20
MAX_GROWN_DESCRIPTORS = 8
# How Python and gRPC's server say that one of our functions has raised.
# What gRPC itself writes of a caller who was gone before he was answered, with its lines.
GONE = re.compile(
    r"^\S+ \S+ ERROR grpc[^\n]*ExecuteBatchError raised in core[^\n]*(\n(?!\d{4}-)[^\n]*)*", re.M
)
BROKEN = re.compile(r"Traceback \(most recent|Unexpected <class|never retrieved")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with controller(tmp_path_factory.mktemp("fuzz") / "state") as found:
        yield found


@pytest.fixture
def unharmed(running: Controller) -> Iterator[Controller]:
    """The controller, which must answer after the test as it did before, and have said nothing
    of a mistake of its own."""
    warm_up(running)
    said = len(running.stderr.read_bytes())
    memory, files = memory_bytes(running.pid), descriptors(running.pid)
    yield running
    with Client(running.grpc) as client:
        client.list()
    assert status_of(running, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    new = GONE.sub("", running.stderr.read_bytes()[said:].decode(errors="replace"))
    assert not BROKEN.search(new), new[-4_000:]
    assert memory_bytes(running.pid) < memory + MAX_GROWTH_BYTES
    deadline_s = time.monotonic() + 30.0
    while descriptors(running.pid) > files + MAX_GROWN_DESCRIPTORS:
        assert time.monotonic() < deadline_s, "connections stay open"
        time.sleep(0.1)


def warm_up(running: Controller) -> None:
    """What a controller allocates once."""
    with Client(running.grpc) as client:
        client.list()
        client.nodes()


def requests() -> dict[str, type[Message]]:
    """The request of each method, by its path."""
    found = {}
    for method in RULES:
        service, name = method.removeprefix("/outlast.v1.").split("/")
        for proto in ("access", "agents", "code", "diagnostics", "incidents", "jobs", "nodes"):
            services = importlib.import_module(f"outlast.v1.{proto}_pb2").DESCRIPTOR
            if (known := services.services_by_name.get(service)) is not None:
                found[method] = GetMessageClass(known.methods_by_name[name].input_type)
    return found


def filled(rng: random.Random, kind: type[Message]) -> Message:
    """A message with values of the right types in some of its fields."""
    message = kind()
    for each in message.DESCRIPTOR.fields:
        if rng.random() < 0.3 or each.message_type is not None:
            continue
        value: Any = {
            each.CPPTYPE_STRING: rng.choice(("", "x", "a/../b", "\x00", "é" * 50, "n0")),
            each.CPPTYPE_BOOL: True,
            each.CPPTYPE_DOUBLE: rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e308)),
        }.get(each.cpp_type, rng.choice((0, 1, 2**31 - 1)))
        if each.type == each.TYPE_BYTES:
            value = noise(rng)
        if each.label == each.LABEL_REPEATED:
            getattr(message, each.name).extend([value] * rng.choice((1, 3)))
        else:
            setattr(message, each.name, value)
    return message


def call(channel: grpc.Channel, method: str, kind: type[Message], rng: random.Random) -> str:
    """The status that a call with a strange request ends with."""
    whole = filled(rng, kind).SerializeToString()
    data = rng.choice((whole, damaged(rng, whole), noise(rng)))
    try:
        # As a stream either side may end at any time; a call of one message is a short stream.
        answers = channel.stream_stream(method)(iter([data]), timeout=rng.choice((0.05, 2.0)))
        for _, _ in zip(answers, range(3), strict=False):
            pass
        answers.cancel()
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]  # every error of a call has one
    return "OK"


def test_grpc_refuses_what_makes_no_sense(unharmed: Controller) -> None:
    kinds = requests()
    ended: set[str] = set()
    with (
        grpc.insecure_channel(unharmed.grpc) as channel,
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        methods = sorted(kinds)
        work = (
            pool.submit(call, channel, method, kinds[method], rng)
            for rng in several()
            for method in [rng.choice(methods)]
        )
        for done in batches(work):
            ended.add(done)
    assert not ended & {"INTERNAL", "DATA_LOSS"}
    # A request that cannot be read at all is gRPC's own to refuse.
    assert ended & {"INVALID_ARGUMENT", "NOT_FOUND", "OK"}


def batches(work: Iterator[concurrent.futures.Future[str]]) -> Iterator[str]:
    """What comes of work, of which only so much is under way."""
    waiting: list[concurrent.futures.Future[str]] = []
    for each in work:
        waiting.append(each)
        if len(waiting) >= 4 * AT_ONCE:
            yield waiting.pop(0).result()
    yield from (each.result() for each in waiting)


def test_an_agents_stream_is_refused_or_heard(unharmed: Controller) -> None:
    hello = agents_pb2.Hello(
        node_id="n0", incarnation="one", address="127.0.0.1", rendezvous_port=4242, workers=1
    )
    with grpc.insecure_channel(unharmed.grpc) as channel:
        for number, rng in enumerate(several(COUNT // 3 + 1, seed=1)):
            hello.incarnation = f"i{number}"
            first = agents_pb2.AgentMessage(hello=hello).SerializeToString()
            messages = [first if rng.random() < 0.6 else damaged(rng, first)]
            for _ in range(rng.randrange(4)):
                name = rng.choice([each.name for each in agents_pb2.AgentMessage.DESCRIPTOR.fields])
                inner = agents_pb2.AgentMessage()
                chosen = getattr(inner, name)
                chosen.CopyFrom(filled(rng, type(chosen)))
                whole = inner.SerializeToString()
                messages.append(rng.choice((whole, damaged(rng, whole))))
            answers = channel.stream_stream("/outlast.v1.Agents/Session")(
                iter(messages), timeout=0.2
            )
            with contextlib.suppress(grpc.RpcError):
                for _, _ in zip(answers, range(3), strict=False):
                    pass
            answers.cancel()


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_bytes_without_a_meaning_end_their_own_connection_only(
    unharmed: Controller, port: str
) -> None:
    host, _, number = str(unharmed.file()[port]).rpartition(":")
    begins = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n",
        b"",
    )
    for rng in several(seed=2):
        with socket.create_connection((host, int(number)), timeout=10) as line:
            data = rng.choice(begins)
            data = rng.choice((data + noise(rng), damaged(rng, data + noise(rng))))
            with contextlib.suppress(OSError):
                line.sendall(data)
                if rng.random() < 0.5:
                    line.shutdown(socket.SHUT_WR)
                line.settimeout(0.01)
                line.recv(4096)


def paths() -> list[tuple[str, str]]:
    """Verb and path of every route of the API."""
    routes = Api(Gateway(), dict, LoginRoutes(Callers(), Audit(Path()))).routes()
    verbs = [(verb, each.path) for each in routes for verb in each.methods or ()]
    return sorted(pair for pair in verbs if pair[0] != "HEAD")


_NAMES = ("points", "limit", "after", "from", "to", "rank", "steps", "most", "first", "x")
_VALUES = ("", "-1", "9" * 30, "a", "%00", "nan", "1e9", "1-2")
_PARTS = ("x", "%00", "..%2f..", "%F0%9F%92%A5", "0")
_HEADERS = (
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json;charset=x"),
    ("Origin", "http://evil.example"),
    ("Cookie", "outlast_token=\x01;;="),
    ("Authorization", "Bearer \xff"),
    ("Accept", "*/*, " * 50),
)


def asked(rng: random.Random, verb: str, path: str) -> tuple[str, bytes | None, dict[str, str]]:
    """A path with its query, a body and headers, something of which is strange."""
    filled_path = re.sub(r"{\w+}", lambda _: rng.choice(_PARTS), path)
    given = [f"{rng.choice(_NAMES)}={rng.choice(_VALUES)}" for _ in range(rng.randrange(3))]
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.3:
        headers.update([rng.choice(_HEADERS)])
    body = None
    if verb == "POST":
        spec = damaged(rng, b'{"spec": {"steps": 3}, "wait_for_nodes": true}')
        text = json.dumps({"text": nested(rng).decode(errors="replace")}).encode()
        body = rng.choice((b"{}", nested(rng), spec, text))
    return f"{filled_path}?{'&'.join(given)}", body, headers


def test_http_never_answers_with_a_mistake_of_its_own(unharmed: Controller) -> None:
    known = paths()
    for rng in several(seed=3):
        verb, path = rng.choice(known)
        where, body, headers = asked(rng, verb, path)
        connection = http.client.HTTPConnection(unharmed.http, timeout=60)
        # Hung up on, or refused by our own client before it was sent.
        with contextlib.suppress(ConnectionError, http.client.HTTPException, ValueError):
            connection.request(verb, where, body=body, headers=headers)
            status = connection.getresponse().status
            assert status != 500, (verb, where, headers, body and body[:200])
        connection.close()


def status_of(running: Controller, request: bytes) -> int:
    host, _, number = running.http.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=10) as line:
        line.sendall(request)
        return int(line.recv(4096).split()[1])
