"""The Enrollment service: a certificate for each node that joins."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable

import grpc

from controller.access.audit import Audit, Entry
from controller.access.enrollment import why_not_enrolled, why_not_renewed
from controller.access.gate import current_caller
from controller.access.node_authority import (
    NodeAuthority,
    SigningRequestError,
    fingerprint,
    read_request,
    shown_by,
)
from controller.access.tokens import TokensError, check_name
from controller.grpc_errors import Context, abort, bad_field, refused
from controller.store.backend import DiskFullError
from controller.store.node_certificates import NodeCertificates
from outlast.v1 import enrollment_pb2
from outlast.v1.enrollment_pb2_grpc import EnrollmentServicer

# Less than an agent leaves between two renewals: who asks more often fills the audit log.
_RENEWAL_S = 10.0
# More than any fleet has: each name is a row until its certificate expires.
_MOST_NODES = 200_000
# Of what somebody else has sent, in a line of the audit log.
_MAX_NAME, _MAX_WHY = 64, 500


class EnrollmentService(EnrollmentServicer):
    """Signs for nodes, where the controller was given an authority for that."""

    def __init__(
        self,
        authority: NodeAuthority | None,
        certificates: NodeCertificates,
        audit: Audit,
        check_token: Callable[[Context], Awaitable[None]],
    ) -> None:
        """`check_token` ends a call without the join token."""
        self._authority = authority
        self._certificates = certificates
        self._audit = audit
        self._check_token = check_token
        # By node, on the monotonic clock.
        self._renewed_s: dict[str, float] = {}
        # Where nodes with certificates connect; it is taken after this is made.
        self.port = 0

    async def Enroll(
        self, request: enrollment_pb2.EnrollRequest, context: Context
    ) -> enrollment_pb2.EnrollResponse:
        """Sign a certificate for a node that has none, or renew the one that it shows."""
        if (authority := self._authority) is None:
            await refused(
                context,
                "this controller signs no certificates of nodes; it does with --node-ca DIR",
                reason="NO_NODE_AUTHORITY",
            )
        caller = current_caller().name
        if not caller:
            await self._check_token(context)
        node, now = request.node_id, datetime.datetime.now(datetime.UTC)
        try:
            check_name(node)
        except TokensError as error:
            self._note(context, node, "INVALID_ARGUMENT", f"node_id: {error}")
            await bad_field(context, "node_id", str(error))
        try:
            key = read_request(node, request.signing_request)
        except SigningRequestError as error:
            self._note(context, node, "INVALID_ARGUMENT", f"signing_request: {error}")
            await bad_field(context, "signing_request", str(error))
        if why := self._why_not(node, fingerprint(key), caller, context, now.timestamp()):
            code = grpc.StatusCode.PERMISSION_DENIED
            self._note(context, node, code.name, why)
            await abort(context, code, why, reason="NOT_ENROLLED")
        await self._limit(context, node, by_certificate=bool(caller))
        signed = authority.sign(node, key, now)
        try:
            # On record first: of a certificate that is not, a second one could be got.
            self._certificates.put(node, signed.record, now.timestamp())
        except DiskFullError as error:
            await abort(context, grpc.StatusCode.UNAVAILABLE, str(error), reason="UNAVAILABLE")
        self._note(context, node, "OK", "")
        return enrollment_pb2.EnrollResponse(
            certificate=signed.certificate,
            authority=authority.ca,
            expires_s=signed.record.expires_s,
            port=self.port,
        )

    async def _limit(self, context: Context, node: str, *, by_certificate: bool) -> None:
        """End a call that asks for too many."""
        why, now_s = "", time.monotonic()
        if by_certificate:
            if now_s < self._renewed_s.get(node, float("-inf")) + _RENEWAL_S:
                why = f"node {node} has renewed its certificate within the last {_RENEWAL_S:g} s"
            else:
                self._renewed_s[node] = now_s
        elif self._certificates.get(node) is None and len(self._certificates) >= _MOST_NODES:
            why = f"{_MOST_NODES} nodes have certificates; no more names are taken"
        if why:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            self._note(context, node, code.name, why)
            await abort(context, code, why, reason="TOO_MANY")

    def _note(self, context: Context, node: str, outcome: str, why: str) -> None:
        """Write down who has got a certificate, and who has not."""
        caller = current_caller()
        self._audit.add(
            Entry(
                at_s=time.time(),
                caller=caller.name,
                role=caller.word if caller.name else "",
                peer=context.peer(),
                call="Enrollment/Enroll",
                about=node[:_MAX_NAME],
                outcome=outcome,
                why=why[:_MAX_WHY],
            )
        )

    def _why_not(self, node: str, key: str, caller: str, context: Context, now_s: float) -> str:
        record = self._certificates.get(node)
        shown = shown_by(context.auth_context()) if caller else None
        if shown is None:
            return why_not_enrolled(node, record, key, now_s)
        return why_not_renewed(node, record, key, shown, caller)
