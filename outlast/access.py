"""How a program proves to a controller who it is, and that it talks to the right one.

What `outlast login` saved of a controller is found by its address; the environment goes before it,
for programs that nobody logs in:

    OUTLAST_CA            file with the certificate of the authority that signed the controller's
    OUTLAST_TOKEN_FILE    file with a token
    OUTLAST_TLS_DIR       folder with ca.crt, and with tls.crt and tls.key where the controller
                          asks for a certificate
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from outlast import private
from outlast.addresses import addresses_of
from outlast.errors import FatalError, RetryableError
from outlast.oidc.issuer import OidcClient, Session

ENVIRONMENT = ("OUTLAST_CA", "OUTLAST_TOKEN_FILE", "OUTLAST_TLS_DIR")
# As cert-manager and `kubectl create secret tls` name them.
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
_MAX_BYTES = 1 << 20
# The holder of a session's lock asks the issuer twice at most, for 20 s each.
_LOCK_S = 60.0
_LOCK_LOOK_S = 0.05


class AccessError(FatalError):
    """A file with a certificate, a key, a token or logins cannot be used."""


class LoginsBusyError(RetryableError):
    """Another command has had the file of logins, a session of it, or one of tokens, locked for
    too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a client shows and checks. Nothing at all: in clear text, as nobody."""

    ca: str = ""
    """PEM; whose signature the controller's certificate must have. Empty: no encryption."""
    certificate: str = ""
    """PEM; the client's own, where it has one."""
    key: str = ""
    token: str = ""
    session: Session | None = None
    """What renews the token, where an issuer gave it."""
    token_file: str = ""
    """From where the token was read, and is read again: somebody else may renew it there."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise AccessError("a certificate goes with its key; one of them is missing")
        if self.certificate and not self.ca:
            raise AccessError(f"a certificate goes with the authority's, {CA_FILE}")


def read_tls_dir(folder: Path) -> Access:
    """What is in a folder: ca.crt, and perhaps tls.crt with tls.key.

    Raises:
        AccessError: something is missing or cannot be read.
    """
    has_own = (folder / CERTIFICATE_FILE).exists() or (folder / KEY_FILE).exists()
    return Access(
        ca=read_text(folder / CA_FILE),
        certificate=read_text(folder / CERTIFICATE_FILE) if has_own else "",
        key=read_text(folder / KEY_FILE) if has_own else "",
    )


def of(address: str, environment: Mapping[str, str] | None = None) -> Access:
    """What is known for a controller: from the environment, else as it was logged in to.

    Raises:
        AccessError: something of it cannot be used.
    """
    given = os.environ if environment is None else environment
    found = read_logins(logins_file(given)).by_address(address)
    if folder := given.get("OUTLAST_TLS_DIR"):
        found = replace(read_tls_dir(Path(folder)), token=found.token, session=found.session)
    if path := given.get("OUTLAST_CA"):
        found = replace(found, ca=read_text(Path(path)))
    if path := given.get("OUTLAST_TOKEN_FILE"):
        token = read_text(Path(path)).strip()
        # What a pipe has is there once.
        file = path if Path(path).expanduser().is_file() else ""
        found = replace(found, token=token, session=None, token_file=file)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """One controller that somebody logged in to."""

    address: str
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """All of a user's, by name; `current` is the one that commands mean without an address."""

    current: str
    by_name: Mapping[str, Login]

    def by_address(self, address: str) -> Access:
        """That of a controller; empty when it was never logged in to. The one in use first.

        Of several addresses any one will do: all those controllers have the same certificate.
        """
        logins = sorted(self.by_name.items(), key=lambda named: named[0] != self.current)
        wanted = set(addresses_of(address))
        found = [login for _, login in logins if wanted & set(addresses_of(login.address))]
        return found[0].access if found else Access()


def noted_in(state_dir: Path) -> Login | None:
    """The controller that runs on a state directory of this machine; None when none does.

    Raises:
        AccessError: as `of`.
    """
    try:
        noted = json.loads((state_dir.expanduser() / "controller.json").read_text())
        address, ca = str(noted["grpc"]), str(noted.get("ca", ""))
    # It may be half written while a controller starts.
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The file knows whether it encrypts: a login at its address may be of another controller.
    access = of(address)
    if not ca:
        return Login(address=address, access=replace(access, ca="", certificate="", key=""))
    return Login(address=address, access=replace(access, ca=ca))


def logins_file(environment: Mapping[str, str] | None = None) -> Path:
    """Where logins are kept: `outlast/logins.yaml` below the user's configuration."""
    given = os.environ if environment is None else environment
    base = given.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(base) / "outlast" / "logins.yaml"


def read_logins(path: Path) -> Logins:
    """The logins of a file; none when it is not there.

    Raises:
        AccessError: it has something else in it.
    """
    if not path.exists():
        return Logins(current="", by_name={})
    try:
        document = yaml.safe_load(read_text(path))
        by_name = {str(name): _login(each) for name, each in document["logins"].items()}
        return Logins(current=str(document["current"]), by_name=by_name)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise AccessError(
            f"{path} is not what `outlast login` writes ({error}); delete it and log in again"
        ) from error


def change_logins(path: Path, change: Callable[[Logins], Logins]) -> Logins:
    """Write the file anew with what `change` makes of it, while no other command does.

    Raises:
        AccessError: it cannot be read, written or locked.
        LoginsBusyError: another command does not end.
    """
    with _locked(path.with_name(f"{path.name}.lock")):
        before = read_logins(path)
        after = change(before)
        if after != before:
            write_logins(path, after)
            # Who still waits for one finds that its session is gone.
            for gone in _sessions(before) - _sessions(after):
                with suppress(OSError):
                    _session_lock(path, gone).unlink()
    return after


@contextmanager
def renewing(path: Path, session_id: str) -> Iterator[None]:
    """Alone with a session while its issuer is asked, which may take long: other sessions and
    changes of the file do not wait.

    Raises:
        AccessError: it cannot be locked.
        LoginsBusyError: another command does not end.
    """
    with _locked(_session_lock(path, session_id)):
        yield


def _session_lock(path: Path, session_id: str) -> Path:
    return path.with_name(f"{path.name}.{quote(session_id, safe='')}.lock")


def _sessions(logins: Logins) -> set[str]:
    found = (login.access.session for login in logins.by_name.values())
    return {session.id for session in found if session is not None}


def write_logins(path: Path, logins: Logins) -> None:
    """Write the file anew, for its owner only.

    Raises:
        AccessError: it cannot be written.
    """
    document = {
        "current": logins.current,
        "logins": {name: _as_mapping(login) for name, login in logins.by_name.items()},
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.replace_text(path, yaml.safe_dump(document, sort_keys=False))
    except OSError as error:
        raise AccessError(f"{path} cannot be written: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """A small file of text.

    Raises:
        AccessError: it cannot be read, or is none.
    """
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise AccessError(f"{path} is no text") from error


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Alone with a file that is there for nothing else.

    Raises:
        AccessError: it cannot be locked.
        LoginsBusyError: another command does not end.
    """
    try:
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = private.open_to_append(lock)
    except OSError as error:
        raise AccessError(f"{lock} cannot be written: {error.strerror or error}") from error
    with file:
        try:
            _take(file.fileno(), lock)
        except OSError as error:
            # Some network file systems have no locks.
            raise AccessError(
                f"{lock} cannot be locked: {error.strerror or error}; have it in a folder on a "
                "file system with locks (XDG_CONFIG_HOME)"
            ) from error
        yield


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Alone with a folder, which is made if need be, without a file that would be somebody's.

    Without a lock where the file system has none for folders, as NFS.

    Raises:
        AccessError: it cannot be made or read.
        LoginsBusyError: another command does not end.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AccessError(f"{folder} cannot be locked: {error.strerror or error}") from error
    try:
        with suppress(OSError):
            _take(handle, folder)
        yield
    finally:
        os.close(handle)


def _take(handle: int, lock: Path) -> None:
    """Raises:
    OSError: the file system has no locks.
    LoginsBusyError: another command does not end.
    """
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise LoginsBusyError(
                    f"another command has had {lock} locked for {_LOCK_S:g} s"
                ) from None
            time.sleep(_LOCK_LOOK_S)
        else:
            return


def _login(given: Mapping[str, Any]) -> Login:
    texts = {
        name: str(given[name]) for name in ("ca", "certificate", "key", "token") if name in given
    }
    session = _session(given["oidc"]) if "oidc" in given else None
    return Login(address=str(given["address"]), access=Access(**texts, session=session))


def _session(given: Mapping[str, Any]) -> Session:
    client = OidcClient(
        **{each.name: str(given[each.name]) for each in fields(OidcClient) if each.name in given}
    )
    return Session(
        id=str(given["id"]),
        client=client,
        refresh_token=str(given.get("refresh_token", "")),
        expires_s=float(given.get("expires_s", 0.0)),
    )


def _as_mapping(login: Login) -> dict[str, Any]:
    access = login.access
    shown = {
        "ca": access.ca,
        "certificate": access.certificate,
        "key": access.key,
        "token": access.token,
    }
    found: dict[str, Any] = {"address": login.address, **_given(shown)}
    if (session := access.session) is not None:
        client = {each.name: getattr(session.client, each.name) for each in fields(OidcClient)}
        renews = {"id": session.id, **client, "refresh_token": session.refresh_token}
        found["oidc"] = _given(renews)
        if session.expires_s:
            found["oidc"]["expires_s"] = session.expires_s
    return found


def _given(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in texts.items() if value}
