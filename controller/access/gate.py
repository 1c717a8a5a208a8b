"""The gate before all gRPC services: who calls, whether he may, and that it is written down."""

from __future__ import annotations

import contextlib
import hmac
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controller.access.audit import Audit, Entry
from controller.access.callers import UNKNOWN_TOKEN, Callers
from controller.access.roles import ANYBODY, Caller, Role, Rule, refusal, rule_of
from controller.grpc_errors import Context, abort
from outlast.channel import HEADER
from outlast.grpc_details import LOGIN_OVER
from outlast.v1.access_pb2 import LoginIssuer

# From where a call came by HTTP; the gateway says so.
FROM_HEADER = "outlast-from"
# On whose behalf the controller calls itself, of its own accord, behind a secret of the process.
AS_HEADER = "outlast-as"
# Only the controller itself reaches its own socket.
_OWN_PEER = "unix:"
# A stream's caller is looked at again before an answer, this long after the last look.
AGAIN_S = 5.0
_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)

_NO_CALLER = "no token was shown, and the certificate has expired or is of no caller"

REMEDY = (
    "log in with `outlast login HOST:PORT`, or give a token with OUTLAST_TOKEN_FILE, of those that "
    "`outlast tokens add` makes for the controller"
)


def current_caller() -> Caller:
    """Who makes the call that is being answered."""
    return _caller.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    method: str
    rule: Rule
    metadata: Mapping[str, str | bytes]


@dataclass(slots=True, kw_only=True)
class _Made:
    caller: Caller
    request: Any
    answer: Any = None


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets calls through to the services, or ends them."""

    def __init__(
        self,
        callers: Callers,
        audit: Audit,
        owner_of: Callable[[str], str | None],
        own_secret: str,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner_of` says whose a job is; None when there is no such job. `own_secret` is what the
        controller shows where it calls itself."""
        self._callers = callers
        self._audit = audit
        self._owner_of = owner_of
        self._own_secret = own_secret
        self._wall_clock = wall_clock
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """As gRPC asks for each call."""
        handler = await continuation(handler_call_details)
        rule = rule_of(handler_call_details.method)
        if handler is None or rule is None:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        return self._guarded(
            handler, _Call(method=handler_call_details.method, rule=rule, metadata=metadata)
        )

    def _guarded(self, handler: Any, call: _Call) -> Any:
        """The handler, which takes requests as bytes: none is read before its caller is known."""
        if handler.response_streaming:
            return self._streaming(handler, call)
        answer_one = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def single(data: Any, context: Context) -> Any:
            async with self._admitted(call, handler, data, context) as made:
                made.answer = await answer_one(made.request, context)
                return made.answer

        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(single, None, handler.response_serializer)

    def _streaming(self, handler: Any, call: _Call) -> Any:
        start = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def written(data: Any, context: Context) -> None:
            async with self._admitted(call, handler, data, context) as made:
                await start(made.request, context)

        async def yielded(data: Any, context: Context) -> AsyncIterator[Any]:
            async with (
                self._admitted(call, handler, data, context) as made,
                contextlib.aclosing(start(made.request, context)) as answers,
            ):
                looked_s = self._clock()
                async for answer in answers:
                    if (now_s := self._clock()) - looked_s >= AGAIN_S:
                        await self._check_again(call, made, context)
                        looked_s = now_s
                    yield answer

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        # A service may write its answers itself in place of yielding them; gRPC looks which.
        stream = written if inspect.iscoroutinefunction(start) else yielded
        return make(stream, None, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _admitted(
        self, call: _Call, handler: Any, data: Any, context: Context
    ) -> AsyncIterator[_Made]:
        """A call that may be made."""
        caller = await self._known(call, context)
        if handler.request_streaming:
            await self._check(call, caller, None, context)
            request = _each_read(handler, data, context)
        else:
            request = await _read(handler, data, context)
            await self._check(call, caller, request, context)
        reset = _caller.set(caller)
        made, outcome = _Made(caller=caller, request=request), grpc.StatusCode.CANCELLED.name
        try:
            yield made
            outcome = grpc.StatusCode.OK.name
        except grpc.aio.AbortError:
            outcome = str(context.code().name)
            raise
        except Exception:
            # gRPC answers it like that.
            outcome = grpc.StatusCode.UNKNOWN.name
            raise
        finally:
            with contextlib.suppress(ValueError):
                # A stream that is closed from another task has a context of its own.
                _caller.reset(reset)
            if call.rule.changes:
                # An answer names what the call has made; most name nothing.
                about = made.answer if _about(made.answer) else request
                self._note(call, caller, context, about, outcome)

    async def _check(self, call: _Call, caller: Caller, request: Any, context: Context) -> None:
        """End a call that its caller may not make."""
        is_known = call.rule.of_owner and request is not None
        owner = self._owner_of(request.job_id) if is_known else None
        if why := refusal(caller, call.rule, owner):
            self._note(call, caller, context, request, "PERMISSION_DENIED", why)
            await abort(context, grpc.StatusCode.PERMISSION_DENIED, why, reason="NOT_ALLOWED")

    async def _check_again(self, call: _Call, made: _Made, context: Context) -> None:
        """End a stream whose caller is not known any more, or may not read it any more.

        Who has shown a token that replaces an issuer's, which lasts minutes, is known by that.
        """
        if call.rule.role is None:
            return
        header = _text(call.metadata.get(HEADER))
        found = self._found(call, context) or self._callers.by_newer_token(made.caller, header)
        owner = self._owner_of(made.request.job_id) if call.rule.of_owner else None
        if found is not None and not refusal(found, call.rule, owner):
            return
        why = "who began this may not go on with it: his login is over, or has another role"
        # A call that changes something is noted at its end.
        if not call.rule.changes:
            self._note(call, made.caller, context, made.request, "UNAUTHENTICATED", why)
        await abort(
            context, grpc.StatusCode.UNAUTHENTICATED, f"{why}; call again", reason=LOGIN_OVER
        )

    def _found(self, call: _Call, context: Context) -> Caller | None:
        """Whoever is no node, by what he shows; None when nobody is known by that."""
        if said := _text(call.metadata.get(AS_HEADER)):
            shown, _, name = said.partition(" ")
            if hmac.compare_digest(shown.encode(), self._own_secret.encode()):
                return Caller(name=name, role=Role.SUBMITTER)
        # Who shows a node's certificate is that node, also where nobody else is asked.
        if not self._callers.are_asked and not self._shows_certificate(context):
            return ANYBODY
        if header := _text(call.metadata.get(HEADER)):
            return self._callers.by_header(header)
        return self._callers.by_certificate(context.auth_context())

    async def _known(self, call: _Call, context: Context) -> Caller:
        if call.rule.role is None and self._callers.are_nodes_asked:
            return await self._known_node(call, context)
        found = self._found(call, context)
        if found is None:
            header = _text(call.metadata.get(HEADER))
            unnamed = _NO_CALLER if self._callers.certificates else "nobody is named"
            why = UNKNOWN_TOKEN if header else unnamed
            self._note(call, None, context, None, "UNAUTHENTICATED", why)
            await abort(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                f"{why}; {REMEDY}",
                reason="TOKEN_WRONG" if header else "TOKEN_MISSING",
                details=[] if header else self._login_issuers(),
            )
        return found

    def _login_issuers(self) -> list[LoginIssuer]:
        """Where a caller gets a token, for `outlast login`."""
        return [
            LoginIssuer(
                issuer=each.issuer,
                client_id=each.client_id or "",
                audience=each.audience,
                scope=each.scope or "",
            )
            for each in self._callers.login_issuers()
        ]

    async def _known_node(self, call: _Call, context: Context) -> Caller:
        """A node, by its certificate where certificates are asked for; its services look at the
        join token."""
        if not self._callers.certificates and not self._shows_certificate(context):
            return Caller(name="", role=None)
        found = self._callers.by_certificate(context.auth_context())
        if found is None or found.role is not None:
            shown = "none" if found is None else f"that of {found.name}"
            why = f"this takes the certificate of a node, and {shown} was shown"
            self._note(call, found, context, None, "PERMISSION_DENIED", why)
            await abort(context, grpc.StatusCode.PERMISSION_DENIED, why, reason="NOT_A_NODE")
        return found

    def _shows_certificate(self, context: Context) -> bool:
        return self._callers.shows_certificate(context.auth_context())

    def _note(
        self,
        call: _Call,
        caller: Caller | None,
        context: Context,
        about: Any,
        outcome: str,
        why: str = "",
    ) -> None:
        peer = context.peer()
        if peer.startswith(_OWN_PEER):
            peer = _text(call.metadata.get(FROM_HEADER)) or peer
        self._audit.add(
            Entry(
                at_s=self._wall_clock(),
                caller=caller.name if caller is not None else "",
                role=caller.word if caller is not None else "",
                peer=peer,
                call=call.method.rpartition(".")[2],
                about=_about(about),
                outcome=outcome,
                why=why,
            )
        )


async def _read(handler: Any, data: bytes, context: Context) -> Any:
    if handler.request_deserializer is None:
        return data
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        await abort(
            context,
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request is no message of this method",
            reason="UNREADABLE",
        )


async def _each_read(
    handler: Any, messages: AsyncIterator[bytes], context: Context
) -> AsyncIterator[Any]:
    async for data in messages:
        yield await _read(handler, data, context)


def _about(message: Any) -> str:
    """The job or node that a request or an answer names."""
    for name in ("job", "node"):
        inner = getattr(message, name, None)
        if found := getattr(inner, f"{name}_id", ""):
            return str(found)
    for name in ("job_id", "node_id", "run_id", "digest"):
        if found := getattr(message, name, ""):
            return str(found)
    return ",".join(getattr(message, "nodes", ()))


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
