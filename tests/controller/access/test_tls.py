"""Encryption and certificates: who is believed, and that new certificates are taken up."""

from __future__ import annotations

import asyncio
import datetime
import re
import shutil
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from cryptography import x509

from controller import join_token
from controller.access.audit import Audit
from controller.access.authority import Subject, issue, make_authority, show
from controller.access.callers import caller_of
from controller.access.roles import RULES, Caller, Role
from controller.access.tls import ServerTls, TlsError
from outlast.access import CERTIFICATE_FILE, Access, AccessError, read_tls_dir
from outlast.channel import HEADER, bearer, open_aio_channel
from outlast.client import Client, RefusedError, UnavailableError
from outlast.v1 import access_pb2
from outlast.v1.access_pb2_grpc import AccessStub
from outlast.v1.agents_pb2_grpc import AgentsStub
from tests.controller.access.certificates import authority, client, server, tokens_file
from tests.controller.edge.test_admission import answer, hello
from tests.controller.fakes import Lab, lab

Scenario = Callable[[Lab], Awaitable[None]]
NOON = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def run(tmp_path: Path, scenario: Scenario, **access: object) -> None:
    async def whole() -> None:
        async with lab(tmp_path / "state", **access) as bench:
            await scenario(bench)

    asyncio.run(whole())


async def who_am_i(address: str, access: Access) -> str:
    """The caller as the controller knows him, or how he is refused."""
    async with open_aio_channel(address, access, _OPTIONS) as channel:
        shown = ((HEADER, bearer(access.token)),) if access.token else ()
        try:
            asked = access_pb2.WhoAmIRequest()
            me = await AccessStub(channel).WhoAmI(asked, metadata=shown, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return f"{me.name} {me.role}"


async def join(bench: Lab, access: Access, node: str) -> str:
    """What an agent hears that has the join token, or how it is refused."""
    async with open_aio_channel(bench.running.grpc, access, _OPTIONS) as channel:
        shown = join_token.metadata(bench.token_file)
        return await answer(AgentsStub(channel).Session(metadata=shown), hello(node_id=node))


def test_with_tls_only_who_trusts_its_authority_talks_to_the_controller(tmp_path: Path) -> None:
    ca, other = authority(tmp_path / "ca"), authority(tmp_path / "other")
    folder = server(ca, tmp_path / "tls")
    given = tokens_file(tmp_path / "tokens.yaml")

    async def scenario(bench: Lab) -> None:
        trusted = read_tls_dir(folder).ca
        address = bench.running.grpc
        token = given["sam"]
        assert await who_am_i(address, Access(ca=trusted, token=token)) == "sam submitter"
        assert await who_am_i(address, Access(ca=trusted)) == "UNAUTHENTICATED"
        # In clear text, and to a controller that somebody else plays.
        assert await who_am_i(address, Access()) == "UNAVAILABLE"
        foreign = Access(ca=(other / "ca.crt").read_text(), token=token)
        assert await who_am_i(address, foreign) == "UNAVAILABLE"
        # A name that the certificate does not have.
        elsewhere = f"127.0.0.2:{address.rpartition(':')[2]}"
        assert await who_am_i(elsewhere, Access(ca=trusted, token=token)) == "UNAVAILABLE"
        assert await join(bench, Access(ca=trusted), "n0") == "welcome"

    run(tmp_path, scenario, tls_dir=folder, tokens_file=tmp_path / "tokens.yaml")


def test_http_is_encrypted_too_and_clear_text_is_not_answered(tmp_path: Path) -> None:
    folder = server(authority(tmp_path / "ca"), tmp_path / "tls")

    async def scenario(bench: Lab) -> None:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # As OpenSSL 3 and Python 3.13 check it.
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        async with httpx.AsyncClient(verify=context) as asked:
            answer = await asked.get(f"https://{bench.running.http}/healthz")
            assert answer.json()["ok"]
            assert (await asked.get(f"https://{bench.running.http}/api/v1/jobs")).json()
            with pytest.raises(httpx.HTTPError):
                await asked.get(f"http://{bench.running.http}/healthz")

    run(tmp_path, scenario, tls_dir=folder)


def test_with_client_certificates_each_is_who_his_certificate_names(tmp_path: Path) -> None:
    ca, other = authority(tmp_path / "ca"), authority(tmp_path / "other")
    folder = server(ca, tmp_path / "tls")
    olga = client(ca, tmp_path / "olga", "olga", "operator")
    foreign = client(other, tmp_path / "foreign", "olga", "admin")
    old = client(ca, tmp_path / "old", "olga", "operator", LONG_AGO)
    node = client(ca, tmp_path / "node", "n0", "node")
    unknown = client(ca, tmp_path / "unknown", "bob", "emperor")

    async def scenario(bench: Lab) -> None:
        address = bench.running.grpc
        assert await who_am_i(address, olga) == "olga operator"
        assert await who_am_i(address, Access(ca=olga.ca)) == "UNAVAILABLE"
        as_olga = Access(ca=olga.ca, certificate=foreign.certificate, key=foreign.key)
        assert await who_am_i(address, as_olga) == "UNAVAILABLE"
        assert await who_am_i(address, old) == "UNAVAILABLE"
        assert await who_am_i(address, node) == "PERMISSION_DENIED"
        assert await who_am_i(address, unknown) == "UNAUTHENTICATED"
        whys = [each.why for each in Audit(tmp_path / "state").read()]
        assert "no token was shown, and the certificate has expired or is of no caller" in whys
        # The controller's own certificate is nobody's role.
        assert await who_am_i(address, read_tls_dir(folder)) in ("UNAVAILABLE", "UNAUTHENTICATED")

    run(tmp_path, scenario, tls_dir=folder, client_certificates=True)


def test_a_node_speaks_for_the_node_of_its_certificate_only(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    folder = server(ca, tmp_path / "tls")
    node = client(ca, tmp_path / "node", "n0", "node")
    admin = client(ca, tmp_path / "admin", "adam", "admin")

    async def scenario(bench: Lab) -> None:
        address = bench.running.grpc
        assert await join(bench, node, "n0") == "welcome"
        stolen = await join(bench, node, "n1")
        assert stolen.startswith("PERMISSION_DENIED: the certificate is that of node n0, not of n1")
        (entry,) = Audit(tmp_path / "state").read()
        assert (entry.caller, entry.role, entry.outcome) == ("n0", "node", "PERMISSION_DENIED")
        as_node = await join(bench, admin, "n0")
        assert "this takes the certificate of a node, and that of adam was shown" in as_node
        for method, rule in RULES.items():
            if rule.role is None:
                continue
            async with open_aio_channel(address, node, _OPTIONS) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method

    run(tmp_path, scenario, tls_dir=folder, client_certificates=True)


def test_a_new_certificate_is_shown_at_once_and_half_of_one_is_not(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    folder = server(ca, tmp_path / "tls")

    async def shown(address: str) -> int:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(found).serial_number

    def serial() -> int:
        return x509.load_pem_x509_certificate(
            (folder / CERTIFICATE_FILE).read_bytes()
        ).serial_number

    async def scenario(bench: Lab) -> None:
        running = bench.running
        first = serial()
        assert await shown(running.http) == first
        trusted = Access(ca=read_tls_dir(folder).ca)
        server(ca, folder)
        second = serial()
        assert second != first
        assert await who_am_i(running.grpc, trusted) == " admin"
        assert await shown(running.http) == second
        # The pair does not fit: what was there before goes on.
        issue(ca, Subject(name="x", hosts=("localhost",)), 1, tmp_path / "half")
        shutil.copy(tmp_path / "half" / "tls.key", folder / "tls.key")
        assert await who_am_i(running.grpc, trusted) == " admin"
        assert await shown(running.http) == second

    run(tmp_path, scenario, tls_dir=folder)


def test_the_client_of_python_shows_token_and_certificate(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    folder = server(ca, tmp_path / "tls")
    given = tokens_file(tmp_path / "tokens.yaml")
    trusted = read_tls_dir(folder).ca

    def work(address: str) -> None:
        with Client(address, access=Access(ca=trusted, token=given["olga"])) as known:
            assert known.who_am_i().name == "olga"
            assert known.list() == ()
            with pytest.raises(RefusedError, match="this takes admin"):
                known.audit()
        why = "nobody is named; log in with `outlast login"
        nobody = Client(address, access=Access(ca=trusted))
        with nobody, pytest.raises(RefusedError, match=why):
            nobody.list()
        with Client(address, access=Access()) as plain, pytest.raises(UnavailableError):
            plain.list()

    async def scenario(bench: Lab) -> None:
        await asyncio.to_thread(work, bench.running.grpc)

    run(tmp_path, scenario, tls_dir=folder, tokens_file=tmp_path / "tokens.yaml")


def test_a_token_does_not_travel_through_a_network_in_clear_text() -> None:
    with pytest.raises(AccessError, match="is not sent in clear text; log in with --ca"):
        Client("10.0.0.1:7070", access=Access(token="outlast_x"))


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    folder = server(ca, tmp_path / "tls")
    with pytest.raises(TlsError, match=re.escape("it must have tls.crt, tls.key, ca.crt")):
        ServerTls(tmp_path)
    shutil.copy(server(ca, tmp_path / "b") / "tls.key", folder / "tls.key")
    with pytest.raises(TlsError, match=r"tls\.crt and tls\.key cannot be used together"):
        ServerTls(folder)


def test_an_authority_is_not_made_twice_and_its_certificates_say_whom_they_name(
    tmp_path: Path,
) -> None:
    ca = authority(tmp_path / "ca")
    before = (ca / "ca.key").read_bytes()
    with pytest.raises(AccessError, match="is there already"):
        make_authority(ca, "again", 10)
    assert (ca / "ca.key").read_bytes() == before
    assert (ca / "ca.key").stat().st_mode & 0o777 == 0o600
    folder = server(ca, tmp_path / "tls", "ctl.example", "10.0.0.5")
    subject = show(folder).subject
    assert subject.hosts == ("ctl.example", "10.0.0.5", "localhost", "127.0.0.1", "::1")
    client(ca, tmp_path / "node", "n0", "node")
    assert show(tmp_path / "node").subject == Subject(name="n0", role="node")


def test_a_certificate_names_nobody_before_it_holds_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "olga"
    client(authority(tmp_path / "ca"), folder, "olga", "operator", NOON)
    text = (folder / CERTIFICATE_FILE).read_bytes()
    day = datetime.timedelta(days=1)
    assert caller_of(text, NOON) == Caller(name="olga", role=Role.OPERATOR)
    assert caller_of(text, NOON + 9 * day) is not None
    assert caller_of(text, NOON + 11 * day) is None
    assert caller_of(text, NOON - day) is None


@pytest.mark.parametrize("parts", [(), ("x" * 60, "y" * 60)])
def test_the_page_works_wherever_the_state_is(tmp_path: Path, parts: tuple[str, ...]) -> None:
    state = tmp_path.joinpath(*parts, "state")

    async def whole() -> None:
        # One that was killed leaves its socket.
        for _ in range(2):
            async with lab(state) as bench, httpx.AsyncClient() as asked:
                answer = await asked.get(f"http://{bench.running.http}/api/v1/jobs")
                assert answer.status_code == 200
            state.joinpath("grpc.socket").touch()

    asyncio.run(whole())


def test_an_authority_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = server(authority(tmp_path / "ca"), tmp_path / "tls")
    (folder / "ca.crt").write_text("no certificate")
    with pytest.raises(TlsError, match=r"ca\.crt is no certificate"):
        ServerTls(folder)
