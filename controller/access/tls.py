"""The controller's certificate, for gRPC and HTTP, which is read anew once its files change.

A folder as cert-manager fills it: tls.crt, tls.key, and ca.crt of the authority whose certificates
are believed. A pair that does not fit together, as while it is being replaced, is left alone.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from controller.ratelimit import RateLimitedLog
from outlast.access import CA_FILE, CERTIFICATE_FILE, KEY_FILE, AccessError, read_text
from outlast.errors import FatalError

logger = logging.getLogger(__name__)

_FILES = (CERTIFICATE_FILE, KEY_FILE, CA_FILE)


class TlsError(FatalError):
    """The folder does not have a certificate that can be used."""


class ServerTls:
    """What a controller proves by who it is."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        TlsError: its files are missing, or do not fit together.
        """
        self._folder = folder
        self._log = RateLimitedLog(logger)
        # gRPC asks in threads of its own, HTTP in the event loop.
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._texts = self._read()
        self._present = _context(folder)
        self._http = _context(folder)
        self._http.sni_callback = self._choose

    @property
    def ca(self) -> str:
        """The authority's certificate, which clients need."""
        return self._texts[CA_FILE]

    def grpc_credentials(
        self, *, client_certificates: bool, node_authority: str = ""
    ) -> grpc.ServerCredentials:
        """For a port of gRPC's; with certificates, nobody connects without one of the authority,
        or of `node_authority` (PEM)."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            self.refresh()
            return grpc.ssl_server_certificate_configuration(
                [(self._texts[KEY_FILE].encode(), self._texts[CERTIFICATE_FILE].encode())],
                root_certificates=f"{self._texts[CA_FILE]}\n{node_authority}".encode(),
            )

        return _dynamic(configuration(), configuration, client_certificates)

    def http_context(self) -> ssl.SSLContext:
        """For HTTP's socket; each handshake takes the certificate that is there then."""
        return self._http

    def refresh(self) -> None:
        """Take up files that have changed; what was read stays while they are wrong."""
        with self._lock:
            stamps = self._look()
            if stamps == self._stamps:
                return
            try:
                self._present, self._texts = _context(self._folder), self._read()
            except TlsError as error:
                self._log.warning(("tls",), "the certificate stays as it was: %s", error)
                return
            self._stamps = stamps
        logger.info("certificate read anew: %s", self._folder / CERTIFICATE_FILE)

    def _choose(self, line: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        self.refresh()
        line.context = self._present

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_stamp_of(self._folder / name) for name in _FILES)

    def _read(self) -> dict[str, str]:
        try:
            return {name: read_text(self._folder / name) for name in _FILES}
        except AccessError as error:
            raise TlsError(
                f"--tls-dir {self._folder}: {error}; it must have {', '.join(_FILES)}, which "
                "`outlast certs issue` writes"
            ) from error


# grpc-stubs lacks this one.
def _dynamic(
    first: grpc.ServerCertificateConfiguration,
    fetch: Callable[[], grpc.ServerCertificateConfiguration],
    client_certificates: bool,
) -> grpc.ServerCredentials:
    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=client_certificates
    )


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsError(
            f"--tls-dir {folder}: {CERTIFICATE_FILE} and {KEY_FILE} cannot be used together: {why}"
        ) from error
    try:
        context.load_verify_locations(folder / CA_FILE)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"--tls-dir {folder}: {CA_FILE} is no certificate: {error}") from error
    return context


def _stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
