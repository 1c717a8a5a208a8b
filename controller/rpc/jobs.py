"""The Jobs service: submit, look at, watch and steer jobs.

A spec is checked completely here, before the machine hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping

import grpc

from controller.access.gate import current_caller
from controller.convert import step_report
from controller.core.edge.edge import Edge
from controller.core.events import (
    CheckpointPushRequested,
    JobCancelRequested,
    JobPauseRequested,
    JobResumeRequested,
    JobSubmitted,
)
from controller.core.kinds import Wanted
from controller.core.naming import names
from controller.core.records import JobPlan, JobRecord
from controller.core.states import TERMINAL, JobState
from controller.grpc_errors import (
    Context,
    abort,
    bad_field,
    bad_request,
    not_found,
    refused,
    tell,
)
from controller.rpc.choosing import ChoiceError, chosen_start, is_choice
from controller.rpc.fitting import Fit, beyond_priority, fit_of
from controller.rpc.history import history_of, wrong_with_history
from controller.rpc.job_views import JobView, JobViews
from controller.rpc.log_requests import wrong_with_logs
from controller.rpc.new_jobs import new_job_id, refuse_name, root_of
from controller.rpc.planning import parsed, planned
from controller.service import Service
from controller.sessions.logs import LogQueries, SlowReaderError, TooManyQueriesError
from controller.sessions.session import Sessions
from controller.specs import spec_of
from controller.store.code import CodeStore
from controller.store.curves import PAGE_ROWS
from outlast.chosen import ChosenStart
from outlast.ids import JobId, NodeId
from outlast.problems import SpecError
from outlast.rules.places import wrong_with_place
from outlast.spec import JobSpec
from outlast.v1 import jobs_pb2
from outlast.v1.jobs_pb2_grpc import JobsServicer

MAX_REQUEST_ID = 128
MAX_PUSH_S = 86_400.0


class JobsService(JobsServicer):
    """How people and programs run training."""

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        edge: Edge,
        logs: LogQueries,
        checkpoint_root: str,
        code: CodeStore,
        matmul_flops: Mapping[NodeId, float],
    ) -> None:
        """`checkpoint_root` is the URL below which jobs without their own keep checkpoints;
        `matmul_flops` is what a worker of each node reached in the matmul check, in FLOP/s."""
        self._service = service
        self._sessions = sessions
        self._views = JobViews(service, edge, matmul_flops)
        self._logs = logs
        self._checkpoint_root = checkpoint_root
        self._code = code

    async def Submit(
        self, request: jobs_pb2.SubmitRequest, context: Context
    ) -> jobs_pb2.SubmitResponse:
        """Queue a job; the same request again answers the job already made."""
        if len(request.request_id) > MAX_REQUEST_ID:
            await bad_field(
                context,
                "request_id",
                f"has {len(request.request_id)} characters; allowed: up to {MAX_REQUEST_ID}",
            )
        spec = await parsed(request.spec, context)
        request_id = request.request_id or uuid.uuid4().hex
        job = self._by_request(request_id)
        if job is None:
            plan = await planned(spec, context, self._code)
            fit = self._fit(spec, plan)
            most = self._service.settings.most_priority
            problems = beyond_priority(spec.queue.priority, current_caller(), most)
            if not request.wait_for_nodes:
                problems += fit.problems_where(nodes_come=self._service.brings_nodes)
            if problems:
                await bad_request(context, SpecError(problems))
            new_id = new_job_id(spec.name, self._service.state.jobs)
            await tell(
                context,
                self._service,
                JobSubmitted(
                    job_id=new_id,
                    name=spec.name,
                    request_id=request_id,
                    spec_json=spec.canonical_json(),
                    checkpoint_url=f"{self._root_for(spec)}/{new_id}",
                    plan=plan,
                    owner=current_caller().name,
                ),
            )
            job = self._by_request(request_id)
        if job is None:
            await refuse_name(self._service.state, spec.name, context)
        if job.submitted_spec_json != spec.canonical_json():
            await abort(
                context,
                grpc.StatusCode.ALREADY_EXISTS,
                f"request id {request_id!r} already made job {job.job_id} from another spec; "
                "use a fresh request id",
                reason="REQUEST_ID_REUSED",
                metadata={"job": job.job_id},
            )
        return jobs_pb2.SubmitResponse(job=self._message(job))

    async def CheckFit(
        self, request: jobs_pb2.CheckFitRequest, context: Context
    ) -> jobs_pb2.CheckFitResponse:
        """How a job would fit the connected nodes."""
        spec = await parsed(request.spec, context)
        fit = self._fit(spec, await planned(spec, context))
        return jobs_pb2.CheckFitResponse(
            connected=fit.connected,
            fitting=fit.fitting,
            needed=fit.needed,
            need=fit.need,
            nodes=fit.nodes,
            brings_nodes=self._service.brings_nodes,
            problems=[
                jobs_pb2.FitProblem(field=each.field, description=each.message)
                for each in fit.problems_where(nodes_come=False)
            ],
        )

    async def GetJob(
        self, request: jobs_pb2.GetJobRequest, context: Context
    ) -> jobs_pb2.GetJobResponse:
        """A job, and its whole curve if asked for."""
        response, has_more = jobs_pb2.GetJobResponse(), request.with_steps
        job = await self._known(request.job_id, context)
        while has_more:
            after_step = response.steps[-1].step if response.steps else -1
            rows = self._service.curves.read(job.job_id, after_step=after_step, most=PAGE_ROWS)
            response.steps.extend(step_report(row) for row in rows)
            has_more = len(rows) == PAGE_ROWS
            # A curve may have a hundred thousand steps, and heartbeats do not wait for it.
            await asyncio.sleep(0)
            job = await self._known(request.job_id, context)
        response.job.CopyFrom(self._message(job))
        return response

    async def GetHistory(
        self, request: jobs_pb2.GetHistoryRequest, context: Context
    ) -> jobs_pb2.GetHistoryResponse:
        """The states that a job went through, and its committed checkpoints; a page of them."""
        job = await self._known(request.job_id, context)
        wrong = wrong_with_history(request)
        if wrong is not None:
            await bad_field(context, wrong.field, wrong.message)
        return history_of(job, self._service.history, request)

    async def ListJobs(
        self, request: jobs_pb2.ListJobsRequest, context: Context
    ) -> jobs_pb2.ListJobsResponse:
        """Every job, oldest first."""
        jobs = sorted(self._service.state.jobs.values(), key=lambda job: job.submitted_s)
        return self._placed(jobs_pb2.ListJobsResponse(jobs=[self._message(job) for job in jobs]))

    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.WatchJobResponse]:
        """The job at once, then its changes and step reports until it ends."""
        job = await self._known(request.job_id, context)
        curves = self._service.curves
        shown: JobView | None = None
        version, after_step = 0, request.after_step
        while True:
            seen = self._service.changes.version
            # A long curve may be read for longer than its ended job is kept.
            await self._known(job.job_id, context)
            view = self._views.shared(job.job_id, _now_s())
            rows, version = curves.changed_since(job.job_id, version, after_step=after_step)
            newest = curves.version
            if rows or view is not shown:
                response = jobs_pb2.WatchJobResponse(steps=[step_report(row) for row in rows])
                if view is not shown:
                    has_bulk = shown is not None and shown.has_same_bulk(view)
                    response.is_brief = request.brief and has_bulk
                    response.job.CopyFrom(view.brief if response.is_brief else view.whole())
                    shown = view
                yield response
            if len(rows) == PAGE_ROWS:
                continue
            # From here on everything that comes is news, steps that are redone too.
            version, after_step = newest, -1
            if view.job.state in TERMINAL:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._views.due_s(view)):
                    await self._service.changes.wait(seen)

    async def CancelJob(
        self, request: jobs_pb2.CancelJobRequest, context: Context
    ) -> jobs_pb2.CancelJobResponse:
        """End a job. Cancelling it again is fine."""
        job = await self._known(request.job_id, context)
        if job.state in (JobState.SUCCEEDED, JobState.FAILED):
            await self._refuse_ended(job, "cancelled", context)
        await tell(context, self._service, JobCancelRequested(job_id=job.job_id))
        return jobs_pb2.CancelJobResponse(job=self._present(job.job_id))

    async def PauseJob(
        self, request: jobs_pb2.PauseJobRequest, context: Context
    ) -> jobs_pb2.PauseJobResponse:
        """Stop a job so that it can go on later. Pausing it again is fine."""
        job = await self._known(request.job_id, context)
        if job.state in TERMINAL or job.wanted is Wanted.CANCEL:
            await self._refuse_ended(job, "paused", context)
        await tell(context, self._service, JobPauseRequested(job_id=job.job_id))
        return jobs_pb2.PauseJobResponse(job=self._present(job.job_id))

    async def ResumeJob(
        self, request: jobs_pb2.ResumeJobRequest, context: Context
    ) -> jobs_pb2.ResumeJobResponse:
        """Let a paused job go on, from its newest state or from where the request says."""
        job = await self._known(request.job_id, context)
        if job.state in TERMINAL or job.wanted is Wanted.CANCEL:
            await self._refuse_ended(job, "resumed", context)
        if job.wanted is not Wanted.PAUSE:
            await refused(
                context,
                f"job {job.job_id} is {job.state}, not paused; `outlast pause {job.job_id}` pauses "
                "one that runs",
                reason="JOB_NOT_PAUSED",
            )
        chosen = await self._choice(job, request, context) if is_choice(request) else None
        await tell(context, self._service, JobResumeRequested(job_id=job.job_id, chosen=chosen))
        if chosen is not None and chosen not in self._service.state.jobs[job.job_id].chosen:
            await refused(
                context,
                f"job {job.job_id} has changed meanwhile and was left as it is; look at its "
                "status, and ask again",
                reason="JOB_CHANGED",
            )
        return jobs_pb2.ResumeJobResponse(job=self._present(job.job_id))

    async def _choice(
        self, job: JobRecord, request: jobs_pb2.ResumeJobRequest, context: Context
    ) -> ChosenStart:
        """Where the request says that the job is to go on."""
        if job.state is not JobState.PAUSED:
            await refused(
                context,
                f"job {job.job_id} is {job.state} and not yet PAUSED: its workers are being "
                "stopped; ask again in a moment",
                reason="JOB_NOT_PAUSED",
            )
        url = request.checkpoint_url
        if url:
            wrong = wrong_with_place(url, "checkpoints")
            if wrong is not None:
                await bad_field(context, "checkpoint_url", wrong)
            url = root_of(url)
        try:
            return await chosen_start(job, request, url)
        except ChoiceError as error:
            await bad_field(context, error.field, error.message)

    async def PushCheckpoint(
        self, request: jobs_pb2.PushCheckpointRequest, context: Context
    ) -> jobs_pb2.PushCheckpointResponse:
        """Upload what the nodes of a paused job hold in host memory."""
        job = await self._known(request.job_id, context)
        if job.state is not JobState.PAUSED:
            await refused(
                context,
                f"job {job.job_id} is {job.state}; host memory of a PAUSED job is uploaded by "
                "hand, that of any other by itself",
                reason="JOB_NOT_PAUSED",
            )
        timeout_s = request.timeout_s or spec_of(job.spec_json).checkpoint.upload_timeout_s
        if not 0 < timeout_s <= MAX_PUSH_S:
            await bad_field(
                context, "timeout_s", f"is {timeout_s:g}; allowed: more than 0, up to {MAX_PUSH_S}"
            )
        url = ""
        if request.url:
            wrong = wrong_with_place(request.url, "checkpoints")
            if wrong is not None:
                await bad_field(context, "url", wrong)
            url = f"{root_of(request.url)}/{job.job_id}"
        missing = [
            node for node in job.nodes if node is None or not self._sessions.is_connected(node)
        ]
        if missing or not job.nodes:
            await refused(
                context,
                f"job {job.job_id}: {len(missing)} of the {len(job.nodes)} nodes that hold its "
                f"state are not connected ({', '.join(node or 'unknown' for node in missing[:4])})",
                reason="NODE_NOT_CONNECTED",
            )
        await tell(
            context,
            self._service,
            CheckpointPushRequested(job_id=job.job_id, checkpoint_url=url, timeout_s=timeout_s),
        )
        return jobs_pb2.PushCheckpointResponse(job=self._present(job.job_id))

    async def Logs(
        self, request: jobs_pb2.LogsRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.LogsResponse]:
        """Output of the job's workers."""
        job = await self._known(request.job_id, context)
        wrong = wrong_with_logs(request, job)
        if wrong is not None:
            await bad_field(context, wrong.field, wrong.message)
        nodes = [node for node in job.nodes if node is not None]
        if request.attempt or request.all_attempts:
            # An earlier attempt may have run on nodes that the job has no more.
            nodes = [*nodes, *self._sessions.nodes()]
        if not request.follow and not any(map(self._sessions.is_connected, nodes)):
            where = f"its node(s) {names(nodes)} are not connected" if nodes else "it has none"
            await refused(
                context,
                f"the logs of job {job.job_id} are on its nodes; {where}",
                reason="NODE_NOT_CONNECTED",
            )
        try:
            async for chunk in self._logs.read(request):
                yield chunk
        except (SlowReaderError, TooManyQueriesError) as error:
            await abort(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), reason="LOGS_LIMIT"
            )

    def _placed(self, response: jobs_pb2.ListJobsResponse) -> jobs_pb2.ListJobsResponse:
        """With the places in the queue, which change with other jobs."""
        queue = [job.job_id for job in self._service.queue()]
        places = {job_id: place for place, job_id in enumerate(queue, 1)}
        for message in response.jobs:
            message.queue_position = places.get(JobId(message.job_id), 0)
        return response

    def _root_for(self, spec: JobSpec) -> str:
        """Where the job's checkpoint folder goes."""
        url = spec.checkpoint.url
        return self._checkpoint_root if url is None else root_of(url)

    def _fit(self, spec: JobSpec, plan: JobPlan) -> Fit:
        connected = self._sessions.is_connected
        nodes = [node for node in self._service.state.nodes.values() if connected(node.node)]
        owner = current_caller().name
        return fit_of(spec, plan, nodes, owner, self._service.settings.quota_of(owner))

    def _by_request(self, request_id: str) -> JobRecord | None:
        asked = (request_id, current_caller().name)
        jobs = self._service.state.jobs.values()
        return next((job for job in jobs if (job.request_id, job.owner) == asked), None)

    async def _known(self, name: str, context: Context) -> JobRecord:
        job = self._service.state.jobs.get(JobId(name))
        if job is None:
            await not_found(context, "job", name, "`outlast jobs` lists them")
        return job

    async def _refuse_ended(self, job: JobRecord, what: str, context: Context) -> None:
        state = job.state if job.state in TERMINAL else "being cancelled"
        await refused(
            context, f"job {job.job_id} is {state} and cannot be {what}", reason="JOB_ENDED"
        )

    def _present(self, name: JobId) -> jobs_pb2.Job:
        return self._message(self._service.state.jobs[name])

    def _message(self, job: JobRecord) -> jobs_pb2.Job:
        return self._views.fresh(job, _now_s()).whole()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
