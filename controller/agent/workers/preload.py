"""What a standby process imports for the script of a job, beside what it imports always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outlast.rules.workload import script_index
from outlast.script_command import start_of
from outlast.spec import JobSpec

# The standby has them in any case.
_ALWAYS = ("numpy", "torch", "torch.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Modules, the folders that they are looked for in first, and variables that they may read."""

    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """For the standby process."""
        named = [("--extra", module) for module in self.modules]
        named += [("--folder", folder) for folder in self.folders]
        return [word for pair in named for word in pair]


NOTHING = Preload()


def preload_of(spec: JobSpec, executable: str) -> Preload:
    """What the standby is to import for a job; `executable` is its interpreter."""
    workload = spec.workload
    command = workload.command
    if command is None or workload.preload == "off":
        return NOTHING
    modules = tuple(module for module in workload.preload if module not in _ALWAYS)
    # Another interpreter cannot be forked from this one.
    is_forked = start_of(command, executable=executable, python=workload.python or "").python
    if not modules or not is_forked:
        return NOTHING
    where = Path(workload.working_dir or os.sep)
    script = script_index(command)
    own = str(where if script is None else (where / command[script]).parent)
    folders = dict.fromkeys((own, *workload.python_path))
    return Preload(modules=modules, folders=tuple(folders), environment=workload.env)
