"""Nodes that get certificates from a controller, over gRPC."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controller import join_token
from controller.access.audit import Audit
from controller.access.authority import make_authority
from controller.access.roles import RULES
from controller.options import Options
from outlast.access import Access, AccessError
from outlast.channel import HEADER, bearer, open_aio_channel
from outlast.v1 import code_pb2, enrollment_pb2, nodes_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub
from outlast.v1.code_pb2_grpc import CodeStub
from outlast.v1.enrollment_pb2_grpc import EnrollmentStub
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.access.certificates import authority, client, server, tokens_file
from tests.controller.edge.test_admission import answer, hello
from tests.controller.fakes import Lab, lab

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
PEM = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def request(
    key: Key, name: str, organization: str = "", extension: x509.ExtensionType | None = None
) -> str:
    """A signing request, made without any of the product's code."""
    names = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if organization:
        names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    if extension is not None:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


@dataclass(slots=True)
class Fleet:
    """A controller that signs for nodes, and what is needed to call it."""

    bench: Lab
    ca: str
    state: Path
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def token(self) -> tuple[tuple[str, str], ...]:
        return join_token.metadata(self.bench.token_file)

    async def enroll(
        self,
        node: str,
        signing_request: str,
        *,
        access: Access | None = None,
        token: tuple[tuple[str, str], ...] | None = None,
    ) -> Access | str:
        """What the node shows from then on, or how it is refused; by default by the join token."""
        address = self.bench.running.grpc if access is None else self.node_address
        shown = self.token if token is None and access is None else token or ()
        asked = enrollment_pb2.EnrollRequest(node_id=node, signing_request=signing_request)
        async with open_aio_channel(address, access or Access(ca=self.ca), OPTIONS) as channel:
            try:
                found = await EnrollmentStub(channel).Enroll(asked, metadata=shown, timeout=10)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        self.ports["node"] = found.port
        # Access takes a key with it; `with_key` has the right one.
        return Access(ca=self.ca, certificate=found.certificate, key="none yet")

    async def joined(self, node: str, key: ec.EllipticCurvePrivateKey) -> Access:
        """A node that has enrolled with the join token."""
        return with_key(await self.enroll(node, request(key, node)), key)

    @property
    def node_address(self) -> str:
        return f"127.0.0.1:{self.ports['node']}"

    async def session(self, node: str, access: Access | None = None) -> str:
        """What an agent hears: with its certificate, or with the join token alone."""
        address = self.bench.running.grpc if access is None else self.node_address
        shown = self.token if access is None else ()
        async with open_aio_channel(address, access or Access(ca=self.ca), OPTIONS) as channel:
            call = AgentsStub(channel).Session(metadata=shown)
            return await answer(call, hello(node_id=node, incarnation=f"{node}-{id(call)}"))

    async def code(self, access: Access) -> grpc.StatusCode:
        """What comes of asking for code that is not there."""
        asked = code_pb2.GetCodeRequest(digest=f"sha256:{'0' * 64}")
        async with open_aio_channel(self.node_address, access, OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await CodeStub(channel).GetCode(asked, timeout=10).read()
        return caught.value.code()

    async def rejoin(self, node: str) -> None:
        async with open_aio_channel(
            self.bench.running.grpc, Access(ca=self.ca), OPTIONS
        ) as channel:
            await NodesStub(channel).RejoinNode(nodes_pb2.RejoinNodeRequest(node_id=node))

    def audited(self) -> list[tuple[str, str, str, str]]:
        """Newest first: caller, call, node, outcome."""
        entries = Audit(self.state).read()
        return [(each.caller, each.call, each.about, each.outcome) for each in entries]


def with_key(access: Access | str, key: ec.EllipticCurvePrivateKey) -> Access:
    assert isinstance(access, Access), access
    text = key.private_bytes(*PEM).decode()
    return Access(ca=access.ca, certificate=access.certificate, key=text)


Scenario = Callable[[Fleet], Awaitable[None]]


def run(tmp_path: Path, *scenarios: Scenario, hours: float = 24.0, **more: object) -> None:
    """Each with a controller of its own, on the same state directory."""
    folder = server(authority(tmp_path / "ca"), tmp_path / "tls")
    authority(tmp_path / "node-ca")
    ca, state = (folder / "ca.crt").read_text(), tmp_path / "state"

    async def whole() -> None:
        for scenario in scenarios:
            async with lab(
                state,
                tls_dir=folder,
                node_ca=tmp_path / "node-ca",
                node_certificate_hours=hours,
                **more,  # type: ignore[arg-type]  # as the test has them
            ) as bench:
                await scenario(Fleet(bench, ca, state))

    asyncio.run(whole())


def test_a_node_that_joins_gets_a_certificate_that_is_good_for_its_name_only(
    tmp_path: Path,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        key = new_key()
        own = await fleet.joined("n0", key)
        made = x509.load_pem_x509_certificate(own.certificate.encode())
        signer = x509.load_pem_x509_certificate((tmp_path / "node-ca" / "ca.crt").read_bytes())
        made.verify_directly_issued_by(signer)
        assert made.subject.rfc4514_string() == "O=outlast:node,CN=n0"
        assert made.public_key() == key.public_key()
        assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        purposes = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
        lasts = made.not_valid_after_utc - made.not_valid_before_utc
        assert lasts.total_seconds() == 24 * 3600 + 300
        # Without the join token, which was good for this once.
        assert await fleet.session("n0", own) == "welcome"
        # So it fetches code.
        assert await fleet.code(own) is grpc.StatusCode.NOT_FOUND
        stolen = await fleet.session("n1", own)
        assert stolen == ("PERMISSION_DENIED: the certificate is that of node n0, not of n1")
        assert ("", "Enrollment/Enroll", "n0", "OK") in fleet.audited()

    run(tmp_path, scenario)


def test_a_join_token_that_is_replayed_takes_over_no_node(tmp_path: Path) -> None:
    keys = [new_key(), new_key()]
    why = "PERMISSION_DENIED: node n0 has a certificate"

    async def replayed(fleet: Fleet) -> None:
        refused = await fleet.enroll("n0", request(keys[1], "n0"))
        assert str(refused).startswith(why)
        assert fleet.audited()[0] == ("", "Enrollment/Enroll", "n0", "PERMISSION_DENIED")
        assert (await fleet.session("n0")).startswith(f"{why}, and the join token alone was shown")
        assert fleet.audited()[0] == ("", "Agents/Session", "n0", "PERMISSION_DENIED")

    async def first(fleet: Fleet) -> None:
        await fleet.joined("n0", keys[0])
        # The answer was lost.
        await fleet.joined("n0", keys[0])
        await replayed(fleet)
        # Those that have no certificate join as before.
        assert await fleet.session("n1") == "welcome"

    # It is durable: a controller that takes over knows it.
    run(tmp_path, first, replayed)


def test_only_a_request_for_the_nodes_own_name_is_signed(tmp_path: Path) -> None:
    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    key = new_key()
    good = request(key, "n0")
    other_kind = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    lines = good.splitlines()
    forged = x509.load_pem_x509_csr(good.encode()).public_bytes(Encoding.DER)
    spoilt = x509.load_der_x509_csr(forged[:-1] + bytes([forged[-1] ^ 1]))

    async def scenario(fleet: Fleet) -> None:
        for node, text, why in (
            ("n0", request(key, "n1"), "is for 'CN=n1'; allowed: 'CN=n0'"),
            ("n0", request(key, "n0", "outlast:admin"), "is for 'O=outlast:admin,CN=n0'"),
            ("n0", request(key, "n0", extension=is_ca), "asks for 1 extension(s); allowed: none"),
            ("n0", request(other_kind, "n0"), "has a key of another kind; allowed: of the curve"),
            ("n0", spoilt.public_bytes(Encoding.PEM).decode(), "is not signed by its own key"),
            ("n0", "\n".join(lines[:2] + lines[3:]), "is no PKCS#10 request in PEM"),
            ("n0", "", "is no PKCS#10 request in PEM"),
            ("n0", "x" * 9000, "has 9000 bytes; allowed: 8192"),
            ("", request(key, "n0"), "node_id: the name is ''"),
            ("a/b", request(key, "a/b"), "node_id: the name is 'a/b'"),
        ):
            refused = str(await fleet.enroll(node, text))
            assert refused.startswith("INVALID_ARGUMENT"), refused
            assert why in refused
            assert fleet.audited()[0][1:] == ("Enrollment/Enroll", node, "INVALID_ARGUMENT")
        # None of them has taken the name.
        await fleet.joined("n0", new_key())

    run(tmp_path, scenario)


def test_who_has_not_the_join_token_gets_no_certificate(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        text = request(new_key(), "n0")
        missing = await fleet.enroll("n0", text, token=(("x-other", "1"),))
        assert str(missing).startswith("UNAUTHENTICATED: the join token is missing")
        wrong = await fleet.enroll("n0", text, token=((HEADER, bearer("w" * 32)),))
        assert str(wrong).startswith("UNAUTHENTICATED: the join token is wrong")
        assert fleet.audited()[0] == ("", "Enrollment/Enroll", "", "UNAUTHENTICATED")

    run(tmp_path, scenario)


def test_a_certificate_is_renewed_by_the_node_that_has_it_without_the_token(
    tmp_path: Path,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        key, other = new_key(), new_key()
        own = await fleet.joined("n0", key)
        renewed = with_key(await fleet.enroll("n0", request(key, "n0"), access=own), key)
        assert renewed.certificate != own.certificate
        assert await fleet.session("n0", renewed) == "welcome"
        assert fleet.audited()[0] == ("n0", "Enrollment/Enroll", "n0", "OK")
        # Each is a line of the audit log.
        again = str(await fleet.enroll("n0", request(key, "n0"), access=renewed))
        assert again.startswith("RESOURCE_EXHAUSTED: node n0 has renewed its certificate within")
        for node, with_, why in (
            ("n1", key, "the certificate is that of node n0, not of n1"),
            ("n0", other, "renews the certificate of another key than it shows"),
        ):
            refused = str(await fleet.enroll(node, request(with_, node), access=own))
            assert refused.startswith("PERMISSION_DENIED")
            assert why in refused
            assert fleet.audited()[0] == ("n0", "Enrollment/Enroll", node, "PERMISSION_DENIED")

    run(tmp_path, scenario)


def test_an_operator_lets_a_node_join_again_and_its_old_key_is_refused_then(
    tmp_path: Path,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        key, other = new_key(), new_key()
        own = await fleet.joined("n0", key)
        await fleet.rejoin("n0")
        assert fleet.audited()[0][1:] == ("Nodes/RejoinNode", "n0", "OK")
        refused = str(await fleet.enroll("n0", request(key, "n0"), access=own))
        assert "the certificate of node n0 is not on record" in refused
        new = await fleet.joined("n0", other)
        assert await fleet.session("n0", new) == "welcome"
        assert "has a certificate for another key" in await fleet.session("n0", own)
        assert await fleet.code(own) is grpc.StatusCode.PERMISSION_DENIED
        renewal = str(await fleet.enroll("n0", request(key, "n0"), access=own))
        assert "has enrolled with another key since" in renewal
        with pytest.raises(grpc.aio.AioRpcError, match="there is no certificate 'n7'"):
            await fleet.rejoin("n7")

    run(tmp_path, scenario)


def test_a_certificate_that_has_expired_lets_nobody_in_and_keeps_nobody_out(
    tmp_path: Path,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        own = await fleet.joined("n0", new_key())
        other = new_key()
        assert str(await fleet.enroll("n0", request(other, "n0"))).startswith("PERMISSION_DENIED")
        found: list[Access | str] = []

        async def is_free() -> bool:
            found.append(await fleet.enroll("n0", request(other, "n0")))
            return isinstance(found[-1], Access)

        async with asyncio.timeout(60):
            while not await is_free():
                await asyncio.sleep(0.1)
        assert (await fleet.session("n0", own)).startswith("UNAVAILABLE")
        assert await fleet.session("n0", with_key(found[-1], other)) == "welcome"

    # 7.2 seconds.
    run(tmp_path, scenario, hours=0.002)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_node_with_a_certificate_makes_the_calls_of_nodes_only(
    tmp_path: Path, has_tokens: bool
) -> None:
    file = tmp_path / "tokens.yaml"
    given = tokens_file(file)

    async def scenario(fleet: Fleet) -> None:
        own = await fleet.joined("n0", new_key())
        assert await fleet.session("n0", own) == "welcome"
        async with open_aio_channel(fleet.node_address, own, OPTIONS) as channel:
            for method, rule in RULES.items():
                if rule.role is None:
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=10)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
        # People call the other port as before.
        shown = ((HEADER, bearer(given["vera"])),)
        trusted = Access(ca=fleet.ca)
        async with open_aio_channel(fleet.bench.running.grpc, trusted, OPTIONS) as channel:
            asked = nodes_pb2.ListNodesRequest()
            found = await NodesStub(channel).ListNodes(asked, metadata=shown)
        assert [each.node_id for each in found.nodes] == ["n0"]

    run(tmp_path, scenario, tokens_file=file if has_tokens else None)


def test_certificates_issued_by_hand_are_taken_beside_those_that_are_signed(
    tmp_path: Path,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.joined("n0", new_key())
        by_hand = client(tmp_path / "ca", tmp_path / "n1", "n1", "node")
        assert await fleet.session("n1", by_hand) == "welcome"
        stolen = client(tmp_path / "ca", tmp_path / "n0", "n0", "node")
        assert "has a certificate for another key" in await fleet.session("n0", stolen)
        # Those of people are not what this port is for.
        admin = client(tmp_path / "ca", tmp_path / "adam", "adam", "admin")
        assert (await fleet.session("n2", admin)).startswith("PERMISSION_DENIED")
        nobody = await fleet.session("n2", Access(ca=fleet.ca))
        assert nobody.startswith("UNAVAILABLE")

    run(tmp_path, scenario)


def test_a_controller_without_an_authority_says_that_it_signs_nothing(tmp_path: Path) -> None:
    folder = server(authority(tmp_path / "ca"), tmp_path / "tls")
    state = tmp_path / "state"
    token = tmp_path / "token"
    token.write_text("t" * 32)

    async def whole() -> None:
        async with lab(state, tls_dir=folder, join_token_file=token) as bench:
            fleet = Fleet(bench, (folder / "ca.crt").read_text(), state)
            refused = await fleet.enroll("n0", request(new_key(), "n0"))
            assert refused == (
                "FAILED_PRECONDITION: this controller signs no certificates of nodes; it does "
                "with --node-ca DIR"
            )
            assert await fleet.session("n0") == "welcome"

    asyncio.run(whole())


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    for given, why in (
        ({"node_ca": ca}, "goes with --tls-dir"),
        ({"node_grpc": "127.0.0.1:1"}, "--node-grpc goes with --node-ca"),
        ({"node_ca": ca, "tls_dir": ca, "client_certificates": True}, "give --tokens-file"),
        ({"node_ca": ca, "tls_dir": ca, "node_certificate_hours": 0.0}, "allowed: more than 0"),
        ({"node_ca": ca, "tls_dir": ca, "node_grpc": "x"}, "--node-grpc is 'x'"),
        (
            {"node_ca": ca, "tls_dir": ca, "node_grpc": "0.0.0.0:7072"},
            "--node-grpc 0.0.0.0:7072: anyone who reaches it",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            Options(state_dir=tmp_path, **given)  # type: ignore[arg-type]  # as the case has them
    own = Options(state_dir=tmp_path, node_ca=ca, tls_dir=ca)
    assert own.node_address == "127.0.0.1:7072"


def test_an_authority_that_cannot_sign_is_refused_at_the_start(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    folder = server(ca, tmp_path / "tls")
    (authority(tmp_path / "other") / "ca.key").replace(ca / "ca.key")

    async def whole(given: Path) -> None:
        async with lab(tmp_path / "state", tls_dir=folder, node_ca=given):
            pass

    with pytest.raises(AccessError, match=r"is not the key of ca\.crt beside it"):
        asyncio.run(whole(ca))
    with pytest.raises(AccessError, match=r"--node-ca: .*ca\.key cannot be read.*; `outlast certs"):
        asyncio.run(whole(folder))
    own = authority(tmp_path / "own")
    shutil.copytree(own, tmp_path / "same")
    folder = server(own, tmp_path / "own-tls")
    with pytest.raises(AccessError, match="is the authority of --tls-dir"):
        asyncio.run(whole(tmp_path / "same"))
    make_authority(tmp_path / "expired", "test", 0)
    with pytest.raises(AccessError, match=r"--node-ca .*expired: its certificate has expired on"):
        asyncio.run(whole(tmp_path / "expired"))
    leaf = server(own, tmp_path / "leaf")
    (leaf / "tls.crt").replace(leaf / "ca.crt")
    (leaf / "tls.key").replace(leaf / "ca.key")
    with pytest.raises(AccessError, match="is none of an authority"):
        asyncio.run(whole(leaf))
