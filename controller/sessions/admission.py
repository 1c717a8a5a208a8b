"""Who is let in at the agents' service, and how little is taken from others.

Before any message is read an agent must have shown the join token, where one is asked for.
Then it has two seconds for a hello of at most 256 KiB; a node that has more to say of its workers
announces that, and it is read from those who said a valid hello only. gRPC's own limit of a
message's size is one for the whole server, so messages of this service come as bytes and are
measured here before they are parsed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controller import join_token
from controller.access.audit import Audit, Entry
from controller.access.enrollment import why_not_heard
from controller.access.gate import current_caller
from controller.access.node_authority import shown_by
from controller.access.roles import NODE
from controller.agent.wire import MAX_HELLO_BYTES
from controller.grpc_errors import Context, abort
from controller.ratelimit import RateLimitedLog
from controller.sessions.agents import AgentsService
from controller.store.node_certificates import NodeCertificates
from outlast.channel import HEADER
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

SERVICE, METHOD = "outlast.v1.Agents", "Session"


class Admission:
    """The agents' service behind its checks."""

    def __init__(
        self,
        agents: AgentsService,
        token_file: Path | None,
        audit: Audit,
        enrolled: NodeCertificates | None,
    ) -> None:
        """`enrolled`: who has got a certificate; None where the controller signs none."""
        self._agents = agents
        self._token_file = token_file
        self._audit = audit
        self._enrolled = enrolled
        self._log = RateLimitedLog(logger)

    def handler(self) -> grpc.GenericRpcHandler[bytes, agents_pb2.ControllerMessage]:
        """What a server calls for the service."""
        session = grpc.stream_stream_rpc_method_handler(
            self._session,
            # None: as bytes.
            request_deserializer=None,
            response_serializer=agents_pb2.ControllerMessage.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: session})

    async def _session(
        self, messages: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[agents_pb2.ControllerMessage]:
        await self.check_token(context)
        async for answer in self._agents.Session(self._parsed(messages, context), context):
            yield answer

    async def check_token(self, context: Context, call: str = f"Agents/{METHOD}") -> None:
        """End the call of an agent that has not shown the join token, where one is asked for."""
        if self._enrolled is not None and (certified := current_caller().name):
            # A certificate of a node was got with the join token, or from an operator.
            await self._check_key(self._enrolled, context, call, certified, certified)
            return
        if self._token_file is None:
            return
        try:
            tokens = join_token.read(self._token_file)
        except join_token.JoinTokenError as error:
            # Nobody is let in for want of something to compare with.
            self._log.warning(("file",), "no agent can join: %s", error)
            await abort(
                context,
                grpc.StatusCode.UNAVAILABLE,
                "the controller cannot read its join token; its log says why",
                reason="NO_JOIN_TOKEN",
            )
        given = dict(context.invocation_metadata() or ()).get(HEADER, "")
        given = given.decode(errors="replace") if isinstance(given, bytes) else given
        if join_token.is_right(given, tokens):
            return
        what = "wrong" if given else "missing"
        peer = context.peer()
        # Its port is another one each time.
        self._log.warning(
            (what, peer.rpartition(":")[0]), "agent refused: join token %s: peer=%s", what, peer
        )
        why = f"the join token is {what}"
        self._note(context, call, "", grpc.StatusCode.UNAUTHENTICATED, why)
        await abort(
            context,
            grpc.StatusCode.UNAUTHENTICATED,
            f"{why}; {join_token.REMEDY}",
            reason=f"JOIN_TOKEN_{what.upper()}",
        )

    async def _parsed(
        self, messages: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[agents_pb2.AgentMessage]:
        is_first = True
        async for data in messages:
            if is_first and len(data) > MAX_HELLO_BYTES:
                peer = context.peer()
                self._log.warning(
                    ("size", peer.rpartition(":")[0]),
                    "agent refused: its first message has %d bytes: peer=%s",
                    len(data),
                    peer,
                )
                await abort(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the first message has {len(data)} bytes; allowed: {MAX_HELLO_BYTES}; what "
                    "does not fit comes in an inventory after the hello",
                    reason="HELLO_TOO_LARGE",
                )
            is_first = False
            try:
                message = agents_pb2.AgentMessage.FromString(data)
            except DecodeError:
                await abort(
                    context,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "a message is none of outlast.v1.AgentMessage",
                    reason="UNREADABLE",
                )
            await self._check_name(message, context)
            yield message

    async def _check_name(self, message: agents_pb2.AgentMessage, context: Context) -> None:
        """A node with a certificate speaks for the node that it names only, and nobody speaks for
        one that has got a certificate for another key."""
        if not message.HasField("hello"):
            return
        certified, node = current_caller().name, message.hello.node_id
        code, call = grpc.StatusCode.PERMISSION_DENIED, f"Agents/{METHOD}"
        if certified and node != certified:
            why = f"the certificate is that of node {certified}, not of {node}"
            self._note(context, call, certified, code, why)
            await abort(context, code, why, reason="WRONG_NODE")
        if self._enrolled is None:
            return
        await self._check_key(self._enrolled, context, call, certified, node)

    async def _check_key(
        self, enrolled: NodeCertificates, context: Context, call: str, certified: str, node: str
    ) -> None:
        """End the call of who speaks for a node that has got a certificate for another key."""
        shown = shown_by(context.auth_context()) if certified else None
        key = None if shown is None else shown.key
        if why := why_not_heard(node, enrolled.get(node), key, time.time()):
            code = grpc.StatusCode.PERMISSION_DENIED
            self._note(context, call, certified, code, why, about=node)
            await abort(context, code, why, reason="OTHER_KEY")

    def _note(
        self,
        context: Context,
        call: str,
        node: str,
        code: grpc.StatusCode,
        why: str,
        *,
        about: str = "",
    ) -> None:
        self._audit.add(
            Entry(
                at_s=time.time(),
                caller=node,
                role=NODE if node else "",
                peer=context.peer(),
                call=call,
                about=about or node,
                outcome=code.name,
                why=why,
            )
        )
