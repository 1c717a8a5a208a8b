"""Reading a job spec from a file, with the changes asked for on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli.errors import CliError

if TYPE_CHECKING:
    from outlast.spec import JobSpec, SpecError

# A spec is a few hundred lines at most; this stops a wrong file early.
MAX_SPEC_BYTES = 1 << 20


def load_document(path: Path, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, with each `a.b=value` applied.

    Raises:
        CliError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml

    try:
        document = yaml.safe_load(_read(path))
    except yaml.YAMLError as error:
        raise CliError(f"{path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise CliError(f"{path}: a job spec is a mapping, not {type(document).__name__}")
    for assignment in assignments:
        try:
            set_value(document, assignment)
        except ValueError as error:
            raise CliError(str(error)) from error
    return document


def load_spec(path: Path, assignments: Sequence[str] = ()) -> JobSpec:
    """The checked spec in a file.

    Raises:
        CliError: with every problem of the spec.
    """
    from outlast.spec import SpecError, parse_spec

    try:
        return parse_spec(load_document(path, assignments))
    except SpecError as error:
        raise CliError(describe_problems(path, error)) from error


def set_value(document: dict[str, Any], assignment: str) -> None:
    """Apply one `--set a.b.c=value` to a parsed spec, in place.

    The value is read as JSON where it is JSON, else as a string.
    """
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {assignment!r}: expected path=value, such as parallel.tp=2")
    target = document
    for key in keys[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--set {assignment!r}: {key} is a value, not a section")
        target = inner
    try:
        target[keys[-1]] = json.loads(text)
    except json.JSONDecodeError:
        target[keys[-1]] = text


def describe_problems(what: Path | str, error: SpecError) -> str:
    """Every problem of a spec, one a line."""
    lines = [f"{what} has {len(error.problems)} problem(s):"]
    lines += [f"  {problem.field}: {problem.message}" for problem in error.problems]
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.read(MAX_SPEC_BYTES)
        with path.open("rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_SPEC_BYTES:
        raise CliError(f"{path} is larger than {MAX_SPEC_BYTES >> 20} MiB: not a job spec")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not UTF-8 text: {error.reason}") from error
