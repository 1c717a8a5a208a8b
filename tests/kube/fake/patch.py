"""Patches: JSON merge patch (RFC 7386), strategic merge patch, JSON patch (RFC 6902)."""

from __future__ import annotations

from typing import Any

from tests.kube.fake.errors import bad_request, invalid

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json-patch+json"

# How the Go types tag their lists (`patchMergeKey`), as far as tests need it. Other lists, taints
# among them, are replaced as a whole.
_MERGE_KEYS = {
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
    "containers": "name",
    "volumes": "name",
    "env": "name",
}
_MERGED_SETS = ("finalizers",)


def apply_patch(content_type: str, document: dict[str, Any], patch: Any) -> dict[str, Any]:
    """A new document; the old one is left as it is."""
    if content_type == JSON:
        return _json_patch(document, patch)
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
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            field = key.partition("/")[2]
            merged[field] = [item for item in merged.get(field, ()) if item not in value]
        elif key.startswith("$"):
            raise bad_request(f"the fake does not know the directive {key}")
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _strategic(merged.get(key), value)
        elif isinstance(value, list):
            merged[key] = _strategic_list(key, merged.get(key) or [], value)
        else:
            merged[key] = value
    return merged


def _strategic_list(field: str, items: list[Any], patch: list[Any]) -> list[Any]:
    if field in _MERGED_SETS:
        return items + [item for item in patch if item not in items]
    merge_key = _MERGE_KEYS.get(field)
    if merge_key is None:
        return patch
    merged = list(items)
    for change in patch:
        if change.get("$patch") == "replace":
            return [item for item in patch if "$patch" not in item]
        if merge_key not in change:
            raise bad_request(f"map: {change} does not contain declared merge key: {merge_key}")
        found = [at for at, item in enumerate(merged) if item[merge_key] == change[merge_key]]
        if change.get("$patch") == "delete":
            merged = [item for at, item in enumerate(merged) if at not in found]
        elif found:
            merged[found[0]] = _strategic(merged[found[0]], change)
        else:
            merged.append(_strategic({}, change))
    return merged


def _json_patch(document: dict[str, Any], operations: Any) -> dict[str, Any]:
    result: Any = document
    for operation in operations:
        path = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        result = _operate(result, path, operation)
    return result


def _operate(node: Any, path: list[str], operation: dict[str, Any]) -> Any:
    key, rest = path[0], path[1:]
    kind, where = operation["op"], operation["path"]
    if isinstance(node, list):
        copy: Any = list(node)
        at: Any = len(copy) if key == "-" else int(key)
        present = at < len(copy)
    else:
        copy, at = dict(node or {}), key
        present = at in copy
    if rest:
        if not present:
            raise invalid("patch", where, f"{kind} of a missing path")
        copy[at] = _operate(copy[at], rest, operation)
        return copy
    if kind == "test":
        if not present or copy[at] != operation["value"]:
            raise invalid("patch", where, "testing path failed")
    elif kind == "remove":
        if not present:
            raise invalid("patch", where, "remove of a missing path")
        del copy[at]
    elif kind == "replace" and not present:
        raise invalid("patch", where, "replace of a missing path")
    elif kind == "add" and isinstance(copy, list):
        copy.insert(at, operation["value"])
    elif kind in ("add", "replace"):
        copy[at] = operation["value"]
    else:
        raise bad_request(f"the fake does not know the patch operation {kind}")
    return copy
