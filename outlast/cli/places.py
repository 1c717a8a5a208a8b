"""Files that a spec names, looked at from here: what a job would otherwise fail on later."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.core import names
from checkpoint.drivers import missing_driver
from outlast.problems import FieldProblem, collect, shown
from outlast.rules.data import check_tokens
from outlast.rules.loads import wrong_with_model
from outlast.rules.places import local_path, wrong_with_place, wrong_with_steps
from outlast.sources import Source, survey

if TYPE_CHECKING:
    from checkpoint.core.manifest import Manifest
    from outlast.spec import JobSpec

_OWNERS = {"model.seq_len": "data.source", "checkpoint.load_step": "checkpoint.load"}
# How names of parameters begin in a checkpoint, beside those of the optimizer's state.
_MODEL = "model."
_UNCERTAIN = "(on this machine; what counts is what the nodes have)"


class Nodes(Enum):
    """Where a job's nodes are, as far as it is known here."""

    HERE = "this machine"
    ELSEWHERE = "other machines"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found in the files of this machine."""

    problems: tuple[FieldProblem, ...] = ()
    warnings: tuple[str, ...] = ()
    source: Source | None = None


def look(spec: JobSpec, written: Mapping[str, str], nodes: Nodes) -> Seen:
    """The files that `spec` names; `written` has the paths that were relative, by field.

    A path that only nodes may have is a problem where the nodes are this machine, and a
    warning elsewhere. A relative path is the submitter's, so what it names must be here.
    """
    source: list[Source] = []
    rules: tuple[Callable[[JobSpec], list[FieldProblem]], ...] = (
        lambda spec: _look_at_source(spec, source),
        _look_at_drivers,
        _look_at_url,
        _look_at_load,
    )
    problems, warnings = [], []
    for found in collect(rules, spec):
        # What a file or a folder holds is as certain as where it is.
        owner = _OWNERS.get(found.field, found.field)
        message = _as_written(found.message, written.get(found.field))
        problem = FieldProblem(field=found.field, message=message)
        is_read = found.field != "checkpoint.url"
        if nodes is Nodes.HERE or (is_read and owner in written):
            problems.append(problem)
        else:
            warnings.append(f"{problem.field} {problem.message} {_UNCERTAIN}")
    return Seen(
        problems=tuple(problems),
        warnings=tuple(warnings),
        source=source[0] if source else None,
    )


def resolved_lines(spec: JobSpec, written: Mapping[str, str]) -> list[str]:
    """What relative paths were taken to mean."""
    found = []
    for field, given in written.items():
        section, name = field.split(".")
        found.append(f"{field}: {given} is {getattr(getattr(spec, section), name)}")
    return found


def _as_written(message: str, given: str | None) -> str:
    """Begin with the value as the spec has it, with what it was taken to mean."""
    if given is None:
        return message
    return message.replace("is ", f"is {shown(given)}, taken as ", 1)


def _look_at_source(spec: JobSpec, found: list[Source]) -> list[FieldProblem]:
    source = spec.data.source
    if not (source.startswith("/") or source == "python-stdlib"):
        return []
    try:
        held = survey(source, spec.data.max_bytes)
    except ValueError as error:
        message = f"is {shown(source)}, which {error}; give a text file or a folder with some"
        return [FieldProblem(field="data.source", message=message)]
    found.append(held)
    if held.nbytes >= spec.data.max_bytes:
        # That many tokens are a rule of the spec.
        return []
    return check_tokens(spec, held.nbytes, f"all of data.source = {source}")


def _look_at_drivers(spec: JobSpec) -> list[FieldProblem]:
    """Packages that read the stores of the spec, before a node misses one."""
    found = []
    for name in ("url", "load"):
        url: str | None = getattr(spec.checkpoint, name)
        if url is None or wrong_with_place(url, ""):
            continue
        missing = missing_driver(url)
        if missing is not None:
            message = f"is {shown(url)}; {missing}"
            found.append(FieldProblem(field=f"checkpoint.{name}", message=message))
    return found


def _look_at_url(spec: JobSpec) -> list[FieldProblem]:
    url = spec.checkpoint.url
    path = None if url is None or wrong_with_place(url, "") else local_path(url)
    why = None if path is None else _unwritable(Path(path))
    if why is None:
        return []
    message = f"is {shown(url)}, where nothing can be written: {why}; give a folder with room"
    return [FieldProblem(field="checkpoint.url", message=message)]


def _unwritable(folder: Path) -> str | None:
    """Why no files can be made below `folder`; None if they can."""
    try:
        present = next(each for each in (folder, *folder.parents) if each.exists())
        if not present.is_dir():
            return f"{present} is not a folder"
        if not os.access(present, os.W_OK | os.X_OK):
            return f"no permission to write to {present}"
        if os.statvfs(present).f_flag & os.ST_RDONLY:
            return f"the file system of {present} is read-only"
        # A view of the kernel and not a disk, such as /proc.
        return f"{present} is not on a disk" if shutil.disk_usage(present).total == 0 else None
    except OSError as error:
        return error.strerror or errno.errorcode.get(error.errno or 0, "it cannot be read")


def _look_at_load(spec: JobSpec) -> list[FieldProblem]:
    url = spec.checkpoint.load
    path = None if url is None or wrong_with_place(url, "") else local_path(url)
    if path is None or url is None:
        return []
    root = Path(path)
    steps = _committed(root)
    if not root.is_dir():
        why = "which does not exist" if not root.exists() else "which is not a folder"
    elif not steps:
        why = "which has no committed checkpoint; give the folder of one job"
        inside = [each.parent.name for each in root.glob(f"*/{names.COMMITS}")]
        if inside:
            why += f", such as {root / min(inside)}"
    else:
        wanted = spec.checkpoint.load_step
        wrong = wrong_with_steps(url, steps, wanted, spec.steps)
        if wrong is not None:
            field = "checkpoint.load" if wanted is None else "checkpoint.load_step"
            return [FieldProblem(field=field, message=wrong)]
        return _of_another_model(spec, url, steps[::-1] if wanted is None else [wanted])
    remedy = "" if ";" in why else "; `outlast status JOB` prints where a job's checkpoints lie"
    return [FieldProblem(field="checkpoint.load", message=f"is {shown(url)}, {why}{remedy}")]


def _of_another_model(spec: JobSpec, url: str, steps: Sequence[int]) -> list[FieldProblem]:
    """Whether the first of these checkpoints that can be read is of a model of another size."""
    from outlast.sizing.of_spec import num_parameters

    found = _first_readable(url, steps)
    if found is None:
        return []
    step, manifest = found
    wrong = wrong_with_model(url, step, manifest.tensors, spec)
    if wrong is not None:
        return [FieldProblem(field="checkpoint.load", message=wrong)]
    shapes = [shape for name, (_, shape) in manifest.tensors.items() if name.startswith(_MODEL)]
    held, needed = sum(map(math.prod, shapes)), num_parameters(spec)
    if not shapes or held == needed:
        return []
    message = (
        f"is {shown(url)}, whose step {step} holds a model of {held:,} parameters, and that of the "
        f"model section has {needed:,}; give the model section of the job that saved it "
        "(`outlast status JOB --json` has its spec)"
    )
    return [FieldProblem(field="checkpoint.load", message=message)]


def _first_readable(url: str, steps: Sequence[int]) -> tuple[int, Manifest] | None:
    """As a job does that passes over damaged ones for the next older."""
    from checkpoint.storage import Storage
    from outlast.errors import OutlastError

    storage = Storage(url)
    for step in steps:
        try:
            return step, storage.read_commit(step)[1]
        except (OutlastError, OSError):
            continue
    return None


def _committed(root: Path) -> list[int]:
    try:
        found = [names.parse_commit(each) for each in os.listdir(root / names.COMMITS)]
    except OSError:
        return []
    return sorted(step for step in found if step is not None)
