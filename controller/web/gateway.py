"""Calls of the controller's own gRPC services, for whoever asks by HTTP.

What is asked by HTTP is checked, done and refused by the same code as what is asked by gRPC,
because it is: the controller is its own client here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from controller.access.gate import FROM_HEADER
from controller.own_calls import OPTIONS
from outlast.channel import HEADER

# What answers at once takes milliseconds, and a large curve a second.
CALL_TIMEOUT_S = 10.0
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


# On whose behalf calls are made: the header `authorization` that he has shown, and from where.
calls_as: ContextVar[tuple[str, str]] = ContextVar("calls_as", default=("", ""))


class RequestError(Exception):
    """A request that is refused; as it is said by HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "BAD_REQUEST",
        fields: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """`fields` are names of fields with what is wrong with each."""
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.fields = fields

    def as_json(self) -> dict[str, object]:
        """The body of the answer."""
        fields = [{"field": field, "description": wrong} for field, wrong in self.fields]
        return {"error": {"message": str(self), "reason": self.reason, "fields": fields}}


class Gateway:
    """A channel of the controller to itself."""

    def __init__(self) -> None:
        self._channel: grpc.aio.Channel | None = None

    def connect(self, address: str) -> None:
        """Calls go to this address from now on; to be called in the event loop."""
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)

    async def close(self) -> None:
        """End all calls."""
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def call(
        self, method: MethodDescriptor, request: Message, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Message:
        """The one answer of a method.

        Raises:
            RequestError: it is refused, or there is none in time.
        """
        channel, path = self._channel_for(method)
        call = channel.unary_unary(
            path,
            request_serializer=_serialized,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        try:
            return cast(Message, await call(request, timeout=timeout_s, metadata=_metadata()))
        except grpc.aio.AioRpcError as error:
            raise _explained(error) from error

    async def stream(self, method: MethodDescriptor, request: Message) -> AsyncIterator[Message]:
        """The answers of a method, as they come.

        Raises:
            RequestError: it is refused, or breaks off.
        """
        channel, path = self._channel_for(method)
        start = channel.unary_stream(
            path,
            request_serializer=_serialized,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        call = start(request, metadata=_metadata())
        try:
            async for answer in call:
                yield cast(Message, answer)
        except grpc.aio.AioRpcError as error:
            raise _explained(error) from error
        finally:
            call.cancel()

    def _channel_for(self, method: MethodDescriptor) -> tuple[grpc.aio.Channel, str]:
        if self._channel is None:
            raise RequestError(503, "the controller is only starting", reason="UNAVAILABLE")
        return self._channel, f"/{method.containing_service.full_name}/{method.name}"


def _metadata() -> tuple[tuple[str, str], ...]:
    header, peer = calls_as.get()
    shown = ((HEADER, header),) if header else ()
    return (*shown, (FROM_HEADER, peer)) if peer else shown


def _serialized(message: Any) -> bytes:
    return cast(bytes, message.SerializeToString())


def _explained(error: grpc.aio.AioRpcError) -> RequestError:
    reason, fields = "", []
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is its error
    for detail in status.details if status is not None else ():
        request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
        if detail.Unpack(request):
            fields += [(each.field, each.description) for each in request.field_violations]
        elif detail.Unpack(info):
            reason = info.reason
    code = error.code()
    # A message with fields repeats them, for people who read nothing else.
    message = (error.details() or code.name).split(":\n", 1)[0] if fields else error.details()
    return RequestError(
        _STATUS.get(code, 500),
        message or code.name,
        reason=reason or code.name,
        fields=tuple(fields),
    )
