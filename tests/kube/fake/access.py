"""Who asks, and whether roles and their bindings allow it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from tests.kube.fake.errors import ApiError, forbidden
from tests.kube.fake.resources import Resource, Target
from tests.kube.fake.store import Store

Object = dict[str, Any]
MASTERS = "system:masters"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """An authenticated caller."""

    name: str
    groups: tuple[str, ...] = ()


@dataclass(slots=True)
class Access:
    """Tokens, and RBAC over the role objects in the store."""

    store: Store
    resources: tuple[Resource, ...]
    _tokens: dict[str, User] = field(default_factory=dict)

    def issue_token(self, user: User) -> str:
        """A bearer token for a user."""
        token = secrets.token_hex(16)
        self._tokens[token] = user
        return token

    def authenticate(self, header: str | None) -> User:
        """The caller; ApiError 401 for an unknown token."""
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or token not in self._tokens:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return self._tokens[token]

    def allows(self, user: User, verb: str, target: Target) -> bool:
        """Whether some binding grants a request."""
        if MASTERS in user.groups:
            return True
        what = _what(target)
        return any(
            _covers(rule, "verbs", verb)
            and _covers(rule, "apiGroups", target.resource.group)
            and _covers(rule, "resources", what)
            and (not rule.get("resourceNames") or target.name in rule["resourceNames"])
            for rule in self._rules(user, target.namespace)
        )

    def _rules(self, user: User, namespace: str) -> list[Object]:
        rules: list[Object] = []
        for binding in self._all("ClusterRoleBinding", ""):
            if _binds(binding, user):
                rules += self._role(binding, "")
        if namespace:
            for binding in self._all("RoleBinding", namespace):
                if _binds(binding, user):
                    rules += self._role(binding, namespace)
        return rules

    def _all(self, kind: str, namespace: str) -> list[Object]:
        return self.store.find(self._resource(kind), namespace, lambda item: True)

    def _role(self, binding: Object, namespace: str) -> list[Object]:
        kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
        role = self.store.get(self._resource(kind), namespace if kind == "Role" else "", name)
        return list((role or {}).get("rules") or ())

    def _resource(self, kind: str) -> Resource:
        return next(resource for resource in self.resources if resource.kind == kind)


def refusal(user: User, verb: str, target: Target) -> ApiError:
    """The answer to a request that no binding grants."""
    scope = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    name = f' "{target.name}"' if target.name else ""
    return forbidden(
        f'{target.resource.name}{name} is forbidden: User "{user.name}" cannot {verb} resource '
        f'"{_what(target)}" in API group "{target.resource.group}" {scope}'
    )


def _what(target: Target) -> str:
    plural = target.resource.plural
    return f"{plural}/{target.subresource}" if target.subresource else plural


def _covers(rule: Object, field_name: str, value: str) -> bool:
    return bool({"*", value} & set(rule.get(field_name) or ()))


def _binds(binding: Object, user: User) -> bool:
    return any(_is(subject, user) for subject in binding.get("subjects") or ())


def _is(subject: Object, user: User) -> bool:
    match subject["kind"]:
        case "ServiceAccount":
            return user.name == service_account_name(subject.get("namespace", ""), subject["name"])
        case "Group":
            return subject["name"] in user.groups
        case _:
            return bool(subject["name"] == user.name)


def service_account_name(namespace: str, name: str) -> str:
    """The user name of a service account."""
    return f"system:serviceaccount:{namespace}:{name}"
