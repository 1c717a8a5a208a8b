"""Our own packages in a fork: out of a script's sight, and not imported once more if it wants them.

A script that imports `outlast.session` gets the modules that its process has already, unless its
own folders hold a package of that name: that comes first, as in a new interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def keep_aside(packages: Collection[str]) -> None:
    """Take packages out of `sys.modules`; an import of what was there gives it back."""
    kept = {name: module for name, module in sys.modules.items() if _top(name) in packages}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, _Kept(kept))


class _Kept(MetaPathFinder):
    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None or module.__spec__ is None or not self._is_ours(fullname, path):
            return None
        return ModuleSpec(
            fullname,
            _AsItIs(module, module.__spec__),
            origin=module.__spec__.origin,
            is_package=module.__spec__.submodule_search_locations is not None,
        )

    def _is_ours(self, fullname: str, path: Sequence[str] | None) -> bool:
        """Whether a search would find the module that is kept."""
        top = _top(fullname)
        if fullname != top:
            return sys.modules.get(top) is self._modules[top]
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(fullname, path)
            if found is not None:
                ours = self._modules[top].__file__
                return bool(found.origin and ours and is_same_file(found.origin, ours))
        return False


class _AsItIs(Loader):
    """Gives a module that has been executed, and leaves it as it is."""

    def __init__(self, module: ModuleType, spec: ModuleSpec) -> None:
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import has put its own in the place.
        module.__spec__ = self._spec


def _top(name: str) -> str:
    return name.partition(".")[0]


def is_same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
