"""Tokens of issuers, verified with their keys, which a thread keeps at hand.

A call is answered at once with the keys that are known: one that was signed with a key that is not
has the thread ask the issuer, and is refused; a moment later it is not. The issuer may be away for
as long as its keys stay the same.
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from controller.access.issuers import Issuer
from controller.access.roles import Caller
from controller.ratelimit import RateLimitedLog
from outlast.errors import FatalError
from outlast.oidc.http import DEADLINE_S, opener, read
from outlast.oidc.issuer import WELL_KNOWN, is_safe

logger = logging.getLogger(__name__)

# With keys that only the issuer has: a key that both have would have the controller sign, too.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
MAX_TOKEN_BYTES = 16_384
REFRESH_S = 900.0
# A stranger's token makes no more requests than one in so long.
LEAST_REFRESH_S = 10.0
# What a start waits for the first keys at most.
START_S = 5.0
# Clocks differ.
_LEEWAY_S = 30.0

_Place: TypeAlias = tuple[str, str | None, str | None]


class Issuers:
    """Those that a file of tokens names."""

    def __init__(self, issuers: Sequence[Issuer], before: Issuers | None = None) -> None:
        """Begin to fetch their keys, but for those that `before` has.

        Raises:
            FatalError: the package that verifies tokens is missing.
        """
        self.issuers = tuple(issuers)
        self._log = RateLimitedLog(logger)
        if issuers:
            _check_package()
        known: dict[_Place, _Keys | None] = {}
        if before is not None:
            known |= {_place(each): keys for each, keys in before._keys}
        # Two entries of one issuer, for two audiences, have its keys in common.
        wanted = {_place(each): each for each in issuers}
        kept = {place: known.pop(place, None) or _Keys(each) for place, each in wanted.items()}
        self._keys: list[tuple[Issuer, _Keys]] = [(each, kept[_place(each)]) for each in issuers]
        for keys in filter(None, known.values()):
            keys.close()

    def by_token(self, token: str, taken: Collection[str] = ()) -> Caller | None:
        """Whose token this is; None when it is of none of these, or does not hold.

        `taken` are names of callers that no issuer can give.
        """
        if not self._keys or token.count(".") != 2 or len(token) > MAX_TOKEN_BYTES:
            return None
        import jwt

        try:
            header = jwt.get_unverified_header(token)
            named = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except jwt.PyJWTError:
            return None
        for issuer, keys in self._keys:
            if issuer.issuer != named or (key := keys.get(header.get("kid"))) is None:
                continue
            try:
                claims = jwt.decode(
                    token,
                    key,
                    algorithms=ALGORITHMS,
                    audience=issuer.audience,
                    issuer=issuer.issuer,
                    leeway=_LEEWAY_S,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except jwt.PyJWTError:
                continue
            try:
                caller = issuer.caller(claims)
            except ValueError as error:
                self._log.warning(("name", issuer.issuer), f"a token of {named}: %s", error)
                continue
            if caller.name not in taken:
                return caller
            what = f"a token of {named} is of {caller.name!r}, who has a token of the file: refused"
            self._log.warning(("taken", issuer.issuer), what)
        return None

    def wait(self) -> None:
        """Until the first keys are there, or a start has waited for long enough."""
        until_s = time.monotonic() + START_S
        for _, keys in self._keys:
            keys.asked.wait(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """End the threads."""
        for _, keys in self._keys:
            keys.close()


def _check_package() -> None:
    try:
        import jwt  # noqa: F401  # only a controller with issuers needs it
    except ImportError as error:
        raise FatalError(
            "tokens of an issuer need the package pyjwt: pip install 'outlast[oidc]'"
        ) from error


def _place(issuer: Issuer) -> _Place:
    """Where its keys come from."""
    return issuer.issuer, issuer.keys, issuer.ca


class _Keys:
    """The keys of one issuer."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._by_id: dict[str | None, Any] = {}
        self._log = RateLimitedLog(logger)
        self._wanted = threading.Event()
        self._is_over = threading.Event()
        self.asked = threading.Event()
        """Set once the issuer has answered, or has failed to."""
        threading.Thread(target=self._run, name="oidc", daemon=True).start()

    def get(self, kid: str | None) -> Any:
        """The key with this id; None where there is none, or none yet. A token that names no key
        is one of an issuer that has a single one."""
        known = self._by_id
        if kid in known:
            return known[kid]
        if kid is None and len(known) == 1:
            return next(iter(known.values()))
        self._wanted.set()
        return None

    def close(self) -> None:
        self._is_over.set()
        self._wanted.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._wanted.clear()
            try:
                self._by_id = _parsed(_keys_of(self._issuer))
            except Exception as error:  # noqa: BLE001  # whatever it answers, it is asked again
                what = f"keys of {self._issuer.issuer} are not known, or stay as they were: %s"
                self._log.warning(("keys",), what, error or type(error).__name__)
            self.asked.set()
            if not self._is_over.wait(LEAST_REFRESH_S):
                self._wanted.wait(REFRESH_S)


def _parsed(document: Any) -> dict[str | None, Any]:
    """Keys by their ids; kinds that are not known here are left out."""
    import jwt

    found: dict[str | None, Any] = {}
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise ValueError("they are no list of keys (JWKS)")
    for each in keys:
        try:
            key = jwt.PyJWK(each)
        except Exception:  # noqa: BLE001  # one that is wrong says nothing of the others
            continue
        is_named = key.key_id is None or isinstance(key.key_id, str)
        is_usable = key.algorithm_name in ALGORITHMS and each.get("use", "sig") == "sig"
        if is_named and is_usable:
            found[key.key_id] = key
    if not found:
        raise ValueError(f"none of {len(keys)} keys can be used; allowed: {', '.join(ALGORITHMS)}")
    return found


def _keys_of(issuer: Issuer) -> Any:
    """The document with its keys, as OpenID Connect Discovery 1.0 finds it.

    Raises:
        OSError: nobody answers.
        ValueError: the answer is another one.
    """
    if issuer.keys is not None:
        return json.loads(Path(issuer.keys).read_bytes())
    context = ssl.create_default_context(cafile=issuer.ca)
    about = _read(f"{issuer.issuer.rstrip('/')}{WELL_KNOWN}", context)
    if not isinstance(about, dict) or about.get("issuer") != issuer.issuer:
        raise ValueError("what is found there is of another issuer")
    url = about.get("jwks_uri")
    if not isinstance(url, str) or not is_safe(url):
        raise ValueError(f"it has its keys at {url!r}, which is no https:// URL")
    return _read(url, context)


def _read(url: str, context: ssl.SSLContext) -> Any:
    with opener(context).open(url, timeout=DEADLINE_S) as answer:
        return json.loads(read(answer, url))
