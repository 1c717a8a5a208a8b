"""Relative paths in a spec are the submitter's: made absolute before the spec goes anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outlast.rules.data import PYTHON_STDLIB
from outlast.rules.places import scheme_of

_PLACES = (("data", "source"), ("checkpoint", "url"), ("checkpoint", "load"))


def resolve_places(
    document: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with its relative paths below `folder`, and by field what was written there.

    `~` is the submitter's home, as in a shell. Anything that is no path stays as it is: the
    rules of the spec will say so.
    """
    resolved, written = dict(document), {}
    for section, field in _PLACES:
        inside = resolved.get(section)
        given = inside.get(field) if isinstance(inside, dict) else None
        if not isinstance(given, str) or not _is_relative(section, given):
            continue
        path = os.path.normpath(folder / os.path.expanduser(given))
        resolved[section] = {**resolved[section], field: path}
        written[f"{section}.{field}"] = given
    return resolved, written


def _is_relative(section: str, given: str) -> bool:
    if section == "data" and given == PYTHON_STDLIB:
        return False
    is_text = bool(given.strip()) and given.isprintable() and given == given.strip()
    return is_text and not given.startswith("/") and scheme_of(given) is None
