"""Our modules for an interpreter that is not ours: what `outlast.session` and a standby process
need, in one folder.

The folder has one package, `outlast`, so that it takes the place of no module of the script's:
a project may well have a `trainer.py`. What they need of our other packages stands below it, and
the copies import it from there.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from checkpoint.core.names import XXH3_LIBRARY
from outlast.startup import PACKAGES

# What is asked for by name in the other interpreter.
ROOTS = (
    "outlast.session",
    "outlast.integrations",
    "trainer.worker.standby",
    "trainer.worker.script_store",
)
# The one package that is there.
OURS = "outlast"
# Where our other packages stand in the copy.
_BELOW = f"{OURS}.own"
_MOVED = frozenset(PACKAGES) - {OURS}
_HOME = Path(__file__).resolve().parents[3]
_FOLDER = "session"
_DRAFT = "draft-"
_DRAFT_S = 3600.0
_OTHERS_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Needed:
    """What some modules of ours need, themselves included."""

    modules: Mapping[str, Path]
    """Of ours, by name; a package's is its `__init__.py`."""
    others: frozenset[str]
    """Top names of everything else that is imported."""


def needed(roots: tuple[str, ...] = ROOTS) -> Needed:
    """What these modules of ours import, and what that imports, wherever in the code it is.

    A package among `roots` stands for all of its modules.
    """
    modules: dict[str, Path] = {}
    others: set[str] = set()
    wanted = [name for root in roots for each in _all_of(root) for name in _with_parents(each)]
    while wanted:
        name = wanted.pop()
        path = _path_of(name)
        if name in modules or path is None:
            continue
        modules[name] = path
        for found in _imported(ast.parse(path.read_bytes())):
            top = found.partition(".")[0]
            if top in PACKAGES:
                wanted += _with_parents(found)
            else:
                others.add(top)
    return Needed(modules, frozenset(others))


def session_copy(state_dir: Path) -> Path:
    """The folder for the other interpreter's path, below `state_dir`; made unless it is there.

    Raises:
        OSError: it cannot be written.
    """
    files = _files()
    parent = state_dir / _FOLDER
    folder = parent / _digest(files)
    # A power loss or whatever cleans up may have left a part of it.
    if _is_whole(folder, files):
        return folder
    _clean_up(parent)
    draft = parent / f"{_DRAFT}{uuid.uuid4().hex}"
    try:
        for place, content in files.items():
            path = draft / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.is_dir():
            os.replace(folder, parent / f"{_DRAFT}{uuid.uuid4().hex}")
        os.replace(draft, folder)
    except OSError:
        # Another thread may have been faster.
        if not _is_whole(folder, files):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def shadows_ours(folders: Iterable[str]) -> bool:
    """Whether a folder that a script looks in has a module called as a package of ours.

    That of the name `outlast` takes the place of ours, as whoever has it wants it to.
    """
    return any(
        (Path(folder) / f"{name}.py").is_file() or (Path(folder) / name / "__init__.py").is_file()
        for folder in folders
        for name in _MOVED
    )


def _is_whole(folder: Path, files: Mapping[str, bytes]) -> bool:
    try:
        return all((folder / place).read_bytes() == content for place, content in files.items())
    except OSError:
        return False


def _clean_up(parent: Path) -> None:
    """Delete what agents that were killed or that were of other versions have left here.

    What a script of such an agent may still import from is a month old at most.
    """
    for each in parent.glob("*"):
        limit_s = _DRAFT_S if each.name.startswith(_DRAFT) else _OTHERS_S
        with contextlib.suppress(OSError):
            if each.stat().st_mtime < time.time() - limit_s:
                shutil.rmtree(each, ignore_errors=True)


@lru_cache(maxsize=1)
def _files() -> Mapping[str, bytes]:
    """What is in the folder, by path."""
    modules = needed().modules
    files = {_place_of(name, path): moved(path.read_text()) for name, path in modules.items()}
    found = {place: text.encode() for place, text in sorted(files.items())}
    found[str(PurePosixPath(*_BELOW.split("."), "__init__.py"))] = b""
    # Its functions are of use to any interpreter; without them that needs an xxhash of its own.
    library = find_spec("xxhash._xxhash")
    if library is not None and library.origin is not None:
        place = PurePosixPath(*_BELOW.split("."), "checkpoint", XXH3_LIBRARY)
        found[str(place)] = Path(library.origin).read_bytes()
    return found


def moved(source: str) -> str:
    """The text of a module of ours, importing from where our packages stand in the copy."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.partition(".")[0] in _MOVED:
            line = lines[node.lineno - 1]
            rest = line[node.col_offset :].replace("from ", f"from {_BELOW}.", 1)
            lines[node.lineno - 1] = line[: node.col_offset] + rest
    return "".join(lines)


def moved_name(module: str) -> str:
    """What a module of ours is called in the copy."""
    return f"{_BELOW}.{module}" if module.partition(".")[0] in _MOVED else module


def _place_of(name: str, path: Path) -> str:
    parts = moved_name(name).split(".")
    if path.name == "__init__.py":
        return str(PurePosixPath(*parts, "__init__.py"))
    return str(PurePosixPath(*parts[:-1], f"{parts[-1]}.py"))


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for place, content in files.items():
        digest.update(f"{place} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _all_of(root: str) -> list[str]:
    folder = _HOME.joinpath(*root.split("."))
    return [root, *(f"{root}.{path.stem}" for path in sorted(folder.glob("[!_]*.py")))]


def _path_of(name: str) -> Path | None:
    """The file of a module of ours; None where the name is that of something in a module."""
    place = _HOME.joinpath(*name.split("."))
    candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _imported(node: ast.AST) -> Iterator[str]:
    """Names of modules, and of what may be one, but for those that only types need."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for each in child.orelse:
                    yield from _imported(each)
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in child.names)
            case _:
                yield from _imported(child)
