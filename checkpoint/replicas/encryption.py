"""Encrypted lines between agents, each of which knows whom it calls.

An agent makes a key and a certificate for itself, which nobody signs: the certificate's fingerprint
is part of its token, which other agents have from the controller. So who calls knows that the
other side is the one whose token it has, and who is called asks for the token, encrypted by then.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import socket
import ssl
import tempfile

from outlast.errors import RetryableError

# In a token, before the fingerprint.
_MARK = "."
_YEARS = datetime.timedelta(days=3650)


class WrongAgentError(RetryableError):
    """Who answers at an agent's address is not that agent."""


class Encryption:
    """An agent's own end, for as long as it lives."""

    def __init__(self) -> None:
        # Only agents whose controller encrypts need it.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "agent")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _YEARS)
            .not_valid_after(now + _YEARS)
            .sign(key, hashes.SHA256())
        )
        self._fingerprint = hashlib.sha256(
            certificate.public_bytes(serialization.Encoding.DER)
        ).hexdigest()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        pem = serialization.Encoding.PEM
        whole = certificate.public_bytes(pem) + key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # Python takes a chain from a path only; this file is its owner's, and gone at once.
        with tempfile.NamedTemporaryFile() as file:
            file.write(whole)
            file.flush()
            self._context.load_cert_chain(file.name)

    def token(self, secret: str) -> str:
        """What other agents must have: the secret, and what they know this agent by."""
        return f"{secret}{_MARK}{self._fingerprint}"

    def accepted(self, connection: socket.socket) -> ssl.SSLSocket:
        """A connection, encrypted; the handshake takes as long as the socket's limit.

        Raises:
            OSError: the other side does something else.
        """
        return self._context.wrap_socket(connection, server_side=True)


def dialled(connection: socket.socket, token: str) -> socket.socket:
    """A connection to the agent with a token, encrypted if that agent does so.

    Raises:
        WrongAgentError: another one answers.
        OSError: the other side does something else.
    """
    fingerprint = token.partition(_MARK)[2]
    if not fingerprint:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nobody signs it: it is compared as a whole below.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    line = context.wrap_socket(connection)
    found = hashlib.sha256(line.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, fingerprint):
        line.close()
        raise WrongAgentError("who answers there is another agent")
    return line
