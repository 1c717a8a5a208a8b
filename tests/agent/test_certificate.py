"""An agent that gets its certificate by itself, from a real controller."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from controller.agent.certificate import NodeCertificate, Way
from controller.agent.config import AgentConfig
from controller.join_token import JoinTokenError
from outlast.access import Access, AccessError
from outlast.client import Client
from tests.agent.harness import AgentProcess
from tests.cli.running import outlast
from tests.controller.access.certificates import authority, client, server
from tests.controller.fakes import Lab, lab
from tests.controller.processes import Controller, controller, wait_for

DAY_S = 24 * 3600.0


class Place:
    """The folders of a controller that signs for nodes, and of the agent of n0."""

    def __init__(self, tmp_path: Path) -> None:
        self.tls = server(authority(tmp_path / "ca"), tmp_path / "tls")
        self.node_ca = authority(tmp_path / "node-ca")
        self.state = tmp_path / "state"
        # What an agent is given: no key of anybody's.
        self.trusted = tmp_path / "trusted"
        self.trusted.mkdir()
        shutil.copy(self.tls / "ca.crt", self.trusted)
        self.token = tmp_path / "node" / "join-token"
        self.token.parent.mkdir()
        self.own = tmp_path / "node" / "state" / "certificate"

    def certificate(
        self, now: Callable[[], float] = time.time, **changes: object
    ) -> NodeCertificate:
        shown = {"join_token_file": self.token, "tls_dir": self.trusted}
        given = {"node": "n0", **shown, **changes}
        config = AgentConfig(
            controller="127.0.0.1:1",
            state_dir=self.own.parent,
            memory_dir=self.own.parent,
            data_dir=self.own.parent,
            workers=1,
            **given,  # type: ignore[arg-type]  # as the test has them
        )
        return NodeCertificate(config, wall_clock=now)

    @property
    def serial(self) -> int:
        found = x509.load_pem_x509_certificate((self.own / "tls.crt").read_bytes())
        return found.serial_number


Scenario = Callable[[Lab], Awaitable[None]]


def run(place: Place, scenario: Scenario, *, signs: bool = True) -> None:
    async def whole() -> None:
        node_ca = place.node_ca if signs else None
        token = place.state.parent / "join-token"
        async with lab(
            place.state, tls_dir=place.tls, node_ca=node_ca, join_token_file=token
        ) as bench:
            shutil.copy(token, place.token)
            await scenario(bench)

    asyncio.run(whole())


def is_certified(way: Way, grpc_address: str) -> bool:
    """Whether it has a certificate, and goes to the port for those, without the join token."""
    shows = bool(way.access.certificate)
    assert shows is (way.address != grpc_address) is (way.metadata == ())
    return shows


def test_a_node_enrols_once_and_keeps_its_certificate_for_the_next_start(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def scenario(bench: Lab) -> None:
        address = bench.running.grpc
        agent = place.certificate()
        way = await agent.way(address)
        assert is_certified(way, address)
        assert (place.own / "tls.key").stat().st_mode & 0o777 == 0o600
        assert place.own.stat().st_mode & 0o777 == 0o700
        serial = place.serial
        assert await agent.way(address) == way
        # Nor is it got anew where the controller was away and is there again.
        again = place.certificate()
        again.has_failed()
        assert await again.way(address) == way
        assert place.serial == serial
        # The join token is not needed any more.
        place.token.unlink()
        assert await place.certificate().way(address) == way
        assert await place.certificate(join_token_file=None).way(address) == way
        assert place.serial == serial

    run(place, scenario)


def test_a_node_whose_certificate_leads_nowhere_asks_for_another_with_its_key(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)

    async def first(bench: Lab) -> None:
        await place.certificate().way(bench.running.grpc)

    run(place, first)
    serial, key = place.serial, (place.own / "tls.key").read_bytes()

    async def second(bench: Lab) -> None:
        """On other ports."""
        agent = place.certificate()
        before = await agent.way(bench.running.grpc)
        agent.has_failed()
        after = await agent.way(bench.running.grpc)
        assert after.address != before.address
        # One that answers is not asked for another.
        agent.has_worked()
        assert place.serial != serial
        assert (place.own / "tls.key").read_bytes() == key
        # It is not asked for again at each try.
        serial_then = place.serial
        agent.has_failed()
        assert await agent.way(bench.running.grpc) == after
        assert place.serial == serial_then

    run(place, second)


def test_a_controller_that_signs_nothing_is_talked_to_with_the_join_token(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def granted(bench: Lab) -> None:
        await place.certificate().way(bench.running.grpc)

    async def declined(bench: Lab) -> None:
        address = bench.running.grpc
        agent = place.certificate()
        agent.has_failed()
        assert not is_certified(await agent.way(address), address)
        assert not is_certified(await agent.way(address), address)

    run(place, declined, signs=False)
    # That it signs none is asked again once it was away: it may have been started anew.
    agent = place.certificate()

    async def declines(bench: Lab) -> None:
        assert not is_certified(await agent.way(bench.running.grpc), bench.running.grpc)

    async def signs(bench: Lab) -> None:
        agent.has_failed()
        assert is_certified(await agent.way(bench.running.grpc), bench.running.grpc)

    run(place, declines, signs=False)
    run(place, signs)
    # One that did so before.
    run(place, granted)
    run(place, declined, signs=False)


def test_an_agent_that_has_a_certificate_by_hand_or_encrypts_nothing_asks_for_none(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    by_hand = client(tmp_path / "ca", tmp_path / "by-hand", "n0", "node")

    async def scenario(bench: Lab) -> None:
        address = bench.running.grpc
        way = await place.certificate(tls_dir=tmp_path / "by-hand").way(address)
        assert (way.address, way.access) == (address, by_hand)
        assert way.metadata
        assert (await place.certificate(tls_dir=None).way(address)).access == Access()
        for name in ("n" * 65, "a b"):
            assert not is_certified(await place.certificate(node=name).way(address), address)
        assert not (place.own / "tls.crt").exists()
        shutil.rmtree(place.own)
        local = place.certificate(controller_file=tmp_path / "controller.json")
        assert not is_certified(await local.way(address), address)
        assert not place.own.exists()

    run(place, scenario)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def scenario(bench: Lab) -> None:
        address = bench.running.grpc
        right = place.token.read_text()
        place.token.write_text("w" * 32)
        with pytest.raises(grpc.aio.AioRpcError, match="the join token is wrong"):
            await place.certificate().way(address)
        place.token.unlink()
        with pytest.raises(JoinTokenError, match="cannot be read"):
            await place.certificate().way(address)
        place.token.write_text(right)
        with pytest.raises(grpc.aio.AioRpcError):
            await place.certificate().way("127.0.0.1:1")
        assert is_certified(await place.certificate().way(address), address)
        # A certificate that is no longer there is replaced; a key is not made anew unasked.
        (place.own / "tls.crt").write_text("nonsense")
        assert is_certified(await place.certificate().way(address), address)
        (place.own / "tls.key").write_text("nonsense")
        with pytest.raises(AccessError, match=r"tls\.key has no key: .*; delete it for a new one"):
            await place.certificate().way(address)
        (place.own / "tls.key").unlink()
        with pytest.raises(grpc.aio.AioRpcError, match="`outlast nodes rejoin n0`"):
            await place.certificate().way(address)

    run(place, scenario)


def test_a_certificate_that_expires_is_renewed_in_time_without_the_join_token(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    ahead_s = 0.0

    async def scenario(bench: Lab) -> None:
        nonlocal ahead_s
        address = bench.running.grpc
        agent = place.certificate(lambda: time.time() + ahead_s)
        await agent.way(address)
        place.token.unlink()
        serial = place.serial
        for part, is_renewed in ((0.6, False), (0.75, True)):
            ahead_s = part * DAY_S
            keeping = asyncio.create_task(agent.run(lambda: address))
            try:
                async with asyncio.timeout(60 if is_renewed else 1):
                    while place.serial == serial:
                        await asyncio.sleep(0.05)
            except TimeoutError:
                assert not is_renewed
            finally:
                keeping.cancel()
            assert (place.serial != serial) is is_renewed
        assert is_certified(await agent.way(address), address)

    run(place, scenario)


@contextmanager
def agent_process(
    folder: Path, memory: Path, it: Controller, *extra: str
) -> Iterator[AgentProcess]:
    port = int(it.grpc.rpartition(":")[2])
    agent = AgentProcess(folder, memory, port, *extra)
    try:
        yield agent
    finally:
        agent.close()


def test_a_real_agent_joins_renews_and_cannot_be_replaced_by_one_with_its_token(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    # 36 seconds: it renews after 24.
    options = ["--tls-dir", str(place.tls), "--node-ca", str(place.node_ca)]
    options += ["--node-cert-hours", "0.01", "--join-token-file", str(place.token)]
    encrypted = ["--tls-dir", str(place.trusted)]
    joining = [*encrypted, "--join-token-file", str(place.token)]
    folder, memory = place.own.parents[1], tmp_path / "memory"
    trusted = Access(ca=(place.tls / "ca.crt").read_text())
    program = ("outlast.cli.main", "controller")
    with (
        controller(place.state, *options, program=program) as it,
        Client(it.grpc, access=trusted) as asked,
    ):

        def is_there() -> bool:
            return any(each.node_id == "n0" and each.connected for each in asked.nodes())

        with agent_process(folder, memory, it, *joining):
            wait_for(is_there, "n0 to join")
            serial = place.serial
            with agent_process(tmp_path / "thief", tmp_path / "thiefs", it, *joining) as thief:
                assert thief.process.wait(60) == 2
            assert "node n0 has a certificate for another key" in thief.log.read_text()
            wait_for(lambda: place.serial != serial, "its renewal")
            assert is_there()
        wait_for(lambda: not is_there(), "its end")
        with agent_process(folder, memory, it, *encrypted):
            wait_for(is_there, "its return without the join token")
        wait_for(lambda: not is_there(), "its end")
        done = outlast("nodes", "rejoin", "n0", "--state-dir", str(place.state))
        assert (done.returncode, done.stdout) == (0, "n0 may get another certificate\n")
        with agent_process(tmp_path / "rebuilt", memory, it, *joining):
            wait_for(is_there, "n0 to join with another key")
