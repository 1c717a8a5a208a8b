"""The Access service: who a caller is, and who did what."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict

from controller.access.audit import Audit, NoSuchPlaceError
from controller.access.callers import Callers
from controller.access.gate import current_caller
from controller.grpc_errors import Context, bad_field
from outlast.v1 import access_pb2
from outlast.v1.access_pb2_grpc import AccessServicer

DEFAULT_ENTRIES, MAX_ENTRIES = 1_000, 10_000


class AccessService(AccessServicer):
    """Answers callers about themselves, and admins about all."""

    def __init__(self, callers: Callers, audit: Audit) -> None:
        self._callers = callers
        self._audit = audit

    async def WhoAmI(
        self, request: access_pb2.WhoAmIRequest, context: Context
    ) -> access_pb2.WhoAmIResponse:
        """The caller, as the controller knows him."""
        caller = current_caller()
        asked = self._callers.are_asked
        return access_pb2.WhoAmIResponse(name=caller.name, role=caller.word, asked=asked)

    async def ReadAudit(
        self, request: access_pb2.ReadAuditRequest, context: Context
    ) -> access_pb2.ReadAuditResponse:
        """The newest calls that changed something or were refused; a page of them."""
        if not 0 <= request.most <= MAX_ENTRIES:
            await bad_field(context, "most", f"is {request.most}; allowed: 0 to {MAX_ENTRIES}")
        try:
            return await asyncio.to_thread(self._found, request)
        except NoSuchPlaceError as error:
            await bad_field(context, "after", str(error))

    def _found(self, request: access_pb2.ReadAuditRequest) -> access_pb2.ReadAuditResponse:
        recent = itertools.takewhile(
            lambda each: each[1].at_s >= request.since_s, self._audit.older_than(request.after)
        )
        wanted = (each for each in recent if request.caller in ("", each[1].caller))
        most = request.most or DEFAULT_ENTRIES
        # One more says whether there are more.
        found = list(itertools.islice(wanted, most + 1))
        entries = [access_pb2.AuditEntry(**asdict(entry)) for _, entry in found[:most]]
        following = found[most - 1][0] if len(found) > most else ""
        return access_pb2.ReadAuditResponse(entries=entries, next=following)
