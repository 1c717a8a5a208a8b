"""What a controller answers on its HTTP port, with the status."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 10


def ask(address: str, path: str, *, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    """Status and body of the answer, by a connection of its own.

    Raises:
        OSError: there is none.
    """
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{address}{path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=tls) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def probe(
    address: str, path: str, *, tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and document of the answer."""
    status, body = ask(address, path, tls=tls)
    document: dict[str, Any] = json.loads(body)
    return status, document
