"""Relative paths in a spec are the submitter's: made absolute before the spec goes anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from outlast.rules.data import PYTHON_STDLIB
from outlast.rules.places import scheme_of
from outlast.rules.workload import script_index
from outlast.script_command import is_python

_PLACES = (
    ("data", "source"),
    ("checkpoint", "url"),
    ("checkpoint", "load"),
    ("workload", "working_dir"),
)


def resolve_places(
    document: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with its relative paths below `folder`, and by field what was written there.

    `~` is the submitter's home, as in a shell. Anything that is no path stays as it is: the
    rules of the spec will say so.
    """
    resolved, written = dict(document), {}
    has_code, has_image = _has_code(resolved), _has_image(resolved)
    for section, field in _PLACES:
        inside = resolved.get(section)
        given = inside.get(field) if isinstance(inside, dict) else None
        if section == "workload" and (has_code or has_image):
            continue
        if not isinstance(given, str) or not _is_relative(section, given):
            continue
        path = _below(folder, given)
        resolved[section] = {**resolved[section], field: path}
        written[f"{section}.{field}"] = given
    _resolve_tokens(resolved, written, folder)
    if has_code:
        _resolve_code(resolved, written, folder)
    elif not has_image:
        _resolve_workload(resolved, written, folder)
    return resolved, written


def _resolve_tokens(resolved: dict[str, Any], written: dict[str, str], folder: Path) -> None:
    """The same for paths of tokens: those of a blend are names of a section."""
    data = resolved.get("data")
    if not isinstance(data, dict):
        return
    relative: list[str] = []

    def below(tokens: object) -> object:
        if _is_text(tokens) and _is_relative("data", tokens):
            relative.append(tokens)
            return _below(folder, tokens)
        if isinstance(tokens, dict):
            return {below(path): weight for path, weight in tokens.items()}
        return tokens

    changed = {"tokens": below(data["tokens"])} if "tokens" in data else {}
    if relative:
        written["data.tokens"] = ", ".join(relative)
    relative.clear()
    if "validation_tokens" in data:
        given = data["validation_tokens"]
        is_named = isinstance(given, dict)
        changed["validation_tokens"] = (
            {name: below(path) for name, path in given.items()} if is_named else below(given)
        )
    if relative:
        written["data.validation_tokens"] = ", ".join(relative)
    if isinstance(changes := data.get("blend_changes"), list | tuple):
        changed["blend_changes"] = [
            {**change, "tokens": below(change["tokens"])}
            if isinstance(change, dict) and "tokens" in change
            else change
            for change in changes
        ]
    resolved["data"] = {**data, **changed}


def _has_code(document: Mapping[str, Any]) -> bool:
    """Whether the job brings the folder that its own relative paths are in."""
    workload = document.get("workload")
    code = workload.get("code") if isinstance(workload, dict) else None
    # A spec that was written out has both as null.
    return isinstance(code, dict) and any(code.get(each) for each in ("path", "digest"))


def _has_image(document: Mapping[str, Any]) -> bool:
    """Whether the job's paths are those of an image, of which the submitter's folder is no part."""
    workload = document.get("workload")
    return isinstance(workload, dict) and workload.get("image") is not None


def _resolve_code(resolved: dict[str, Any], written: dict[str, str], folder: Path) -> None:
    code = resolved["workload"]["code"]
    given = code.get("path")
    if isinstance(given, str) and _is_relative("workload", given):
        path = _below(folder, given)
        resolved["workload"] = {**resolved["workload"], "code": {**code, "path": path}}
        written["workload.code.path"] = given


def _resolve_workload(resolved: dict[str, Any], written: dict[str, str], folder: Path) -> None:
    """The same for the script of a command, and for the folders that Python looks into."""
    inside = resolved.get("workload")
    if not isinstance(inside, dict):
        return
    inside = _with_interpreters(inside, written, folder)
    command, folders = inside.get("command"), inside.get("python_path")
    script = script_index(command) if isinstance(command, list) else None
    if isinstance(command, list) and script is not None:
        given = command[script]
        if _is_relative("workload", given) and not _is_found_as_written(
            inside, given, folder, written
        ):
            path = _below(folder, given)
            inside = {**inside, "command": [*command[:script], path, *command[script + 1 :]]}
            written["workload.command"] = ", ".join(
                [*filter(None, [written.get("workload.command")]), given]
            )
    if isinstance(folders, list):
        relative = [each for each in folders if _is_text(each) and _is_relative("workload", each)]
        paths = [_below(folder, each) if each in relative else each for each in folders]
        inside = {**inside, "python_path": paths}
        if relative:
            written["workload.python_path"] = ", ".join(relative)
    resolved["workload"] = inside


def _with_interpreters(
    workload: Mapping[str, Any], written: dict[str, str], folder: Path
) -> Mapping[str, Any]:
    """A workload whose Python is found from any folder; a name alone is looked for in the path."""
    python, command = workload.get("python"), workload.get("command")
    if _is_text(python) and _is_place(python):
        written["workload.python"] = python
        workload = {**workload, "python": _below(folder, python)}
    if not isinstance(command, list) or not command:
        return workload
    program, *arguments = command
    if _is_text(program) and _is_place(program) and is_python(program):
        written["workload.command"] = program
        workload = {**workload, "command": [_below(folder, program), *arguments]}
    return workload


def _below(folder: Path, given: str) -> str:
    return os.path.normpath(folder / os.path.expanduser(given))


def _is_place(program: str) -> bool:
    """Whether it is a relative path, and not a name of the path."""
    return "/" in program and _is_relative("workload", program)


def _is_found_as_written(
    workload: Mapping[str, Any], script: str, folder: Path, written: Mapping[str, str]
) -> bool:
    """Whether ranks run in this very folder by the full path that was given: then a relative path
    of the script can stay as it is, as sys.argv[0] does with torchrun."""
    is_given_whole = "workload.working_dir" not in written
    is_here = workload.get("working_dir") == os.path.normpath(folder)
    return is_given_whole and is_here and not script.startswith("~")


def _is_text(given: object) -> TypeGuard[str]:
    return isinstance(given, str)


def _is_relative(section: str, given: str) -> bool:
    if section == "data" and given == PYTHON_STDLIB:
        return False
    is_text = bool(given.strip()) and given.isprintable() and given == given.strip()
    return is_text and not given.startswith("/") and scheme_of(given) is None
