"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.kube.fake.errors import bad_request

Object = dict[str, Any]
Predicate = Callable[[Object], bool]

_SET_TERM = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_EQUALITY_TERM = re.compile(r"^([^=!\s]+)\s*(==|=|!=)\s*(\S*)$")
# A comma within the parentheses of a set does not separate terms.
_COMMA = re.compile(r",(?![^(]*\))")

# Beside metadata.name and metadata.namespace, which all kinds have.
_FIELDS = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "status.phase", "status.podIP"),
    "nodes": ("spec.unschedulable",),
    "events": (
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.uid",
        "reason",
        "type",
    ),
}


def selects(plural: str, labels: str, fields: str) -> Predicate:
    """Whether an object of a kind is meant; ApiError 400 for selectors that make no sense."""
    terms = [_label_term(term.strip()) for term in _COMMA.split(labels) if term.strip()]
    terms += [_field_term(plural, term.strip()) for term in fields.split(",") if term.strip()]
    return lambda item: all(term(item) for term in terms)


def matches_labels(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector object, as budgets and services carry them, takes these labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for need in selector.get("matchExpressions") or ():
        present, value = need["key"] in labels, labels.get(need["key"])
        fits = {
            "In": present and value in need.get("values", ()),
            "NotIn": not present or value not in need.get("values", ()),
            "Exists": present,
            "DoesNotExist": not present,
        }[need["operator"]]
        if not fits:
            return False
    return True


def _label_term(term: str) -> Predicate:
    if found := _SET_TERM.match(term):
        key, operator, listed = found.groups()
        values = [value.strip() for value in listed.split(",")]
        if operator == "in":
            return lambda item: _labels(item).get(key) in values
        return lambda item: _labels(item).get(key) not in values
    if found := _EQUALITY_TERM.match(term):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda item: _labels(item).get(key) != value
        return lambda item: _labels(item).get(key) == value
    if term.startswith("!"):
        return lambda item: term[1:].strip() not in _labels(item)
    if re.fullmatch(r"[\w./-]+", term):
        return lambda item: term in _labels(item)
    raise bad_request(f"unable to parse requirement: {term}")


def _field_term(plural: str, term: str) -> Predicate:
    found = _EQUALITY_TERM.match(term)
    if found is None:
        raise bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    path, operator, value = found.groups()
    if path not in ("metadata.name", "metadata.namespace", *_FIELDS.get(plural, ())):
        raise bad_request(f"field label not supported: {path}")
    return lambda item: (_field(item, path) == value) is (operator != "!=")


def _labels(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _field(item: Object, path: str) -> str:
    node: Any = item
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if path == "spec.unschedulable":
        return "true" if node else "false"
    return node or ""
