"""The key and the certificate of a node, as its agent makes and reads them."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from controller.access.enrollment import BACKDATED_S
from outlast import private
from outlast.access import AccessError, read_text


def key_in(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a file, of the curve P-256; one is made if the file is not there.

    Raises:
        AccessError: it cannot be read or written, or has something else in it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            made = ec.generate_private_key(ec.SECP256R1())
            form = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
            private.replace_bytes(path, made.private_bytes(*form))
            # Once a certificate is given for it, another key is refused.
            _sync(path)
            _sync(path.parent)
    except OSError as error:
        raise AccessError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        key = load_pem_private_key(read_text(path).encode(), password=None)
    except (ValueError, TypeError) as error:
        raise AccessError(f"{path} has no key: {error}; delete it for a new one") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AccessError(f"{path} has a key of another kind; delete it for a new one")
    return key


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def signing_request(key: ec.EllipticCurvePrivateKey, node: str) -> str:
    """A PKCS#10 request for a certificate of a node, in PEM."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(Encoding.PEM).decode()


def span_of(certificate: str, key: str) -> tuple[float, float]:
    """From when to when a certificate holds, in seconds since 1970.

    Raises:
        ValueError: it is none, or of another key.
    """
    found = x509.load_pem_x509_certificate(certificate.encode())
    own = load_pem_private_key(key.encode(), password=None)
    if found.public_key() != own.public_key():
        raise ValueError("the certificate is of another key")
    begins_s = found.not_valid_before_utc.timestamp() + BACKDATED_S
    return begins_s, found.not_valid_after_utc.timestamp()
