"""The controller as a client of its own Jobs service, for what is asked by other ways than gRPC.

What is asked is checked, done, refused and written down by the same code as what people ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from controller.access.gate import AS_HEADER
from outlast.errors import RetryableError
from outlast.problems import SpecError
from outlast.spec.message import struct_of
from outlast.v1 import jobs_pb2
from outlast.v1.jobs_pb2_grpc import JobsStub

# Of a channel to itself.
OPTIONS = (
    ("grpc.max_receive_message_length", 128 * 2**20),
    # Errors travel in what gRPC calls metadata, and a bad spec may have many.
    ("grpc.max_metadata_size", 2**20),
    ("grpc.absolute_max_metadata_size", 2**20),
)
# A job of ten thousand nodes is planned in a second.
_TIMEOUT_S = 30.0
_NAME_TAKEN = "JOB_NAME_TAKEN"


class CallFailedError(RetryableError):
    """The service did not do what it was asked; later it may."""


class WaitsError(CallFailedError):
    """A job cannot be submitted before another one of its name has ended."""


class OwnCalls:
    """Calls of the Jobs service, on behalf of one name."""

    def __init__(self, address: str, name: str, secret: str) -> None:
        """To be made in the event loop. `address` is the controller's own socket, `secret` what the
        service knows it by; `name` is whose the jobs are."""
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._jobs = JobsStub(self._channel)
        self._metadata = ((AS_HEADER, f"{secret} {name}"),)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def submit(self, document: dict[str, object], request_id: str) -> str:
        """Queue a job, whatever nodes there are. What is wrong with its spec; "" once it is there.

        Raises:
            WaitsError: another job has its name.
            CallFailedError: neither is known.
        """
        try:
            spec = struct_of(document)
            request = jobs_pb2.SubmitRequest(spec=spec, request_id=request_id, wait_for_nodes=True)
            await self._jobs_call(self._jobs.Submit)(
                request, timeout=_TIMEOUT_S, metadata=self._metadata
            )
        except SpecError as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return error.details() or "the spec is refused"
            if _reason(error) == _NAME_TAKEN:
                raise WaitsError(error.details() or _NAME_TAKEN) from error
            raise CallFailedError(error.details() or error.code().name) from error
        return ""

    async def cancel(self, job_id: str) -> None:
        """Raises CallFailedError, as those below."""
        await self._call(self._jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id))

    async def pause(self, job_id: str) -> None:
        await self._call(self._jobs.PauseJob, jobs_pb2.PauseJobRequest(job_id=job_id))

    async def resume(self, job_id: str) -> None:
        await self._call(self._jobs.ResumeJob, jobs_pb2.ResumeJobRequest(job_id=job_id))

    async def _call(self, method: object, request: object) -> None:
        try:
            await self._jobs_call(method)(request, timeout=_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailedError(error.details() or error.code().name) from error

    @staticmethod
    def _jobs_call(method: object) -> Callable[..., Awaitable[object]]:
        # The stubs do not know gRPC's asyncio half.
        return cast(Callable[..., Awaitable[object]], method)


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Why a call was refused, in the word for programs."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is its error
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""
