"""Who issues tokens besides the file: OpenID Connect providers, and Kubernetes for its pods. Pure.

    - issuer: https://login.example
      audience: outlast
      name: email
      roles: {ml-admins: admin, ml: submitter}
      client_id: outlast

An entry of the file of tokens. A token is a JWT, signed with a key of the issuer, for this
audience; the claim `name` says whose it is, and the values of `role_claim` decide the role. With
a `client_id`, `outlast login` may ask the issuer for a token as that client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.access.roles import ROLES, Caller, Role
from outlast.oidc.issuer import is_safe

FIELDS = ("issuer", "audience", "name", "role_claim", "roles", "keys", "ca", "client_id", "scope")
NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._@]{0,63}")
NAME_ALLOWED = "1 to 64 letters, digits and -._@, the first a letter or digit"
# Service accounts of Kubernetes, whose namespaces have no dots.
_SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """One issuer, and who is who among those that it knows."""

    issuer: str
    """Its URL, as the claim `iss` has it."""
    audience: str
    name: str = "sub"
    """The claim that a caller is called by."""
    role_claim: str = "groups"
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By values of that claim; of several the one that may do most."""
    keys: str | None = None
    """A file of keys (JWKS); else they are asked for at the issuer."""
    ca: str | None = None
    """A file of the authority behind the issuer's certificate; the system's unless given."""
    client_id: str | None = None
    """As whom `outlast login` may ask it for a token; else people bring theirs."""
    scope: str | None = None
    """What it asks for, separated by spaces; else the usual scopes."""

    def caller(self, claims: Mapping[str, Any]) -> Caller:
        """Whom verified claims are of.

        Raises:
            ValueError: they give no role, or no name for a caller.
        """
        given = claims.get(self.role_claim)
        values = given if isinstance(given, list) else [given]
        roles = [
            self.roles[each] for each in values if isinstance(each, str) and each in self.roles
        ]
        if not roles:
            raise ValueError(f"its {self.role_claim} give no role")
        return Caller(name=self._name_in(claims), role=max(roles))

    def _name_in(self, claims: Mapping[str, Any]) -> str:
        name = claims.get(self.name)
        if self.name == "email" and claims.get("email_verified") in (False, "false"):
            raise ValueError(f"the issuer has not verified that {name!r} is its owner's")
        if isinstance(name, str) and name.startswith(_SERVICE_ACCOUNT):
            name = name.replace(":", ".")
        elif isinstance(name, str) and name.startswith(_SERVICE_ACCOUNT.replace(":", ".")):
            raise ValueError(f"{self.name} is {name!r}, as service accounts are called")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{self.name} is {name!r}; allowed for callers: {NAME_ALLOWED}")
        return name

    def document(self) -> dict[str, Any]:
        """As the file has it."""
        plain = Issuer(issuer=self.issuer, audience=self.audience)
        given = {name: getattr(self, name) for name in FIELDS if name != "roles"}
        changed = {
            name: value
            for name, value in given.items()
            if name in ("issuer", "audience") or value != getattr(plain, name)
        }
        return {**changed, "roles": {value: role.word for value, role in self.roles.items()}}


def issuer_of(given: Mapping[str, Any]) -> Issuer:
    """An entry of the file.

    Raises:
        ValueError: it is none; the message begins with the field.
    """
    if unknown := [str(name) for name in given if name not in FIELDS]:
        raise ValueError(f"{unknown[0]} is not known; allowed: {', '.join(FIELDS)}")
    texts = {name: value for name, value in given.items() if name != "roles"}
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} is {value!r}; allowed: text")
    if "audience" not in texts:
        raise ValueError("audience is missing: whom tokens are for, such as outlast")
    if not is_safe(texts["issuer"]):
        raise ValueError(f"issuer is {texts['issuer']!r}; allowed: an https:// URL")
    if "scope" in texts and "client_id" not in texts:
        raise ValueError("scope goes with client_id, of the client that asks for it")
    return Issuer(**texts, roles=_roles(given.get("roles")))


def _roles(given: object) -> dict[str, Role]:
    if not isinstance(given, dict) or not given:
        raise ValueError("roles is no section; allowed: values of role_claim and their roles")
    for value, word in given.items():
        if not isinstance(word, str) or word not in ROLES:
            raise ValueError(f"roles.{value} is {word!r}; allowed: {', '.join(ROLES)}")
    return {str(value): ROLES[word] for value, word in given.items()}
