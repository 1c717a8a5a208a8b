"""Reading a job spec from a file: YAML or JSON, with every place that is wrong named.

What a file may cost is bounded: its size, how deep it nests, and how much its aliases
expand to. What does not belong here: what the fields mean (`outlast/spec/`).
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outlast.problems import FieldProblem, name_of, shown

# A spec is a few hundred lines at most; this stops a wrong file early.
MAX_SPEC_BYTES = 256 << 10
# A spec with a list entry for every layer of the deepest model has fewer.
_MAX_VALUES = 200_000
_MAX_DEPTH = 50
_MAX_DUPLICATES = 10
_BEGINNINGS = {
    b"\x7fELF": "a program",
    b"PK\x03\x04": "a ZIP archive (a torch.save file is one)",
    b"\x1f\x8b": "a gzip archive",
    b"\x89PNG": "an image",
    b"%PDF": "a PDF",
}
_SCRIPTS = (".py", ".sh", ".ipynb")


class SpecFileError(ValueError):
    """A file that is no job spec at all; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file says, and what is wrong with how it says it."""

    value: object
    problems: tuple[FieldProblem, ...] = ()


def read_document(path: Path | str) -> Document:
    """The document in a YAML or JSON file; "-" is standard input.

    Raises:
        SpecFileError: the file cannot be read, or is neither.
    """
    name = "standard input" if str(path) == "-" else str(path)
    return parse_document(_decoded(_read(path, name), name), name)


def parse_document(text: str, name: str) -> Document:
    """The document in a text; `name` says where it is from.

    Raises:
        SpecFileError: it is neither YAML nor JSON, or expands beyond bounds.
    """
    try:
        if name.endswith(".json") or text.lstrip()[:1] == "{":
            try:
                return _parse_json(text)
            except json.JSONDecodeError as error:
                if name.endswith(".json"):
                    where = f"{name}, line {error.lineno}, column {error.colno}"
                    raise SpecFileError(f"{where}: not JSON: {error.msg}") from error
        return _parse_yaml(text, name)
    except RecursionError as error:
        raise SpecFileError(f"{name} nests too deeply; a job spec has a few levels") from error


def _read(path: Path | str, name: str) -> bytes:
    try:
        if str(path) == "-":
            data = _standard_input()
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_SPEC_BYTES + 1)
    except IsADirectoryError as error:
        found = sorted(each.name for each in Path(path).glob("*.y*ml"))[:5]
        inside = f"such as {Path(name) / found[0]}" if found else "a YAML or JSON file"
        others = f" (also in it: {', '.join(found[1:])})" if found[1:] else ""
        raise SpecFileError(
            f"{name} is a folder; give the path of a job spec, {inside}{others}"
        ) from error
    except FileNotFoundError as error:
        raise SpecFileError(f"cannot read {name}: no such file{_near(Path(path))}") from error
    except OSError as error:
        raise SpecFileError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise SpecFileError(f"cannot read {shown(name)}: it is no path") from error
    if len(data) > MAX_SPEC_BYTES:
        raise SpecFileError(f"{name} is larger than {MAX_SPEC_BYTES >> 10} KiB: not a job spec")
    return data


def _standard_input() -> bytes:
    # A test, or a program that runs ours, may have put text there.
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        return sys.stdin.read(MAX_SPEC_BYTES + 1).encode()
    data: bytes = source.read(MAX_SPEC_BYTES + 1)
    return data


def _near(path: Path) -> str:
    try:
        there = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, there, n=1)
    return f" (did you mean {path.with_name(found[0])}?)" if found else ""


def _decoded(data: bytes, name: str) -> str:
    is_script = name.endswith(_SCRIPTS) or data.startswith(b"#!")
    if is_script:
        raise SpecFileError(
            f"{name} is a script, not a job spec; `outlast run {name}` runs it. A spec that does: "
            f"'name: my-job' and 'workload: {{command: [python, {name}]}}'; `outlast schema` "
            "prints all fields"
        )
    kind = next((what for start, what in _BEGINNINGS.items() if data.startswith(start)), None)
    if kind is None and b"\0" in data and data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        kind = "a binary file"
    if kind is not None:
        raise SpecFileError(f"{name} is {kind}, not a job spec; a spec is YAML or JSON text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecFileError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}; save it as "
            "UTF-8"
        ) from error


def _parse_json(text: str) -> Document:
    problems: list[FieldProblem] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        names = [name for name, _ in pairs]
        for name in made:
            if names.count(name) > 1 and len(problems) < _MAX_DUPLICATES:
                message = f"is given {names.count(name)} times in one section; keep one"
                problems.append(FieldProblem(field=name_of(name), message=message))
        return made

    try:
        value = json.loads(text, object_pairs_hook=mapping)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        raise SpecFileError("a number has more digits than any field allows") from error
    return Document(value=value, problems=tuple(problems))


class _Loader(yaml.SafeLoader):
    """Says where a value stands that cannot be read, and goes no deeper than a spec does."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, IndexError) as error:
            # A date or a number that has only the form of one.
            text = node.value if isinstance(node, yaml.ScalarNode) else node.tag
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(text)} cannot be read; put text in quotes", node.start_mark
            ) from error


def _parse_yaml(text: str, name: str) -> Document:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(value=None)
        _bound(node, name)
        problems = tuple(_duplicates(node))
        return Document(value=loader.construct_document(node), problems=problems)
    except yaml.reader.ReaderError as error:
        raise SpecFileError(
            f"{name} is not YAML: a character that text does not have (#x{error.character:04x})"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise SpecFileError(_explained(error, name)) from error
    finally:
        if loader is not None:
            loader.dispose()


def _explained(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = name if mark is None else f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    what = str(error.problem or error.context)
    if "'\\t'" in what:
        what += "; YAML is indented with spaces, not with tabs"
    if "could not determine a constructor" in what:
        what = "a tag that job specs do not have; leave it out"
    if "unhashable key" in what:
        what = "a list or section where the name of a field belongs"
    if "but found another document" in what:
        what = "a second document begins; a file has one job spec"
    snippet = mark.get_snippet(indent=2, max_length=76) if mark is not None else None
    return f"{where}: not YAML: {what}" + (f"\n{snippet}" if snippet else "")


def _bound(root: yaml.Node, name: str) -> None:
    """Refuse what is too large once its aliases are followed, or has no end."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in open_nodes:
            raise SpecFileError(f"{name}, line {node.start_mark.line + 1}: an alias of itself")
        # Deeper than the file looks where aliases name each other.
        if depth > _MAX_DEPTH:
            raise RecursionError
        open_nodes.add(id(node))
        total = 1 + sum(size(inner, depth + 1) for inner in _inside(node))
        open_nodes.remove(id(node))
        if total > _MAX_VALUES:
            raise SpecFileError(
                f"{name} has more than {_MAX_VALUES:,} values once its aliases are followed: not "
                "a job spec"
            )
        sizes[id(node)] = total
        return total

    size(root, 0)


def _inside(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _duplicates(root: yaml.Node) -> list[FieldProblem]:
    """Fields that are given more than once: YAML would take the last one without a word."""
    problems: list[FieldProblem] = []
    seen: set[int] = set()

    def walk(node: yaml.Node, above: str) -> None:
        if id(node) in seen or len(problems) >= _MAX_DUPLICATES:
            return
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for inner in node.value:
                walk(inner, above)
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[str, list[int]] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(key.value, []).append(key.start_mark.line + 1)
                walk(value, f"{above}{name_of(key.value)}.")
        for name, at in lines.items():
            if len(at) > 1 and name != "<<":
                where = ", ".join(map(str, at[:5]))
                message = f"is given {len(at)} times, in lines {where}; keep one"
                problems.append(FieldProblem(field=f"{above}{name_of(name)}", message=message))

    walk(root, "")
    return problems
