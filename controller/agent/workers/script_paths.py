"""Relative paths of a job that brings its code: where they are on this node."""

from __future__ import annotations

import os
from pathlib import Path

from outlast.rules.workload import script_index
from outlast.spec import JobSpec


def in_folder(spec: JobSpec, folder: Path) -> JobSpec:
    """The spec of a script with its relative paths below `folder`, where its ranks run.

    The script's own stays relative where ranks run in that very folder, as with torchrun.
    """
    workload = spec.workload
    command = workload.command or ()
    working_dir = _below(folder, workload.working_dir or ".")
    script = script_index(command)
    if script is not None and working_dir != str(folder):
        path = _below(folder, command[script])
        command = (*command[:script], path, *command[script + 1 :])
    places = {
        "command": command,
        "working_dir": working_dir,
        "python_path": tuple(_below(folder, each) for each in workload.python_path),
    }
    return spec.model_copy(update={"workload": workload.model_copy(update=places)})


def script_folders_of(spec: JobSpec) -> tuple[str, ...]:
    """Where a script looks for modules first: beside itself (a module: where it runs), then where
    `workload.python_path` says."""
    workload = spec.workload
    where = Path(workload.working_dir or os.sep)
    script = script_index(workload.command or ())
    own = where if script is None else (where / (workload.command or ())[script]).parent
    return tuple(dict.fromkeys((str(own), *workload.python_path)))


def _below(folder: Path, path: str) -> str:
    """An absolute path stays as it is."""
    return os.path.normpath(folder / path)
