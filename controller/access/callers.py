"""Who calls: known by a token, or by the certificate that the connection was made with."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from controller.access import tokens
from controller.access.issuers import Issuer
from controller.access.oidc import Issuers
from controller.access.roles import NODE, ROLES, Caller
from controller.ratelimit import RateLimitedLog
from outlast.channel import SCHEME
from outlast.errors import FatalError
from outlast.oidc.issuer import expiry_of

logger = logging.getLogger(__name__)

# The organisation in the subject of a client's certificate is its role, as with Kubernetes' groups.
ORGANIZATION = "outlast:"
# What is said of a token that is none of these.
UNKNOWN_TOKEN = "the token is not known, or has expired"
# Callers of issuers whose newest tokens are remembered; of more, those whose tokens hold.
_MOST_RENEWED = 10_000
_DOTS_OF_JWT = 2


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Callers:
    """All whom a controller knows."""

    def __init__(
        self,
        tokens_file: Path | None = None,
        *,
        certificates: bool = False,
        node_certificates: bool = False,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        """`certificates`: the server lets only those connect who show one of its authority.
        `node_certificates`: a port of its own does that, for nodes.

        Raises:
            FatalError: the file cannot be used.
        """
        self._path = tokens_file
        self.certificates = certificates
        self.node_certificates = node_certificates
        self._now = now
        self._log = RateLimitedLog(logger)
        self._stamp: tuple[int, int, int, int] | None = None
        self._known = tokens.Known()
        # By name, until when the newest token holds that each caller of an issuer has shown.
        self._renewed: dict[str, tuple[float, Caller]] = {}
        if tokens_file is not None:
            self._known = tokens.read(tokens_file)
            self._stamp = _stamp_of(tokens_file)
        self._issuers = Issuers(self._known.issuers)
        self._issuers.wait()

    @property
    def has_tokens(self) -> bool:
        """Whether there is a file of tokens."""
        return self._path is not None

    @property
    def are_asked(self) -> bool:
        """Whether callers must say who they are."""
        return self.has_tokens or self.certificates

    @property
    def are_nodes_asked(self) -> bool:
        """Whether a node can show a certificate, or must show more than that it is called so."""
        return self.are_asked or self.are_certificates_taken

    @property
    def are_certificates_taken(self) -> bool:
        """Whether there is a port for which certificates are asked."""
        return self.certificates or self.node_certificates

    def login_issuers(self) -> tuple[Issuer, ...]:
        """Those that a caller without a token may ask for one with `outlast login`."""
        self._refresh()
        return tuple(each for each in self._known.issuers if each.client_id is not None)

    def by_token(self, token: str) -> Caller | None:
        """Whose token this is; None when it is nobody's, or not any more."""
        self._refresh()
        found = tokens.find(token, self._known.entries, self._now().date())
        if found is not None:
            return found.caller
        caller = self._issuers.by_token(token, {entry.name for entry in self._known.entries})
        if caller is not None:
            self._note_renewed(caller, expiry_of(token) or 0.0)
        return caller

    def by_newer_token(self, caller: Caller, header: str) -> Caller | None:
        """A caller who has shown an issuer's token, by another one since; None when none holds."""
        self._refresh()
        if header.count(".") != _DOTS_OF_JWT:
            # Of the file, or none: its owner may be called like somebody whom an issuer knows.
            return None
        until_s, found = self._renewed.get(caller.name, (0.0, caller))
        return found if until_s > self._now().timestamp() else None

    def by_header(self, value: str) -> Caller | None:
        """Whose token a header `authorization` brings."""
        return self.by_token(value.removeprefix(SCHEME)) if value.startswith(SCHEME) else None

    def by_certificate(self, context: Mapping[str, object]) -> Caller | None:
        """Whose certificate a connection was made with, by gRPC's `auth_context`."""
        found = context.get("x509_pem_cert")
        if not isinstance(found, list) or not self.shows_certificate(context):
            return None
        caller = caller_of(found[0], self._now())
        if caller is not None and caller.role is not None and not self.certificates:
            # Callers of other roles show tokens, as `--tokens-file` asks for.
            return None
        return caller

    def shows_certificate(self, context: Mapping[str, object]) -> bool:
        """Whether a certificate that counts was shown, by gRPC's `auth_context`."""
        return self.are_certificates_taken and bool(context.get("x509_pem_cert"))

    def _note_renewed(self, caller: Caller, until_s: float) -> None:
        if until_s >= self._renewed.get(caller.name, (0.0, caller))[0]:
            self._renewed[caller.name] = (until_s, caller)
        if len(self._renewed) > _MOST_RENEWED:
            now_s = self._now().timestamp()
            self._renewed = {
                name: known for name, known in self._renewed.items() if known[0] > now_s
            }

    def _refresh(self) -> None:
        """Read the file anew once it has changed; what was known stays while it is wrong."""
        if self._path is None or (stamp := _stamp_of(self._path)) == self._stamp:
            return
        # A wrong file is read once, not at each call; one that was put right has another stamp.
        self._stamp = stamp
        try:
            known = tokens.read(self._path)
            if known.issuers != self._issuers.issuers:
                self._issuers = Issuers(known.issuers, self._issuers)
                self._renewed.clear()
            self._known = known
        except FatalError as error:
            if isinstance(error.__cause__, OSError):
                # What a disk or network failed to read may be readable without a change of it.
                self._stamp = None
            self._log.warning(("file",), "tokens stay as they were: %s", error)


def caller_of(certificate: bytes, now: datetime.datetime) -> Caller | None:
    """The one whom a certificate (PEM) names; None when it says no role of ours, or holds no more:
    a connection may last longer than what it was made with.
    """
    # Only a controller that asks for certificates needs it.
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    found = x509.load_pem_x509_certificate(certificate)
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        return None
    subject = found.subject
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    groups = subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if len(names) != 1 or len(groups) != 1:
        return None
    name, group = str(names[0].value), str(groups[0].value)
    role = group.removeprefix(ORGANIZATION)
    if not name or not group.startswith(ORGANIZATION):
        return None
    if role == NODE:
        return Caller(name=name, role=None)
    return Caller(name=name, role=ROLES[role]) if role in ROLES else None


def _stamp_of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
