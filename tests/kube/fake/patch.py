"""Patches: JSON merge patch (RFC 7386), and strategic merge patch without its directives."""

from __future__ import annotations

from typing import Any

from tests.kube.fake.errors import bad_request

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

# How the Go types tag their lists (`patchMergeKey`), as far as tests need it. Other lists, taints
# among them, are replaced as a whole.
_MERGE_KEYS = {
    "conditions": "type",
    "ownerReferences": "uid",
    "containers": "name",
}


def apply_patch(content_type: str, document: dict[str, Any], patch: Any) -> dict[str, Any]:
    """A new document; the old one is left as it is."""
    if not isinstance(patch, dict):
        raise bad_request("a merge patch must be an object")
    if content_type == MERGE:
        return _merge(document, patch)
    if content_type == STRATEGIC:
        return _strategic(document, patch)
    raise bad_request(f"the fake does not know patches of type {content_type}")


def _merge(document: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _strategic(document: Any, patch: dict[str, Any]) -> dict[str, Any]:
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            raise bad_request(f"the fake does not know the directive {key}")
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _strategic(merged.get(key), value)
        elif isinstance(value, list):
            merged[key] = _strategic_list(key, merged.get(key) or [], value)
        else:
            merged[key] = value
    return merged


def _strategic_list(field: str, items: list[Any], patch: list[Any]) -> list[Any]:
    merge_key = _MERGE_KEYS.get(field)
    if merge_key is None:
        return patch
    merged = list(items)
    for change in patch:
        if merge_key not in change:
            raise bad_request(f"map: {change} does not contain declared merge key: {merge_key}")
        found = [at for at, item in enumerate(merged) if item[merge_key] == change[merge_key]]
        if found:
            merged[found[0]] = _strategic(merged[found[0]], change)
        else:
            merged.append(_strategic({}, change))
    return merged
