"""A login at an issuer that a person confirms in a browser."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from outlast.oidc import device_code
from outlast.oidc.device_code import DeviceCode, Poll
from outlast.oidc.http import Web
from outlast.oidc.issuer import (
    Answer,
    IssuerUnavailableError,
    OidcClient,
    Request,
    Session,
    chosen_token,
    expiry_here,
)


def log_in(
    client: OidcClient,
    show: Callable[[DeviceCode], None],
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, Session]:
    """A token, and what renews it; `show` is given the code, for a person to confirm.

    Raises:
        LoginError: there is none, and why.
        IssuerUnavailableError: the issuer does not answer.
    """
    web = Web(client.ca)
    endpoints = web.endpoints(client.issuer)
    code = device_code.code_in(
        web.post(device_code.asking_for_code(client, endpoints)), client.issuer
    )
    poll = device_code.begun(code, now_s())
    show(code)
    request = device_code.asking_for_tokens(code, client, endpoints)
    while True:
        sleep(poll.pause_s(now_s()))
        step = device_code.next_step(poll, _answer(web, request), now_s())
        if not isinstance(step, Poll):
            break
        poll = step
    token = chosen_token(step, client)
    session = Session(
        id=uuid.uuid4().hex,
        client=client,
        refresh_token=step.refresh_token,
        expires_s=expiry_here(token, time.time()),
    )
    return token, session


def _answer(web: Web, request: Request) -> Answer | None:
    try:
        return web.post(request)
    except IssuerUnavailableError:
        # It may be back before the code expires.
        return None
