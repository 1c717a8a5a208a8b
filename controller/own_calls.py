"""The controller as a client of its own Jobs service, for what is asked by other ways than gRPC.

What is asked is checked, done, refused and written down by the same code as what people ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
import grpc.aio

from controller.access.gate import AS_HEADER
from outlast.errors import RetryableError
from outlast.problems import SpecError
from outlast.spec.message import struct_of
from outlast.v1 import jobs_pb2
from outlast.v1.jobs_pb2_grpc import JobsStub

# A job of ten thousand nodes is planned in a second.
_TIMEOUT_S = 30.0
# The same request would be answered so again.
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
)

T = TypeVar("T")


class CallFailedError(RetryableError):
    """The service did not do what it was asked; later it may."""


class OwnCalls:
    """Calls of the Jobs service, on behalf of one name."""

    def __init__(self, address: str, name: str) -> None:
        """To be made in the event loop. `address` is the controller's own socket; `name` is whose
        the jobs are."""
        self._channel = grpc.aio.insecure_channel(address)
        self._jobs = JobsStub(self._channel)
        self._metadata = ((AS_HEADER, name),)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def submit(self, document: dict[str, object], request_id: str) -> str:
        """Queue a job, whatever nodes there are. Why it is refused for good; "" once it is there.

        Raises:
            CallFailedError: neither is known.
        """
        try:
            spec = struct_of(document)
            request = jobs_pb2.SubmitRequest(spec=spec, request_id=request_id, wait_for_nodes=True)
            await self._call(self._jobs.Submit, request)
        except (SpecError, RefusedError) as error:
            return str(error)
        return ""

    async def cancel(self, job_id: str) -> None:
        """Raises CallFailedError and RefusedError, as those below."""
        await self._call(self._jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id))

    async def pause(self, job_id: str) -> None:
        await self._call(self._jobs.PauseJob, jobs_pb2.PauseJobRequest(job_id=job_id))

    async def resume(self, job_id: str) -> None:
        await self._call(self._jobs.ResumeJob, jobs_pb2.ResumeJobRequest(job_id=job_id))

    async def _call(self, method: object, request: object) -> object:
        call = cast(Callable[..., Awaitable[object]], method)
        try:
            return await call(request, timeout=_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            kind = RefusedError if error.code() in _FINAL else CallFailedError
            raise kind(error.details() or error.code().name) from error


class RefusedError(CallFailedError):
    """The service will not do it."""
