"""Which files of a folder are its code: what git would commit, or what .gitignore leaves.

In a git work tree git itself says it, with all its rules. Anywhere else the folder is walked, and
its .gitignore files are read. `.git` and Python's bytecode are left out in any case: that changes
with every run, and the digest of the folder would, too.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from outlast.code.errors import CodeError
from outlast.code.names import leads_out, wrong_with_name

_ALWAYS_LEFT_OUT = (".git", "__pycache__/", "*.pyc")
# Of a work tree with a million files; a file system that hangs is not waited for.
_GIT_S = 60.0
# A hook of git sets them, and they would name another work tree.
_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of the folder, or a link in it."""

    name: str
    """Below the folder, with `/` between its parts."""
    path: Path
    size_bytes: int = 0
    is_executable: bool = False
    target: str | None = None
    """Where a link leads, from where it stands; None of a file."""


def entries_of(root: Path, exclude: Sequence[str] = ()) -> list[Entry]:
    """The files and links of a folder by name; `exclude` has more patterns as in .gitignore.

    Raises:
        CodeError: it is no folder, it holds nothing, or it has what cannot be sent.
    """
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise CodeError(f"{root} {what}; give the folder of the job's code")
    try:
        left_out = GitIgnoreSpec.from_lines((*_ALWAYS_LEFT_OUT, *exclude))
    except ValueError as error:
        raise CodeError(f"a pattern of what to leave out is wrong: {error}") from error
    try:
        found = list(_entries(root.resolve(), left_out))
    except OSError as error:
        raise CodeError(f"{error.filename or root} cannot be read: {error.strerror}") from error
    if not found:
        raise CodeError(f"{root} holds no file that is not ignored")
    return sorted(found, key=lambda entry: entry.name)


def _entries(root: Path, left_out: GitIgnoreSpec) -> Iterator[Entry]:
    for name in sorted(set(_names(root))):
        if left_out.match_file(name):
            continue
        try:
            found = (root / name).lstat()
        except FileNotFoundError:
            # In git's index, and deleted.
            continue
        yield _entry(root, name, found)


def _entry(root: Path, name: str, found: os.stat_result) -> Entry:
    wrong = wrong_with_name(name)
    if wrong is not None:
        raise CodeError(f"the name of a file {wrong}: {name!a}; rename it or leave it out")
    path = root / name
    if stat.S_ISLNK(found.st_mode):
        return Entry(name=name, path=path, target=_target(root, name))
    if not stat.S_ISREG(found.st_mode):
        raise CodeError(f"{name} is a pipe, socket or device, which cannot be sent; leave it out")
    return Entry(
        name=name,
        path=path,
        size_bytes=found.st_size,
        is_executable=bool(found.st_mode & stat.S_IXUSR),
    )


def _target(root: Path, name: str) -> str:
    path = root / name
    target = os.readlink(path)
    place = Path(os.path.realpath(path))
    if leads_out(name, target) or not place.is_relative_to(root):
        raise CodeError(
            f"{name} is a link to {target}, which leads out of {root}; leave it out, or put what "
            "it leads to in its place"
        )
    return target


def _names(root: Path) -> Iterator[str]:
    """Names of files and links below a folder."""
    listed = _listed_by_git(root)
    # A folder that its work tree ignores as a whole has its own rules.
    if not listed:
        yield from _walked(root, "", ())
        return
    for name in listed:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            # A submodule, or a work tree within this one.
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path))
        else:
            yield name


def _listed_by_git(root: Path) -> list[str] | None:
    """What git lists of a folder; None where it is no work tree, or there is no git."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "ls-files", "-z"]
    environment = {key: value for key, value in os.environ.items() if key not in _GIT_PLACES}
    try:
        done = subprocess.run(
            [*command, "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            check=False,
            timeout=_GIT_S,
            env=environment,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise CodeError(f"git did not list {root} in {_GIT_S:.0f} s") from error
    if done.returncode:
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path, prefix: str, rules: tuple[tuple[str, GitIgnoreSpec], ...]) -> Iterator[str]:
    """Names below a folder that no .gitignore leaves out; `rules` are those of folders above."""
    own = root / prefix / ".gitignore"
    if own.is_file():
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
        rules = ((prefix, GitIgnoreSpec.from_lines(lines)), *rules)
    with os.scandir(root / prefix) as found:
        inside = sorted(found, key=lambda each: each.name)
    for each in inside:
        name = prefix + each.name
        is_folder = each.is_dir(follow_symlinks=False)
        if each.name == ".git" or _is_ignored(f"{name}/" if is_folder else name, rules):
            continue
        if is_folder:
            yield from _walked(root, f"{name}/", rules)
        else:
            yield name


def _is_ignored(name: str, rules: Iterable[tuple[str, GitIgnoreSpec]]) -> bool:
    """Whether the rules say so; those of the nearest folder come first, and win."""
    for prefix, spec in rules:
        included = spec.check_file(name[len(prefix) :]).include
        if included is not None:
            return included
    return False
