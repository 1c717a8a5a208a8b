"""A job's folder on its way to the controller: packed, and sent unless the controller has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from outlast.code.archive import Archive, pack
from outlast.code.digest import CHUNK_BYTES
from outlast.code.errors import CodeError
from outlast.problems import FieldProblem, SpecError, shown
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeStub

_CALL_TIMEOUT_S = 30.0
# The most that a controller waits.
_UPLOAD_TIMEOUT_S = 600.0


def with_code(document: object, stub: CodeStub) -> object:
    """The document with the digest of the folder that it names, which the controller then has.

    One that names none, or has the digest already, stays as it is. A relative path is below the
    current folder.

    Raises:
        SpecError: the folder cannot be sent.
        grpc.RpcError: the controller does not take it.
    """
    match document:
        case {"workload": {"code": {"path": str(given), **code}, **workload}, **rest} if given:
            if code.get("digest") is not None:
                return document
        case _:
            return document
    exclude = code.get("exclude")
    patterns = [each for each in exclude if isinstance(each, str)] if _is_list(exclude) else []
    folder = Path(os.path.normpath(Path.cwd() / os.path.expanduser(given)))
    limit: code_pb2.FindCodeResponse = stub.FindCode(
        code_pb2.FindCodeRequest(), timeout=_CALL_TIMEOUT_S
    )
    try:
        archive = pack(folder, patterns, limit.max_bytes)
    except CodeError as error:
        problem = FieldProblem(field="workload.code.path", message=f"is {shown(given)}: {error}")
        raise SpecError((problem,)) from error
    with archive:
        _send(archive, stub)
    sent = {**code, "path": str(folder), "digest": archive.digest}
    return {**rest, "workload": {**workload, "code": sent}}


def _is_list(given: object) -> TypeGuard[list[object]]:
    return isinstance(given, list | tuple)


def _send(archive: Archive, stub: CodeStub) -> None:
    request = code_pb2.FindCodeRequest(digest=archive.digest)
    if not stub.FindCode(request, timeout=_CALL_TIMEOUT_S).is_here:
        stub.PutCode(_requests(archive), timeout=_UPLOAD_TIMEOUT_S)


def _requests(archive: Archive) -> Iterator[code_pb2.PutCodeRequest]:
    yield code_pb2.PutCodeRequest(digest=archive.digest, size_bytes=archive.size_bytes)
    while data := archive.file.read(CHUNK_BYTES):
        yield code_pb2.PutCodeRequest(data=data)
