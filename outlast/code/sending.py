"""A job's folder on its way to the controller: packed, and sent unless the controller has it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from outlast.code.archive import Archive, pack
from outlast.code.digest import CHUNK_BYTES
from outlast.code.errors import CodeError
from outlast.problems import FieldProblem, SpecError, shown
from outlast.rules.workload import paths_in_code
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.spec.workload import CodeSpec
from outlast.submission import resolve_places
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeStub

_CALL_TIMEOUT_S = 30.0
# The most that a controller waits.
_UPLOAD_TIMEOUT_S = 600.0


def with_code(document: dict[str, Any], stub: CodeStub) -> dict[str, Any]:
    """The document with the digest of the folder that it names, which the controller then has.

    One that names none, or has the digest already, stays as it is. A relative path is below the
    current folder.

    Raises:
        SpecError: the spec has problems, or the folder cannot be sent, or it lacks what the job
            runs.
        grpc.RpcError: the controller does not take it.
    """
    match document:
        case {"workload": {"code": {"path": str(given), **code}}} if given:
            if code.get("digest") is not None:
                return document
        case _:
            return document
    resolved, _ = resolve_places(document, Path.cwd())
    # Before much is sent in vain.
    spec = parse_spec(resolved)
    limit: code_pb2.FindCodeResponse = stub.FindCode(
        code_pb2.FindCodeRequest(), timeout=_CALL_TIMEOUT_S
    )
    with _packed(spec.workload.code, limit.max_bytes) as archive:
        missing = not_sent(spec, archive.names)
        if missing:
            raise SpecError(tuple(missing))
        _send(archive, stub)
    workload = resolved["workload"]
    sent = {**workload["code"], "digest": archive.digest}
    return {**resolved, "workload": {**workload, "code": sent}}


def not_sent(spec: JobSpec, names: Collection[str]) -> list[FieldProblem]:
    """What a job runs from the folder of its code, and is not among the names of its files."""
    root = spec.workload.code.path or "/"
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    kinds = {"workload.command": names, "workload.working_dir": folders}
    return [
        FieldProblem(
            field=field,
            message=f"is {shown(path)}, which is not among what is sent of {root}: relative paths "
            "are inside of that folder, and what .gitignore or workload.code.exclude names is left "
            "out",
        )
        for field, path in paths_in_code(spec)
        if _place_of(root, path) not in kinds.get(field, {*names, *folders})
    ]


def _place_of(root: str, path: str) -> str:
    """Where a path within a folder leads, also through a link."""
    return os.path.relpath(os.path.realpath(os.path.join(root, path)), os.path.realpath(root))


def _packed(code: CodeSpec, max_bytes: int) -> Archive:
    assert code.path is not None, "of a job that brings a folder"
    try:
        return pack(Path(code.path), code.exclude, max_bytes)
    except CodeError as error:
        problem = FieldProblem(
            field="workload.code.path", message=f"is {shown(code.path)}: {error}"
        )
        raise SpecError((problem,)) from error


def _send(archive: Archive, stub: CodeStub) -> None:
    request = code_pb2.FindCodeRequest(digest=archive.digest)
    if not stub.FindCode(request, timeout=_CALL_TIMEOUT_S).is_here:
        stub.PutCode(_requests(archive), timeout=_UPLOAD_TIMEOUT_S)


def _requests(archive: Archive) -> Iterator[code_pb2.PutCodeRequest]:
    yield code_pb2.PutCodeRequest(digest=archive.digest, size_bytes=archive.size_bytes)
    while data := archive.file.read(CHUNK_BYTES):
        yield code_pb2.PutCodeRequest(data=data)
