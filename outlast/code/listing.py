"""Which files of a folder are its code: what git would commit, or what .gitignore leaves.

In a git work tree git itself says it, with all its rules; where it cannot, nothing is sent: what
it ignores may be secrets. Anywhere else the folder is walked, and its .gitignore files are read.
`.git` and Python's bytecode are left out in any case: that changes with every run, and the digest
of the folder would, too.
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
# Of a commit in git's index.
_SUBMODULE_MODE = "160000 "
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
        tree = _work_tree_of(root.resolve())
        by = "" if tree is None else f" by git in the work tree {tree}"
        raise CodeError(
            f"{root} holds no file that is not ignored{by}; change .gitignore, or give another "
            "folder"
        )
    return sorted(found, key=lambda entry: entry.name)


def _entries(root: Path, left_out: GitIgnoreSpec) -> Iterator[Entry]:
    for name in sorted(set(_names(root, "", left_out))):
        if left_out.match_file(name):
            continue
        try:
            found = (root / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
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


def _names(root: Path, prefix: str, left_out: GitIgnoreSpec) -> Iterator[str]:
    """Names of files and links below a folder; it is called `prefix` where it is within another."""
    tree = _work_tree_of(root)
    if tree is None:
        yield from _walked(root, "", ())
        return
    links: dict[str, bool] = {}
    for listed in _listed_by_git(root, tree):
        name = listed.rstrip("/")
        path = root / name
        # What git has of a folder that is a link now is deleted; the link leads to other files.
        if _is_below_link(root, name, links):
            continue
        if path.is_symlink() or not path.is_dir():
            yield name
        elif (path / ".git").exists():
            # A submodule, or a work tree within this one.
            inner = _names(path, f"{prefix}{name}/", left_out)
            yield from (f"{name}/{each}" for each in inner)
        elif _is_submodule(root, name) and not left_out.match_file(f"{prefix}{name}/"):
            raise CodeError(
                f"{prefix}{name} is a submodule of git that is not checked out; do so with `git "
                "submodule update --init`, or leave it out with workload.code.exclude"
            )


def _is_below_link(root: Path, name: str, links: dict[str, bool]) -> bool:
    """Whether a folder that a name is in, below `root`, is a link; `links` has what is known."""
    parent = name.rpartition("/")[0]
    if not parent:
        return False
    if parent not in links:
        links[parent] = (root / parent).is_symlink() or _is_below_link(root, parent, links)
    return links[parent]


def _work_tree_of(folder: Path) -> Path | None:
    """The work tree that a folder is in, looked for as git does; None if it is in none."""
    device = folder.stat().st_dev
    for each in (folder, *folder.parents):
        if each.stat().st_dev != device:
            return None
        # Of a submodule, or of another work tree of the repository, it is a file.
        if (each / ".git").is_file() or os.path.lexists(each / ".git" / "HEAD"):
            return each
    return None


def _listed_by_git(root: Path, tree: Path) -> list[str]:
    """What git lists of a folder in a work tree.

    Raises:
        CodeError: it lists nothing, as it fails or is not there.
    """
    return _git(root, tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def _is_submodule(root: Path, name: str) -> bool:
    """Whether git's index has a commit of another repository by this name."""
    return any(
        line.startswith(_SUBMODULE_MODE)
        for line in _git(root, root, "ls-files", "-z", "--stage", "--", name)
    )


def _git(root: Path, tree: Path, *arguments: str) -> list[str]:
    """What git says of a folder, by lines.

    Raises:
        CodeError: it cannot.
    """
    command = ["git", "-C", str(root), "--literal-pathspecs", "-c", "core.fsmonitor=false"]
    environment = {key: value for key, value in os.environ.items() if key not in _GIT_PLACES}
    why = ""
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            check=False,
            timeout=_GIT_S,
            env=environment,
        )
    except FileNotFoundError:
        why = "git is not installed here"
    except subprocess.TimeoutExpired:
        why = f"git did not answer in {_GIT_S:.0f} s"
    else:
        if not done.returncode:
            return [os.fsdecode(line) for line in done.stdout.split(b"\0") if line]
        # Advice follows after the first line.
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        why = f"git fails: {said or f'exit code {done.returncode}'}"
    raise CodeError(
        f"{root} is in the git work tree {tree}, and what git ignores must not be sent, but {why}; "
        "mend that, or give a copy of the folder outside of the work tree"
    )


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
