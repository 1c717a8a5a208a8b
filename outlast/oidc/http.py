"""Requests to OpenID Connect issuers: with deadlines, bounded, and where the URL says only."""

from __future__ import annotations

import http.client
import json
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import IO, Any
from urllib.parse import urlencode

from outlast.oidc.issuer import (
    Answer,
    Endpoints,
    IssuerUnavailableError,
    LoginError,
    Request,
    discovery_url,
    endpoints_in,
    shown,
)

DEADLINE_S = 10.0
# Of all of a request: names that nobody resolves and headers that come byte by byte are in no
# timeout of a socket.
WHOLE_S = 20.0
_MAX_BYTES = 1 << 20


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is asked for is where the issuer says, and not where somebody on the way does."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        """None of them."""


def opener(context: ssl.SSLContext) -> urllib.request.OpenerDirector:
    """Opens URLs of an issuer."""
    # http:// is for this machine only; a proxy would read it, and answer from elsewhere.
    proxies = {name: url for name, url in urllib.request.getproxies().items() if name != "http"}
    return urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPSHandler(context=context),
        NoRedirects(),
    )


def read(answer: IO[bytes], url: str) -> bytes:
    """All of an answer, which may come byte by byte.

    Raises:
        ValueError: it is too much, or takes too long.
    """
    until_s = time.monotonic() + DEADLINE_S
    parts: list[bytes] = []
    read_some = getattr(answer, "read1", answer.read)
    while part := read_some(_MAX_BYTES):
        parts.append(part)
        if sum(map(len, parts)) > _MAX_BYTES or time.monotonic() > until_s:
            raise ValueError(f"{url} has too much, or takes longer than {DEADLINE_S:g} s")
    return b"".join(parts)


class Web:
    """Asks one issuer."""

    def __init__(self, ca: str = "") -> None:
        """`ca`: PEM of the authority behind its certificate; empty: those of the system.

        Raises:
            LoginError: it is no certificate.
        """
        try:
            context = ssl.create_default_context(cadata=ca or None)
        except (ssl.SSLError, TypeError, ValueError) as error:
            raise LoginError(f"the issuer's --oidc-ca has no certificate (PEM): {error}") from error
        self._opener = opener(context)

    def endpoints(self, issuer: str) -> Endpoints:
        """What the issuer's discovery document says.

        Raises:
            LoginError: it is not there, or wrong.
            IssuerUnavailableError: nobody answers.
        """
        url = discovery_url(issuer)
        answer = self._send(urllib.request.Request(url))
        if answer.is_busy:
            raise IssuerUnavailableError(f"{url} answered with status {answer.status}; try again")
        if answer.status != 200:
            raise LoginError(
                f"there is no OpenID Connect issuer at {issuer}: {url} answered with status "
                f"{answer.status}"
            )
        return endpoints_in(answer.document, issuer)

    def post(self, request: Request, *, may_be_empty: bool = False) -> Answer:
        """Send a form; `may_be_empty`: whether an answer needs no document to be a good one.

        Raises:
            LoginError: what answers is no such endpoint.
            IssuerUnavailableError: nobody answers.
        """
        headers = {"Accept": "application/json", **request.headers}
        data = urlencode(request.form).encode()
        sent = urllib.request.Request(request.url, data=data, headers=headers)
        return self._send(sent, may_be_empty=may_be_empty)

    def _send(self, request: urllib.request.Request, *, may_be_empty: bool = False) -> Answer:
        url = request.full_url
        try:
            status, body = self._in_time(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            if isinstance(why, ssl.SSLCertVerificationError):
                raise LoginError(
                    f"the certificate of {url} is not trusted: {why.verify_message}; --oidc-ca "
                    "takes the authority of an issuer of your own"
                ) from error
            raise IssuerUnavailableError(
                f"{url} does not answer: {shown(why) or type(why).__name__}"
            ) from error
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            if status == 200 and not may_be_empty:
                raise LoginError(f"{url} answered with what is no JSON object")
            document = {}
        return Answer(status=status, document=document)

    def _in_time(self, request: urllib.request.Request) -> tuple[int, bytes]:
        """In a thread, as Ctrl-C does not end a look-up of a name."""
        came: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()

        def exchange() -> None:
            try:
                came.put(self._exchanged(request))
            except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
                came.put(error)

        threading.Thread(target=exchange, name="issuer", daemon=True).start()
        try:
            found = came.get(timeout=WHOLE_S)
        except queue.Empty:
            raise TimeoutError(f"nothing within {WHOLE_S:g} s") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _exchanged(self, request: urllib.request.Request) -> tuple[int, bytes]:
        url = request.full_url
        try:
            with self._opener.open(request, timeout=DEADLINE_S) as answer:
                return answer.status, read(answer, url)
        except urllib.error.HTTPError as error:
            # Refusals are answers, too.
            with error:
                return error.code, read(error, url)
