"""The Incidents service: what went wrong, and what was done about it."""

from __future__ import annotations

from controller.grpc_errors import Context, bad_field, not_found
from controller.rpc.views import concerns, incident_message, incidents_of
from controller.service import Service
from outlast.ids import IncidentId, JobId, NodeId
from outlast.v1 import incidents_pb2
from outlast.v1.incidents_pb2_grpc import IncidentsServicer


class IncidentsService(IncidentsServicer):
    """Lists and shows incidents."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ListIncidents(
        self, request: incidents_pb2.ListIncidentsRequest, context: Context
    ) -> incidents_pb2.ListIncidentsResponse:
        """Of one job or of all, oldest first; or a page: the newest of those before another."""
        state = self._service.state
        if request.job_id and JobId(request.job_id) not in state.jobs:
            await not_found(context, "job", request.job_id, "`outlast jobs` lists them")
        now_s = self._service.now_s
        if request.newest < 0:
            await bad_field(context, "newest", f"is {request.newest}; allowed: 0 or more")
        records = incidents_of(state, request.job_id)
        if request.node:
            records = [record for record in records if concerns(record, NodeId(request.node))]
        if request.after:
            ids = [record.incident for record in records]
            if request.after not in ids:
                await bad_field(
                    context, "after", f"is {request.after!r}, which is no incident of the list"
                )
            records = records[: ids.index(IncidentId(request.after))]
        page = records[-request.newest :]
        found = [incident_message(record, now_s=now_s, is_brief=request.brief) for record in page]
        return incidents_pb2.ListIncidentsResponse(
            incidents=found, next=page[0].incident if len(page) < len(records) else ""
        )

    async def GetIncident(
        self, request: incidents_pb2.GetIncidentRequest, context: Context
    ) -> incidents_pb2.GetIncidentResponse:
        """One incident."""
        record = self._service.state.incidents.get(IncidentId(request.incident_id))
        if record is None:
            await not_found(
                context, "incident", request.incident_id, "`outlast incidents` lists them"
            )
        message = incident_message(record, now_s=self._service.now_s)
        return incidents_pb2.GetIncidentResponse(incident=message)
