"""A private certificate authority: its own certificate, and those that it signs.

For those who have none: where cert-manager or a company's authority issues certificates, the
folders look the same. Keys are of the curve P-256, signatures ECDSA with SHA-256.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
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
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controller.access.callers import ORGANIZATION
from controller.access.enrollment import BACKDATED_S
from outlast import private
from outlast.access import CA_FILE, CERTIFICATE_FILE, KEY_FILE, AccessError, read_text

CA_KEY_FILE = "ca.key"
# Under these a controller on the same machine is called.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whom a certificate names."""

    name: str
    role: str = ""
    """Of a client: a role of callers, or `node`; "" for a controller."""
    hosts: tuple[str, ...] = ()
    """Of a controller: the names and addresses that it is called by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a certificate says."""

    subject: Subject
    until: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """One that can sign."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    text: str
    """Its certificate in PEM, as the file has it."""


def make_authority(folder: Path, name: str, days: int) -> None:
    """Write ca.crt and ca.key into a folder.

    Raises:
        AccessError: it has them already, or cannot be written.
    """
    for file in (CA_FILE, CA_KEY_FILE):
        if (folder / file).exists():
            raise AccessError(
                f"{folder / file} is there already; nobody would accept what it has signed "
                "under another authority"
            )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(Subject(name=name))
    usage = _key_usage(signs_certificates=True)
    built = (
        _builder(subject, subject, key.public_key(), datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(_own_id(key.public_key()), critical=False)
    )
    certificate = built.sign(key, hashes.SHA256())
    _write(folder, {CA_KEY_FILE: _pem(key), CA_FILE: certificate.public_bytes(Encoding.PEM)})


def issue(
    authority: Path,
    subject: Subject,
    days: int,
    into: Path,
    *,
    now: datetime.datetime | None = None,
) -> datetime.datetime:
    """Write tls.crt, tls.key and ca.crt for a subject into a folder; until when they hold.

    They hold from `now` on, by default the present.

    Raises:
        AccessError: the authority cannot be used, or the folder not be written.
    """
    loaded = load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    lasts = datetime.timedelta(days=days)
    certificate = certify(loaded, subject, key.public_key(), lasts, now)
    files = {
        KEY_FILE: _pem(key),
        CERTIFICATE_FILE: certificate.public_bytes(Encoding.PEM),
        CA_FILE: loaded.text.encode(),
    }
    _write(into, files)
    return certificate.not_valid_after_utc


def load(folder: Path) -> Authority:
    """The authority that `make_authority` wrote into a folder.

    Raises:
        AccessError: it cannot be used.
    """
    text = read_text(folder / CA_FILE)
    key_text = read_text(folder / CA_KEY_FILE)
    try:
        certificate = x509.load_pem_x509_certificate(text.encode())
        key = load_pem_private_key(key_text.encode(), password=None)
    except (ValueError, TypeError) as error:
        raise AccessError(f"{folder} has no authority of ours: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AccessError(f"{folder / CA_KEY_FILE} is no key of an elliptic curve")
    if key.public_key() != certificate.public_key():
        raise AccessError(f"{folder / CA_KEY_FILE} is not the key of {CA_FILE} beside it")
    return Authority(certificate=certificate, key=key, text=text)


def certify(
    authority: Authority,
    subject: Subject,
    key: ec.EllipticCurvePublicKey,
    lasts: datetime.timedelta,
    now: datetime.datetime | None = None,
) -> x509.Certificate:
    """A certificate for a subject with this key, from `now` on, by default the present."""
    ca = authority.certificate
    # Nobody takes one that holds longer than the authority's own.
    until = min((now or datetime.datetime.now(datetime.UTC)) + lasts, ca.not_valid_after_utc)
    builder = (
        _builder(_name(subject), ca.subject, key, lasts, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_purpose(subject)]), critical=False)
        .add_extension(_issuer_id(ca), critical=False)
    )
    if subject.hosts:
        builder = builder.add_extension(_alternatives(subject.hosts), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def show(folder: Path) -> Shown:
    """What the certificate in a folder says.

    Raises:
        AccessError: there is none.
    """
    path = folder / CERTIFICATE_FILE
    path = path if path.exists() else folder / CA_FILE
    try:
        found = x509.load_pem_x509_certificate(read_text(path).encode())
    except ValueError as error:
        raise AccessError(f"{path} is no certificate: {error}") from error
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = tuple(str(each.value) for each in names)
    except x509.ExtensionNotFound:
        hosts = ()
    role = _first(found, NameOID.ORGANIZATION_NAME).removeprefix(ORGANIZATION)
    subject = Subject(name=_first(found, NameOID.COMMON_NAME), role=role, hosts=hosts)
    return Shown(subject=subject, until=found.not_valid_after_utc)


def _first(certificate: x509.Certificate, kind: x509.ObjectIdentifier) -> str:
    found = certificate.subject.get_attributes_for_oid(kind)
    return str(found[0].value) if found else ""


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lasts: datetime.timedelta,
    now: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = now or datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=BACKDATED_S))
        .not_valid_after(until or now + lasts)
    )


def _name(subject: Subject) -> x509.Name:
    names = [x509.NameAttribute(NameOID.COMMON_NAME, subject.name)]
    if subject.role:
        group = f"{ORGANIZATION}{subject.role}"
        names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(names)


def _purpose(subject: Subject) -> x509.ObjectIdentifier:
    return ExtendedKeyUsageOID.CLIENT_AUTH if subject.role else ExtendedKeyUsageOID.SERVER_AUTH


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _own_id(key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key)


def _issuer_id(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key = ca.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _alternatives(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Each file whole; who reads between two of them finds a pair that does not fit, and waits."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in files:
            private.replace_bytes(folder / name, files[name])
    except OSError as error:
        raise AccessError(f"{folder} cannot be written: {error.strerror or error}") from error
