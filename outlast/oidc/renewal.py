"""A token that has expired is renewed before a call, once, whichever command comes first.

Issuers that rotate refresh tokens take each one once, and may end a login for which one comes
twice. So the session is locked meanwhile: who comes second finds the new token in the file of
logins, which is itself locked only while it is changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from outlast.access import (
    Access,
    Login,
    Logins,
    LoginsBusyError,
    change_logins,
    logins_file,
    read_logins,
    renewing,
)
from outlast.oidc.http import Web
from outlast.oidc.issuer import (
    Answer,
    IssuerUnavailableError,
    LoginError,
    Session,
    chosen_token,
    expiry_here,
    expiry_of,
    refresh_token_in,
    refreshing,
    refusal_in,
    tokens_in,
)

# Before it expires, so that it still holds when it arrives; as golang.org/x/oauth2 has it.
_BEFORE_S = 10.0
# For an answer that is under way when somebody presses Ctrl-C.
INTERRUPTED_S = 5.0


def fresh(access: Access, now_s: Callable[[], float] = time.time, *, refused: str = "") -> Access:
    """The same with a token that holds, and is not the one that the controller refused: clocks
    differ.

    Raises:
        LoginError: it cannot be renewed; a person must log in again.
        IssuerUnavailableError: the issuer does not answer.
        AccessError: the file of logins cannot be used.
        LoginsBusyError: another command renews it, and does not end.
    """
    session = access.session
    if session is None or not _is_due(access, now_s(), refused):
        return access
    path = logins_file()
    try:
        with renewing(path, session.id):
            name, login = _found(read_logins(path), session)
            kept = login.access
            if _is_due(kept, now_s(), refused):
                kept = _to_its_end(lambda: _renewed(path, name, login.access, now_s))
    except (IssuerUnavailableError, LoginsBusyError):
        expires_s = _expiry(access)
        if expires_s is None or now_s() >= expires_s:
            raise
        # It holds for seconds yet, and the next call tries again.
        return access
    return replace(access, token=kept.token, session=kept.session)


def _is_due(access: Access, now_s: float, refused: str) -> bool:
    expires_s = _expiry(access)
    return expires_s is None or now_s >= expires_s - _BEFORE_S or access.token == refused


def _expiry(access: Access) -> float | None:
    here_s = access.session.expires_s if access.session is not None else 0.0
    return here_s or expiry_of(access.token)


def _found(logins: Logins, session: Session) -> tuple[str, Login]:
    for name, login in logins.by_name.items():
        if login.access.session is not None and login.access.session.id == session.id:
            return name, login
    raise LoginError(
        f"the token of {session.client.issuer} has expired, and its login is not kept any more; "
        "run `outlast login` again"
    )


def _save(path: Path, access: Access) -> None:
    session = access.session
    assert session is not None

    def saved(logins: Logins) -> Logins:
        name, login = _found(logins, session)
        return replace(logins, by_name={**logins.by_name, name: replace(login, access=access)})

    change_logins(path, saved)


def _renewed(path: Path, name: str, access: Access, now_s: Callable[[], float]) -> Access:
    session = access.session
    assert session is not None
    issuer, again = session.client.issuer, f"run `outlast login {name}` again"
    if not session.refresh_token:
        raise LoginError(
            f"the token of {issuer} has expired, and it gave no refresh token (many do for the "
            f"scope offline_access); {again}"
        )
    try:
        answer = _answer(session)
        # Who gives no new refresh token goes on taking the one that it gave. A new one is saved
        # first: if the rest is wrong, the old one may count no more.
        new = refresh_token_in(answer)
        if new not in ("", session.refresh_token):
            session = replace(session, refresh_token=new)
            _save(path, replace(access, session=session))
        token = chosen_token(tokens_in(answer), session.client)
    except IssuerUnavailableError as error:
        raise IssuerUnavailableError(
            f"the token of {issuer} has expired and cannot be renewed now: {error}; try again, or "
            f"{again}"
        ) from error
    except LoginError as error:
        raise LoginError(f"the token of {issuer} is not renewed: {error}; {again}") from error
    session = replace(session, expires_s=expiry_here(token, now_s()))
    access = replace(access, token=token, session=session)
    _save(path, access)
    return access


def _answer(session: Session) -> Answer:
    web = Web(session.client.ca)
    answer = web.post(refreshing(session, web.endpoints(session.client.issuer)))
    if answer.is_busy:
        raise IssuerUnavailableError(f"it answered with status {answer.status}")
    if answer.status != 200:
        raise LoginError(refusal_in(answer))
    return answer


def _to_its_end(work: Callable[[], Access]) -> Access:
    """Ctrl-C waits a little: an answer that nobody reads may have the next refresh token."""
    done: Future[Access] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
            done.set_exception(error)

    thread = threading.Thread(target=run, name="renewal", daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        thread.join(INTERRUPTED_S)
        raise
