"""Imports what a script wants before the standby process forks, and leaves out what would hang.

A fork has one thread: a module that starts others as it is imported, opens a socket or takes hold
of a GPU would be broken in it. That is known only afterwards, and nothing takes an import back: so
the process begins anew, without that module, and says why.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Its words end here: a message may be as long as a traceback.
_MOST_CHARS = 200
# What scripts use of ours.
_SESSION = "outlast.session"


@dataclass(slots=True, kw_only=True)
class Preloaded:
    """What was imported beside our own modules."""

    left_out: dict[str, str] = field(default_factory=dict)
    """By module, why a fork has to import it."""
    spoiled_by: str = ""
    """The module after which this process is of no use; "" for none."""
    is_installed: bool = True
    """All that was imported is where packages are installed, whose files seldom change."""


def preload(
    modules: Sequence[str],
    folders: Sequence[str],
    left_out: Mapping[str, str],
    packages: Collection[str],
) -> Preloaded:
    """Import modules, looked for in `folders` first; those that are left out already are not.

    Nor are `packages`, which are ours.
    """
    done = Preloaded(left_out=dict(left_out))
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = folders
    try:
        for module in modules:
            if module in done.left_out:
                continue
            reason, is_spoiled = _import(module, packages)
            if reason:
                done.left_out[module] = reason[:_MOST_CHARS]
            if is_spoiled:
                done.spoiled_by = module
                break
    finally:
        # A script looks in its own folders.
        sys.path[:] = before
    done.is_installed = _are_installed(set(sys.modules) - known)
    return done


def _import(module: str, packages: Collection[str]) -> tuple[str, bool]:
    """Why a module is left out, "" if it is not; and whether it has spoiled this process."""
    if module.partition(".")[0] in packages and not module.startswith(_SESSION):
        return "Outlast has a package of that name", False
    sockets = _sockets()
    try:
        importlib.import_module(module)
        reason = ""
    # Whatever a module does as it is imported: the script will meet it, too.
    except BaseException as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
    spoils = _what_spoils(sockets)
    return spoils or reason, bool(spoils)


def _are_installed(modules: Iterable[str]) -> bool:
    paths = sysconfig.get_paths()
    places = {os.path.realpath(paths[name]) for name in ("stdlib", "purelib", "platlib")}
    files = (getattr(sys.modules[name], "__file__", None) for name in modules)
    found = {os.path.dirname(file) for file in files if file}
    return all(
        os.path.join(os.path.realpath(folder), "").startswith(
            tuple(os.path.join(place, "") for place in places)
        )
        for folder in found
    )


def _what_spoils(sockets: frozenset[str]) -> str:
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"it starts {num_threads - 1} thread{'' if num_threads == 2 else 's'}"
    if _sockets() - sockets:
        return "it opens a socket"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it takes hold of a GPU"
    return ""


def _sockets() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        # The listing's own descriptor is closed already.
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return frozenset(found)
