"""Whether answers of the JSON API have what its OpenAPI document says, and nothing besides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from controller.web.openapi import document

DOCUMENT = document()
# All that our schemas say of a value; `wrong` looks at each.
KEYWORDS = {
    *("$ref", "anyOf", "type", "enum", "minimum", "description"),
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("items", "minItems", "maxItems"),
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def answer_schema(path: str, verb: str = "GET") -> dict[str, Any]:
    """Of the answer to a request that is done; the path is that of a request, with no query."""
    # One that is spelled out, as /jobs/check, comes before /jobs/{job_id}.
    template = min((each for each in DOCUMENT["paths"] if _is_of(each, path)), key=_holes)
    answers = DOCUMENT["paths"][template][verb.lower()]["responses"]
    (done,) = (each for status, each in answers.items() if status != "default")
    found: dict[str, Any] = done["content"]["application/json"]["schema"]
    return found


def wrong(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What of a value is not as the schema says, as far as our schemas go.

    Stricter than JSON Schema: an object has no other properties than those that its schema names,
    unless it names none at all.
    """
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert schema.keys() <= KEYWORDS, f"{where}: no check for {schema.keys() - KEYWORDS}"
    if "anyOf" in schema:
        tries = [wrong(value, each, where) for each in schema["anyOf"]]
        return min(tries, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    kinds = schema.get("type", list(_KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_a(value, kind) for kind in kinds):
        return [f"{where}: {value!r} is no {kinds}"]
    match value:
        case dict():
            return [*_wrong_with_object(value, schema, where)]
        case list():
            return [*_wrong_with_list(value, schema, where)]
        case int() | float() if value < schema.get("minimum", value):
            return [f"{where}: {value!r} is less than {schema['minimum']}"]
    return []


def _is_a(value: Any, kind: str) -> bool:
    # To Python a bool is a number.
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _wrong_with_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known: dict[str, Any] = schema.get("properties", {})
    patterns: dict[str, Any] = schema.get("patternProperties", {})
    others = schema.get("additionalProperties", "properties" not in schema)
    yield from (
        f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value
    )
    for name, each in value.items():
        here = f"{where}.{name}"
        of = [patterns[pattern] for pattern in patterns if re.search(pattern, name)]
        of += [known[name]] if name in known else []
        if of:
            yield from (problem for one in of for problem in wrong(each, one, here))
        elif isinstance(others, dict):
            yield from wrong(each, others, here)
        elif not others:
            yield f"{here} is unknown"


def _wrong_with_list(value: list[Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{where}: has {len(value)} items"
    for item in value:
        yield from wrong(item, schema.get("items", {}), f"{where}[]")


def _is_of(template: str, path: str) -> bool:
    pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
    return re.fullmatch(pattern, path) is not None


def _holes(template: str) -> int:
    return template.count("{")
