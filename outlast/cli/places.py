"""Files that a spec names, looked at from here: what a job would otherwise fail on later."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.core import names
from checkpoint.storage.drivers import missing_driver
from outlast.cli.stored_load import StoredLoad, look_at_load
from outlast.errors import OccupiedError, RetryableError
from outlast.problems import FieldProblem, UnreadError, collect, shown
from outlast.rules.places import NO_CHECKPOINT, local_path, scheme_of, wrong_with_place
from outlast.rules.workload import plain_secrets, script_index
from outlast.sources import Source
from outlast.tokens.fit import TokenSources, look_at_data, token_places

if TYPE_CHECKING:
    from outlast.spec import JobSpec

_OF_DATA = ("data.source", "data.tokens", "data.validation_tokens")
_OWNERS = {
    "model.seq_len": _OF_DATA,
    "model.vocab_size": _OF_DATA,
    "data.validation_fraction": _OF_DATA,
    "data.document_mask": _OF_DATA,
    "data.reset_positions": _OF_DATA,
    "data.packing": _OF_DATA,
    "data.masked.fraction": _OF_DATA,
    "checkpoint.load_step": ("checkpoint.load",),
}
# For a store that does not answer.
_PATIENCE_S = 10.0
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
    source: Source | TokenSources | None = None


def look(spec: JobSpec, written: Mapping[str, str], nodes: Nodes) -> Seen:
    """The places that `spec` names; `written` has the paths that were relative, by field.

    A path that only nodes may have is a problem where the nodes are this machine, and a
    warning elsewhere. A relative path is the submitter's, so what it names must be here.
    """
    source: list[Source | TokenSources] = []
    sent: list[FieldProblem] = []
    loads: list[StoredLoad] = []
    rules: tuple[Callable[[JobSpec], list[FieldProblem]], ...] = (
        lambda spec: _look_at_source(spec, source),
        _look_at_drivers,
        _look_at_url,
        lambda spec: _look_at_load(spec, loads),
        _look_at_workload,
        lambda spec: _look_at_code(spec, sent),
    )
    problems, warnings = [], _secrets(spec)
    for found in collect(rules, spec):
        # What a file or a folder holds is as certain as where it is.
        owners = _OWNERS.get(found.field, (found.field,))
        message = _as_written(found.message, written.get(found.field))
        problem = FieldProblem(field=found.field, message=message)
        is_read = found.field != "checkpoint.url"
        is_everywhere = found in sent or any(
            each.is_everywhere and found in each.problems for each in loads
        )
        if (
            nodes is Nodes.HERE
            or is_everywhere
            or (is_read and any(owner in written for owner in owners))
        ):
            problems.append(problem)
        else:
            warnings.append(f"{problem.field} {problem.message} {_UNCERTAIN}")
    return Seen(
        problems=tuple(problems),
        warnings=(*warnings, *(each.warning for each in loads if each.warning)),
        source=source[0] if source else None,
    )


def resolved_lines(spec: JobSpec, written: Mapping[str, str]) -> list[str]:
    """What relative paths were taken to mean."""
    found = []
    for field, given in written.items():
        value: object = spec
        for name in field.split("."):
            value = getattr(value, name)
        found.append(f"{field}: {given} is {_meant(field, value)}")
    return found


def _meant(field: str, value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(value)
    if not isinstance(value, dict):
        return value
    # A blend has its paths as names, held-out sets have theirs behind the names of sets.
    return ", ".join(value.values() if field == "data.validation_tokens" else value)


def _secrets(spec: JobSpec) -> list[str]:
    try:
        return plain_secrets(spec)
    except UnreadError:
        return []


def _as_written(message: str, given: str | None) -> str:
    """Begin with the value as the spec has it, with what it was taken to mean."""
    if given is None:
        return message
    return message.replace("is ", f"is {shown(given)}, taken as ", 1)


def _look_at_workload(spec: JobSpec) -> list[FieldProblem]:
    """The script of a command, and the folders it runs with."""
    workload, problems = spec.workload, []
    if workload.image is not None:
        # What is in it only its nodes know.
        return []
    command = workload.command or ()
    script = script_index(command)
    if (
        script is not None
        and command[script].startswith("/")
        and not Path(command[script]).is_file()
    ):
        problems.append(_missing("workload.command", command[script], "no file"))
    working_dir, python_path = workload.working_dir, workload.python_path
    if workload.code.is_given:
        # The relative ones are of the folder that is sent.
        working_dir = working_dir if (working_dir or "").startswith("/") else None
        python_path = tuple(each for each in python_path if each.startswith("/"))
    if working_dir is not None and not Path(working_dir).is_dir():
        problems.append(_missing("workload.working_dir", working_dir, "no folder"))
    problems += [
        _missing("workload.python_path", each, "no folder or archive")
        for each in python_path
        if not Path(each).exists()
    ]
    return problems


def _look_at_code(spec: JobSpec, sent: list[FieldProblem]) -> list[FieldProblem]:
    """The folder that is sent, and what must be in it; these problems go to `sent`, too."""
    code = spec.workload.code
    if code.path is None or code.digest is not None or not code.path.startswith("/"):
        return []
    from outlast.code.errors import CodeError
    from outlast.code.listing import entries_of
    from outlast.code.sending import not_sent

    try:
        found = {entry.name for entry in entries_of(Path(code.path), code.exclude)}
    except CodeError as error:
        sent.append(
            FieldProblem(field="workload.code.path", message=f"is {shown(code.path)}: {error}")
        )
        return sent
    sent += not_sent(spec, found)
    return sent


def _missing(field: str, path: str, what: str) -> FieldProblem:
    message = f"is {shown(path)}, and there is {what} of that name; give one that nodes have"
    return FieldProblem(field=field, message=message)


def _look_at_source(spec: JobSpec, found: list[Source | TokenSources]) -> list[FieldProblem]:
    if spec.is_script:
        return []
    if all(scheme_of(name) is None for _, name in token_places(spec)):
        problems, held = look_at_data(spec, lambda url: None)
    else:
        from outlast.remote.files import files_of_command

        # A person waits, and training asks again anyway.
        reading = files_of_command(spec.data.cache_bytes, patience_s=_PATIENCE_S)
        try:
            with reading as files:
                problems, held = look_at_data(spec, files.open)
        except (RetryableError, OccupiedError, OSError) as error:
            message = f"cannot be looked at now: {error}"
            return [FieldProblem(field="data.tokens", message=message)]
    if held is not None:
        found.append(held)
    return problems


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


def _look_at_load(spec: JobSpec, found: list[StoredLoad]) -> list[FieldProblem]:
    url = spec.checkpoint.load
    if url is None or wrong_with_place(url, ""):
        return []
    path = local_path(url)
    if path is None:
        return [] if missing_driver(url) else _look_into(spec, url, found)
    root = Path(path)
    if not root.is_dir():
        why = "which does not exist" if not root.exists() else "which is not a folder"
    elif not _committed(root):
        why = f"which {NO_CHECKPOINT}"
        inside = [each.parent.name for each in root.glob(f"*/{names.COMMITS}")]
        if inside:
            why += f", such as {root / min(inside)}"
    else:
        return _look_into(spec, url, found)
    remedy = "" if ";" in why else "; `outlast status JOB` prints where a job's checkpoints lie"
    return [FieldProblem(field="checkpoint.load", message=f"is {shown(url)}, {why}{remedy}")]


def _look_into(spec: JobSpec, url: str, found: list[StoredLoad]) -> list[FieldProblem]:
    found.append(look_at_load(spec, url))
    return [*found[-1].problems]


def _committed(root: Path) -> list[int]:
    try:
        found = [names.parse_commit(each) for each in os.listdir(root / names.COMMITS)]
    except OSError:
        return []
    return sorted(step for step in found if step is not None)
