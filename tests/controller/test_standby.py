"""The HTTP port of a controller that waits for another one."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from controller import app
from controller.addresses import bind_http, name_of
from controller.assembly import Controller, assemble
from controller.options import Options
from controller.store.lease import Lease
from controller.web.standby import Standby
from outlast.ports import free_ports
from tests.controller import processes
from tests.controller.access.certificates import authority, server, tokens_file
from tests.controller.fakes import lab
from tests.controller.probes import ask, probe
from tests.controller.processes import controller, refusal, wait_for


@contextmanager
def waiting(first: processes.Controller, *arguments: str) -> Iterator[processes.Controller]:
    """A second controller on the same state directory, which waits; it is stopped afterwards."""
    second = processes.Controller(first.state_dir, *arguments, "--wait")

    def start() -> None:
        # It was stopped before it led.
        with suppress(AssertionError):
            second.start()

    starting = threading.Thread(target=start)
    starting.start()
    try:
        wait_for(lambda: "controller waits: " in first.stderr.read_text(), "it to wait")
        yield second
    finally:
        assert second.process is not None
        second.process.terminate()
        starting.join()
        assert second.process.wait(60) == 0


def free_address() -> str:
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


class Prober:
    """A liveness probe, as a kubelet asks it, without its pauses."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.phases: list[str] = []
        """What was answered, without repetitions."""
        self.failures: list[str] = []
        """What did not answer, not even a second connection."""

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._is_done.is_set():
            try:
                status, document = probe(self._address, "/healthz")
            except OSError:
                try:
                    status, document = probe(self._address, "/healthz")
                except OSError as error:
                    self.failures.append(str(error))
                    continue
            if status != 200:
                self.failures.append(str(document))
            (phase,) = document.keys() - {"ok"}
            if self.phases[-1:] != [phase]:
                self.phases.append(phase)


def test_one_that_waits_lives_is_not_ready_and_leads_without_a_gap(tmp_path: Path) -> None:
    address = free_address()
    with controller(tmp_path / "state") as first, waiting(first, "--http", address) as second:
        holder = f"another controller (pid {first.pid}, {first.grpc})"
        status, document = probe(address, "/healthz")
        assert (status, document.keys()) == (200, {"ok", "waits"})
        assert holder in document["waits"]
        assert "stop it first" not in document["waits"]
        status, document = probe(address, "/readyz")
        assert (status, document["ok"]) == (503, False)
        assert document["reason"].startswith("waits: ")
        assert holder in document["reason"]
        for path in ("/", "/api/v1/jobs", "/sd/agents"):
            status, body = ask(address, path)
            assert (status, json.loads(body)["error"]["reason"]) == (503, "NOT_LEADING")
            assert holder in json.loads(body)["error"]["message"]
        assert leads(address) == 0.0
        assert "outlast_controller_term" not in ask(address, "/metrics")[1]
        assert leads(first.http) == 1.0
        assert probe(first.http, "/readyz") == (200, {"ok": True, "term": 1})

        with Prober(address) as prober:
            first.kill()
            wait_for(lambda: is_ready(address), "it leads")
            wait_for(lambda: second.file().get("pid") == second.pid, "it has begun")
            wait_for(lambda: prober.phases[-1:] == ["term"], "it is probed")
        assert prober.failures == []
        assert prober.phases in (["waits", "term"], ["waits", "starts", "term"])
        assert second.http == address
        assert probe(address, "/healthz") == (200, {"ok": True, "term": 2})
        assert leads(address) == 1.0
        assert ask(address, "/api/v1/jobs")[0] == 200


def is_ready(address: str, tls: ssl.SSLContext | None = None) -> bool:
    """Whether callers may be sent there, as a load balancer asks again and again."""
    try:
        return probe(address, "/readyz", tls=tls)[0] == 200
    # The one that waited closes a connection on which nothing was asked yet.
    except ConnectionError:
        return False


def leads(address: str) -> float:
    for line in ask(address, "/metrics")[1].splitlines():
        name, _, value = line.rpartition(" ")
        if name == "outlast_controller_leads":
            return float(value)
    raise AssertionError("there is no such metric")


def test_one_that_waits_is_as_encrypted_as_one_that_leads(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    tokens_file(tmp_path / "tokens.yaml")
    access = ("--tls-dir", str(server(ca, tmp_path / "tls")))
    access += ("--tokens-file", str(tmp_path / "tokens.yaml"))
    trusted = ssl.create_default_context(cafile=str(ca / "ca.crt"))
    address = free_address()
    with (
        controller(tmp_path / "state", *access) as first,
        waiting(first, "--http", address, *access),
    ):
        assert probe(address, "/healthz", tls=trusted)[0] == 200
        assert probe(address, "/readyz", tls=trusted)[0] == 503
        with pytest.raises(ConnectionError):
            probe(address, "/healthz")
        # Nothing is here that a token would be asked for.
        assert ask(address, "/api/v1/jobs", tls=trusted)[0] == 503
        first.kill()
        wait_for(lambda: is_ready(address, trusted), "it leads")
        wait_for(lambda: ask(address, "/api/v1/jobs", tls=trusted)[0] == 401, "it asks who calls")


def test_what_cannot_be_served_is_refused_before_it_waits(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    with controller(tmp_path / "state") as first:
        line = refusal(first.state_dir, "--wait", "--tls-dir", str(tmp_path / "tls"))
        assert "tls.crt" in line
        # An address of no machine (RFC 5737).
        line = refusal(first.state_dir, "--wait", "--http", "192.0.2.1:7071")
        assert "cannot listen on 192.0.2.1:7071" in line
        assert "--http" in line
        assert probe(first.http, "/readyz")[0] == 200


def test_one_whose_port_is_the_leaders_waits_and_takes_it_over(tmp_path: Path) -> None:
    """The same command twice on one machine: agents and users have one address."""
    address = free_address()
    with (
        controller(tmp_path / "state", "--http", address) as first,
        waiting(first, "--http", address) as second,
    ):
        said = first.stderr.read_text()
        assert f"cannot listen on {address}" in said
        assert "no probe is answered until this controller leads" in said
        assert probe(address, "/healthz") == (200, {"ok": True, "term": 1})
        first.kill()
        wait_for(lambda: second.file().get("pid") == second.pid, "it leads")
        assert probe(address, "/healthz") == (200, {"ok": True, "term": 2})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_while_it_waits_gives_its_port_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    address = free_address()
    with controller(tmp_path / "state") as first:
        with waiting(first, "--http", address) as second:
            assert probe(address, "/healthz")[0] == 200
            assert second.process is not None
            second.process.send_signal(number)
            assert second.process.wait(60) == 0
            bind_http(address).close()
        assert probe(first.http, "/readyz") == (200, {"ok": True, "term": 1})


def test_controller_that_stops_is_not_ready_and_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Controller] = []

    def assembled(options: Options, lease: Lease) -> Controller:
        made.append(assemble(options, lease))
        return made[-1]

    monkeypatch.setattr(app, "assemble", assembled)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            made[0].parts.service.is_leaving = True
            lives = await asyncio.to_thread(probe, bench.running.http, "/healthz")
            ready = await asyncio.to_thread(probe, bench.running.http, "/readyz")
            assert lives == (200, {"ok": True, "term": 1})
            assert ready == (503, {"ok": False, "reason": "stops: it was asked to"})

    asyncio.run(scenario())


def test_probes_are_answered_while_the_controllers_own_thread_is_busy() -> None:
    """This thread has no loop at all: it stands for one that reads a large journal."""
    with bind_http("127.0.0.1:0") as listening:
        address = name_of(listening)
        standby = Standby(listening, tls=None, is_open=False)
        try:
            wait_for(lambda: probe(address, "/healthz")[0] == 200, "it answers")
            standby.waits_for("x: another one")
            assert probe(address, "/healthz") == (
                200,
                {"ok": True, "waits": "x: another one"},
            )
            standby.takes_over()
            assert probe(address, "/readyz") == (
                503,
                {"ok": False, "reason": "starts: it reads the journal"},
            )
            assert ask(address, "/api/v1/jobs")[0] == 503
        finally:
            standby.close()
        # Who connects now waits for the full server, and is not refused.
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
