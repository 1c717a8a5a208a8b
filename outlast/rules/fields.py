"""What is wrong with a field alone, in the words of someone who writes specs.

What a field allows is read from its declaration, so that every field has a message of the
same form, and no message depends on the words of the library that parses.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from outlast.problems import MAX_PROBLEMS, FieldProblem, name_of, shown

# Names of a section and what it holds, and so on down to a field.
Path = tuple[str, ...]
# More items of one list would not help a person.
_MAX_ITEMS = 3
_UNHELPED = "beyond those that are shown"
_SECTIONS: dict[type[BaseModel], dict[str, type[BaseModel]]] = {}


class _Inner(NamedTuple):
    """What is wrong with an item of a list: a field of it where it is a section, and how."""

    field: int | str | None
    kind: str


def explain(
    root: type[BaseModel], document: Mapping[str, Any], errors: Iterable[ErrorDetails]
) -> tuple[list[FieldProblem], set[Path]]:
    """What is wrong with which fields, and the fields that have no value because of it."""
    problems: list[FieldProblem] = []
    items: dict[Path, dict[int, _Inner]] = {}
    whole: dict[Path, str] = {}
    for error in errors:
        path, index, inner = _field_at(root, error["loc"])
        if index is not None:
            items.setdefault(path, {}).setdefault(index, _Inner(inner, error["type"]))
        else:
            whole.setdefault(path, error["type"])
    for path in dict.fromkeys([*whole, *items]):
        given = _value_at(document, path)
        # Of the alternatives that a field has, the one that was meant.
        if path in items and isinstance(given, list | tuple):
            problems += _of_items(root, path, given, dict(sorted(items[path].items())))
        else:
            # What was meant is worth looking for as long as somebody reads it.
            kind = whole.get(path, "") if len(problems) < MAX_PROBLEMS else _UNHELPED
            problems.append(_of_field(root, path, given, kind))
    return problems, {*whole, *items}


def fields_of(section: type[BaseModel]) -> list[str]:
    """The fields of a section, as the spec writes them."""
    return list(section.model_fields)


def allowed_by(info: FieldInfo) -> str:
    """What a field allows, in words."""
    return _allowed(info.annotation, info.metadata)


def _of_field(root: type[BaseModel], path: Path, given: object, kind: str) -> FieldProblem:
    field = ".".join(name_of(part) for part in path)
    if kind == _UNHELPED:
        return FieldProblem(field=field, message="is wrong, too")
    section = _section_at(root, path[:-1])
    if kind == "missing":
        return FieldProblem(field=field, message="is required")
    if section is None or path[-1] not in section.model_fields:
        return FieldProblem(field=field, message=_unknown(root, path))
    info = section.model_fields[path[-1]]
    message = f"is {shown(given)}; allowed: {allowed_by(info)}"
    return FieldProblem(field=field, message=message + _hint(info.annotation, given))


def _of_items(
    root: type[BaseModel], path: Path, given: Sequence[object], wrong: Mapping[int, _Inner]
) -> list[FieldProblem]:
    section = _section_at(root, path[:-1])
    assert section is not None, f"{path} has items and no section"
    item = _item_type(section.model_fields[path[-1]].annotation)
    field = ".".join(path)
    problems = [
        _of_item(f"{field}[{index}]", item, given[index], wrong[index])
        for index in list(wrong)[:_MAX_ITEMS]
    ]
    if len(wrong) > _MAX_ITEMS:
        more = f"{len(wrong) - _MAX_ITEMS} more of its {len(given)} items are not allowed either"
        problems.append(FieldProblem(field=field, message=more))
    return problems


def _of_item(name: str, item: Any, given: object, inner: _Inner) -> FieldProblem:
    if isinstance(inner.field, str) and isinstance(given, Mapping) and _is_section(item):
        found = _of_field(item, (inner.field,), given.get(inner.field), inner.kind)
        return FieldProblem(field=f"{name}.{found.field}", message=found.message)
    message = f"is {shown(given)}; allowed: {_allowed(item, ())}{_hint(item, given)}"
    return FieldProblem(field=name, message=message)


def _field_at(
    root: type[BaseModel], loc: tuple[int | str, ...]
) -> tuple[Path, int | None, int | str | None]:
    """The field that a location means, the item of its list, and what is named within that;
    without tags of alternatives."""
    path: list[str] = []
    section: type[BaseModel] | None = root
    for place, part in enumerate(loc):
        if isinstance(part, int):
            return tuple(path), part, next(iter(loc[place + 1 :]), None)
        if section is None:
            continue
        path.append(part)
        section = _sections_of(section).get(part)
    return tuple(path), None, None


def _section_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in path:
        section = None if section is None else _sections_of(section).get(part)
    return section


def _sections_of(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    if section not in _SECTIONS:
        _SECTIONS[section] = {
            name: info.annotation
            for name, info in section.model_fields.items()
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        }
    return _SECTIONS[section]


def _value_at(document: object, path: Path) -> object:
    for part in path:
        if not isinstance(document, Mapping) or part not in document:
            return None
        document = document[part]
    return document


def _unknown(root: type[BaseModel], path: Path) -> str:
    """A name that no field has here: the one that was meant, and all there are."""
    section = _section_at(root, path[:-1])
    known = [] if section is None else fields_of(section)
    near = difflib.get_close_matches(path[-1].lower(), known, n=1, cutoff=0.6)
    elsewhere = [] if near else _places_of(root, path[-1])
    meant = ""
    if near:
        meant = f" (did you mean {near[0]}?)"
    elif elsewhere:
        meant = f" (did you mean {' or '.join(elsewhere)}?)"
    return f"is not a field{meant}; allowed here: {', '.join(known)}"


def _places_of(root: type[BaseModel], name: str, above: str = "") -> list[str]:
    """Where the spec has a field of that name."""
    found = [f"{above}{name}"] if name in root.model_fields else []
    for inner, section in _sections_of(root).items():
        found += _places_of(section, name, f"{above}{inner}.")
    return found


def _allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        words = [_allowed(kind, metadata) for kind in inner if kind is not NoneType]
        return ", or ".join([*words, *(["null"] if NoneType in inner else [])])
    if origin is Literal:
        values = [str(value) for value in inner]
        return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
    if origin is tuple:
        least = "one or more of" if any(isinstance(each, MinLen) for each in metadata) else "of"
        return f"a list {least} {_plural(inner[0])}"
    if _is_section(annotation):
        return f"a section with the fields {', '.join(fields_of(annotation))}"
    if origin is dict and float in (inner[1], *get_args(inner[1])):
        return "a section of paths and their weights"
    if origin is dict:
        references = [kind for kind in get_args(inner[1]) if _is_section(kind)]
        named = [f", or with {' or '.join(fields_of(kind))}" for kind in references]
        return f"a section of names and text{''.join(named)}"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text that is not empty" if MinLen(1) in metadata else "text"
    return _number(annotation, metadata)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _plural(annotation: Any) -> str:
    if annotation is int:
        return "whole numbers"
    return _allowed(annotation, ())


def _number(annotation: Any, metadata: Sequence[Any]) -> str:
    words = "a whole number" if annotation is int else "a number"
    low = high = ""
    for bound in metadata:
        match bound:
            case Ge(ge=value):
                low = f"{value} or more"
            case Gt(gt=value):
                low = f"more than {value}"
            case Le(le=value):
                high = f"at most {value}"
            case Lt(lt=value):
                high = f"less than {value}"
    limits = " and ".join(limit for limit in (low, high) if limit)
    return f"{words}, {limits}" if limits else words


def _item_type(annotation: Any) -> Any:
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0]
    found = [_item_type(inner) for inner in get_args(annotation)]
    return next((kind for kind in found if kind is not None), None)


def _kinds(annotation: Any) -> set[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return {kind for inner in get_args(annotation) for kind in _kinds(inner)}
    return {annotation}


def _hint(annotation: Any, given: object) -> str:
    """How to write what was probably meant."""
    kinds = _kinds(annotation)
    if isinstance(given, str):
        literals = [kind for kind in kinds if get_origin(kind) is Literal]
        words = [str(word) for kind in literals for word in get_args(kind)]
        by_small_letters = {word.lower(): word for word in words}
        near = difflib.get_close_matches(given.lower(), by_small_letters, n=1, cutoff=0.6)
        if near:
            return f" (did you mean {by_small_letters[near[0]]}?)"
        return _hint_for_number(given) if int in kinds else ""
    is_plain = given is not None and not isinstance(given, list | tuple | Mapping)
    return " (put it in quotes)" if str in kinds and is_plain else ""


def _hint_for_number(given: str) -> str:
    """YAML reads 1e6 and 10k as text."""
    try:
        number = float(given.replace(",", "").replace("_", ""))
    except ValueError:
        return ""
    is_whole = math.isfinite(number) and number.is_integer() and abs(number) < 2**53
    return f" (write {int(number)})" if is_whole else ""
