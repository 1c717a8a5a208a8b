"""Job specs for commands: read from a file, changed by --set, and checked as far as can be."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli.errors import CliError, bad_input

if TYPE_CHECKING:
    from outlast.cli.places import Nodes, Seen
    from outlast.problems import FieldProblem, SpecError
    from outlast.spec import JobSpec

# A job that trains on a laptop, which comes with the package; the same as the one in examples/.
EXAMPLE = Path(__file__).resolve().parent / "templates" / "gpt-tiny.yaml"

# As most machines with accelerators have.
_RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A spec without problems."""

    spec: JobSpec
    document: dict[str, Any]
    """As the file has it, with --set applied and relative paths made absolute."""
    resolved: tuple[str, ...]
    """What relative paths were taken to mean, in words."""
    seen: Seen


def load_spec(path: Path, assignments: Sequence[str] = (), nodes: Nodes | None = None) -> Checked:
    """The checked spec in a file, whose job is to run on `nodes`.

    Raises:
        CliError: with every problem of the spec that can be seen from here.
    """
    from outlast.cli import places
    from outlast.problems import SpecError
    from outlast.rules.check import check
    from outlast.spec.parse import read_spec
    from outlast.submission import resolve_places

    document, problems = _document(path, assignments)
    document, written = resolve_places(document, Path.cwd())
    spec, unread = read_spec(document)
    problems += unread
    seen = places.Seen()
    if spec is not None:
        problems += check(spec)
        seen = places.look(spec, written, nodes or places.Nodes.UNKNOWN)
        reported = {problem.field for problem in problems}
        problems += [each for each in seen.problems if each.field not in reported]
    if spec is None or problems:
        warnings = [f"  warning: {line}" for line in seen.warnings]
        lines = [describe_problems(path, SpecError(tuple(problems))), *warnings]
        raise CliError("\n".join(lines))
    resolved = tuple(places.resolved_lines(spec, written))
    return Checked(spec=spec, document=document, resolved=resolved, seen=seen)


def load_open_spec(
    path: Path, assignments: Sequence[str], open_fields: Collection[str], resources: dict[str, int]
) -> JobSpec:
    """The spec in a file whose layout is still to be found, on nodes as `resources` say.

    `parallel` is without its `open_fields`, but for `zero.communication`; rules of several fields
    are not applied.

    Raises:
        CliError: with every problem of a field by itself.
    """
    from outlast.problems import SpecError
    from outlast.spec.parse import read_spec

    document, problems = _document(path, assignments)
    parallel = document.get("parallel", {})
    if isinstance(parallel, dict):
        kept = {name: value for name, value in parallel.items() if name not in open_fields}
        zero = parallel.get("zero")
        # Whatever level is found, gradients are sent as the spec says.
        if "zero" in open_fields and isinstance(zero, dict) and "communication" in zero:
            kept["zero"] = {"communication": zero["communication"]}
        # One that is not there would be computed, from nodes that other degrees may not fill.
        document["parallel"] = {"dp": 1, **kept}
    given = document.get("resources", {})
    if isinstance(given, dict):
        per_node = given.get("workers_per_node") or _RANKS_PER_NODE
        document["resources"] = {**given, "workers_per_node": per_node, **resources}
    spec, unread = read_spec(document)
    problems += unread
    if spec is None or problems:
        raise CliError(describe_problems(path, SpecError(tuple(problems))))
    return spec


def set_value(document: dict[str, Any], assignment: str) -> None:
    """Apply one `--set a.b.c=value` to a parsed spec, in place.

    The value is read as JSON where it is JSON, a list or section also as YAML, else as a string.
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
    target[keys[-1]] = _value(text)


def _value(text: str) -> object:
    from outlast.specfile import SpecFileError, parse_document

    try:
        return json.loads(text)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")):
            return text
    try:
        # A list of bare words, as a spec has it.
        return parse_document(text, "--set").value
    except SpecFileError:
        return text


def describe_problems(what: Path | str, error: SpecError) -> str:
    """Every problem of a spec, one a line."""
    from outlast.problems import described

    name = "standard input" if str(what) == "-" else what
    return described(name, error.problems)


def _document(path: Path, assignments: Sequence[str]) -> tuple[dict[str, Any], list[FieldProblem]]:
    from outlast.problems import SpecError
    from outlast.spec.parse import read_spec
    from outlast.specfile import SpecFileError, read_document

    try:
        read = read_document(path)
    except SpecFileError as error:
        raise CliError(str(error)) from error
    if not isinstance(read.value, dict):
        raise CliError(describe_problems(path, SpecError(tuple(read_spec(read.value)[1]))))
    for assignment in assignments:
        with bad_input():
            set_value(read.value, assignment)
    return read.value, list(read.problems)
