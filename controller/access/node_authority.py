"""The authority that signs the certificates of nodes while the controller runs.

Nothing of a request is believed but its public key, whose owner has signed it: the name is the one
that was asked for, and the controller says what a certificate is good for.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from controller.access.authority import Subject, certify, load
from controller.access.callers import ORGANIZATION
from controller.access.enrollment import Certified
from controller.access.roles import NODE
from outlast.access import AccessError

MAX_REQUEST_BYTES = 8 * 1024
# What reading a request raises that is none.
_MALFORMED = (
    *(ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm),
    *(x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType),
)


class SigningRequestError(ValueError):
    """A signing request is none that a node may make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A certificate of a node."""

    certificate: str
    """PEM."""
    record: Certified


class NodeAuthority:
    """Signs for nodes with the key in a folder, which is read once."""

    def __init__(self, folder: Path, lasts: datetime.timedelta) -> None:
        """`lasts`: how long a certificate holds.

        Raises:
            AccessError: the folder has no authority that can be used.
        """
        try:
            self._authority = load(folder)
        except AccessError as error:
            raise AccessError(f"--node-ca: {error}; `outlast certs init DIR` makes one") from error
        self._lasts = lasts
        if why := _why_not(self._authority.certificate):
            raise AccessError(f"--node-ca {folder}: its certificate {why}")

    def is_of(self, certificate: str) -> bool:
        """Whether a certificate (PEM) is of this authority's key."""
        found = x509.load_pem_x509_certificate(certificate.encode())
        return found.public_key() == self._authority.certificate.public_key()

    @property
    def ca(self) -> str:
        """What its certificates are checked against, in PEM: with older ones, where the file has
        more than one."""
        return self._authority.text

    def sign(self, node: str, key: ec.EllipticCurvePublicKey, now: datetime.datetime) -> Signed:
        """A certificate for a node, from `now` on."""
        subject = Subject(name=node, role=NODE)
        made = certify(self._authority, subject, key, self._lasts, now)
        until_s = made.not_valid_after_utc.timestamp()
        return Signed(
            certificate=made.public_bytes(Encoding.PEM).decode(),
            record=Certified(key=fingerprint(key), expires_s=until_s),
        )


def _why_not(authority: x509.Certificate) -> str:
    """Why nobody takes what it signs; "" if they do."""
    if authority.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        return f"has expired on {authority.not_valid_after_utc:%Y-%m-%d}"
    try:
        basic = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return "is none of an authority"
    return "" if basic.value.ca else "is none of an authority"


def read_request(node: str, text: str) -> ec.EllipticCurvePublicKey:
    """The key that a node asks a certificate for.

    Raises:
        SigningRequestError: it is no signing request, or asks for more than a node gets.
    """
    if len(text) > MAX_REQUEST_BYTES:
        raise SigningRequestError(f"has {len(text)} bytes; allowed: {MAX_REQUEST_BYTES}")
    try:
        request = x509.load_pem_x509_csr(text.encode())
        is_signed, key = request.is_signature_valid, request.public_key()
        names = [(each.oid, str(each.value)) for each in request.subject]
        num_extensions = len(request.extensions)
    except _MALFORMED as error:
        raise SigningRequestError(f"is no PKCS#10 request in PEM: {error}") from error
    if not is_signed:
        raise SigningRequestError("is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SigningRequestError("has a key of another kind; allowed: of the curve P-256")
    own = (NameOID.COMMON_NAME, node)
    if names not in ([own], [own, (NameOID.ORGANIZATION_NAME, f"{ORGANIZATION}{NODE}")]):
        raise SigningRequestError(
            f"is for {request.subject.rfc4514_string()!r}; allowed: 'CN={node}'"
        )
    if num_extensions:
        raise SigningRequestError(f"asks for {num_extensions} extension(s); allowed: none")
    return key


def shown_by(context: Mapping[str, object]) -> Certified | None:
    """The certificate that a connection was made with, by gRPC's `auth_context`; None: without."""
    found = context.get("x509_pem_cert")
    if not isinstance(found, list) or not found:
        return None
    certificate = x509.load_pem_x509_certificate(found[0])
    expires_s = certificate.not_valid_after_utc.timestamp()
    return Certified(key=fingerprint(certificate.public_key()), expires_s=expires_s)


def fingerprint(key: object) -> str:
    """SHA-256 of a public key as X.509 has it, in hexadecimal."""
    encoded = key.public_bytes(  # type: ignore[attr-defined]  # each kind of key has it
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).hexdigest()
