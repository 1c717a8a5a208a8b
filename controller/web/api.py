"""The JSON API: the calls of `routes`, and those that are more than one call.

What does not belong here: what a request means, which the gRPC services decide.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import Message
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from controller.planner import PlanJob
from controller.web import openapi
from controller.web.columns import POINTS, columns_of
from controller.web.gateway import Gateway, RequestError
from controller.web.login import LoginRoutes
from controller.web.messages import as_json
from controller.web.parameters import (
    check_names,
    from_body,
    from_query,
    json_body,
    number,
    one_of,
    paged,
    whole_number,
)
from controller.web.plans import ASSUMED, Plans
from controller.web.profiles import PEER, profile
from controller.web.routes import CALLS, ROOT, Call, method
from controller.web.streams import Event, Streams
from controller.web.whole_characters import with_whole_characters
from outlast.blackbox import NUM_STEP_RECORDS
from outlast.problems import SpecError
from outlast.spec import JobSpec
from outlast.spec.message import struct_of
from outlast.specfile import SpecFileError, parse_document
from outlast.trace.heat import Measure, Order
from outlast.v1 import diagnostics_pb2, jobs_pb2, ranks_pb2

Handler = Callable[[Request], Awaitable[Response]]

_BULK = ("spec", "nodes")
_MOST_JOBS = 1000
_MOST_POINTS = 20_000
_MOST_ROWS, _MOST_TRACKS = 10_000, 256
_LOG_BYTES = range(1, 16 << 20)
_PROFILE_SECONDS = range(1, 61)
_STEPS = range(2**53)


class Api:
    """Answers below `/api/v1`."""

    def __init__(
        self,
        gateway: Gateway,
        about: Callable[[], dict[str, Any]],
        logins: LoginRoutes,
        plan_job: PlanJob | None = None,
    ) -> None:
        """`about` is what the controller says of itself."""
        self._plans = Plans(plan_job)
        self._logins = logins
        self._gateway = gateway
        self._about = about
        self.streams = Streams()

    def routes(self) -> list[Route]:
        """All that there are."""
        own: list[tuple[str, str, Handler]] = [
            ("POST", "/login", self._logins.login),
            ("POST", "/logout", self._logins.logout),
            ("GET", "/about", self._say_about),
            ("GET", "/spec-schema", self._spec_schema),
            ("GET", "/openapi.json", self._openapi),
            ("GET", "/jobs", self._jobs),
            ("POST", "/jobs", self._submit),
            ("POST", "/jobs/check", self._check),
            ("POST", "/jobs/plan", self._plan),
            ("GET", "/jobs/{job_id}/curve", self._curve),
            ("GET", "/jobs/{job_id}/events", self._events),
            ("GET", "/jobs/{job_id}/heat-map", self._heat_map),
            ("GET", "/jobs/{job_id}/timeline", self._timeline),
            ("GET", "/jobs/{job_id}/stacks", self._stacks),
            ("GET", "/jobs/{job_id}/profile", self._profile),
            ("GET", "/jobs/{job_id}/logs", self._logs),
            ("GET", "/jobs/{job_id}/logs/events", self._follow_logs),
            ("GET", "/diagnostics/{run_id}/events", self._follow_run),
        ]
        calls: list[tuple[str, str, Handler]] = [
            (each.verb, each.path, functools.partial(self._call, each)) for each in CALLS
        ]
        return [
            Route(ROOT + path, _refusing(handler), methods=[verb])
            for verb, path, handler in (*own, *calls)
        ]

    async def _call(self, call: Call, request: Request) -> Response:
        kind, path = call.method.input_type, request.path_params
        if call.verb == "GET":
            asked = from_query(kind, request.query_params, call.parameters, path)
            if call.page:
                asked = paged(asked, call.parameters[call.page], request.query_params, call.page)
        else:
            check_names("parameter", request.query_params, ())
            asked = await from_body(kind, request, path)
        return JSONResponse(as_json(await self._gateway.call(call.method, asked)))

    async def _say_about(self, request: Request) -> Response:
        return JSONResponse(self._about())

    async def _spec_schema(self, request: Request) -> Response:
        document = JobSpec.model_json_schema()
        return JSONResponse({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.document())

    # Jobs

    async def _jobs(self, request: Request) -> Response:
        """Newest first, a page of them, without what is large."""
        given = request.query_params
        check_names("parameter", given, ("limit", "after"))
        limit = whole_number(given, "limit", 100, range(1, _MOST_JOBS + 1))
        answer = await self._gateway.call(method("Jobs/ListJobs"), jobs_pb2.ListJobsRequest())
        assert isinstance(answer, jobs_pb2.ListJobsResponse)
        jobs = list(reversed(answer.jobs))
        if "after" in given:
            names = [job.job_id for job in jobs]
            if given["after"] not in names:
                wrong = f"is {given['after']!r}, which is no job"
                raise RequestError(400, f"after: {wrong}", fields=(("after", wrong),))
            jobs = jobs[names.index(given["after"]) + 1 :]
        page = jobs[:limit]
        return JSONResponse(
            {
                "jobs": [as_json(job, _BULK) for job in page],
                "next": page[-1].job_id if len(jobs) > limit else None,
            }
        )

    async def _submit(self, request: Request) -> Response:
        asked = await _with_spec(request, jobs_pb2.SubmitRequest, ("request_id", "wait_for_nodes"))
        answer = await self._gateway.call(method("Jobs/Submit"), asked)
        return JSONResponse(as_json(answer), status_code=201)

    async def _check(self, request: Request) -> Response:
        asked = await _with_spec(request, jobs_pb2.CheckFitRequest, ())
        return JSONResponse(as_json(await self._gateway.call(method("Jobs/CheckFit"), asked)))

    async def _plan(self, request: Request) -> Response:
        body, document = await _spec_in(request, ASSUMED)
        try:
            return JSONResponse(await self._plans.plan(document, body))
        except SpecError as error:
            raise _wrong_spec(error) from error

    async def _curve(self, request: Request) -> Response:
        given = request.query_params
        check_names("parameter", given, ("points", "from", "to"))
        points = whole_number(given, "points", POINTS, range(2, _MOST_POINTS + 1))
        first = whole_number(given, "from", 0, _STEPS)
        last = whole_number(given, "to", _STEPS.stop - 1, _STEPS)
        asked = jobs_pb2.GetJobRequest(job_id=request.path_params["job_id"], with_steps=True)
        answer = await self._gateway.call(method("Jobs/GetJob"), asked)
        assert isinstance(answer, jobs_pb2.GetJobResponse)
        # A million steps take a second, in which the controller would hear nobody.
        columns = await run_in_threadpool(columns_of, answer.steps, points, range(first, last + 1))
        return JSONResponse({"num_steps": len(answer.steps), "columns": columns})

    async def _events(self, request: Request) -> Response:
        given = request.query_params
        check_names("parameter", given, ("after_step",))
        job_id = request.path_params["job_id"]
        # Its errors are answers, which those of a stream that has begun are not.
        await self._gateway.call(method("Jobs/GetJob"), jobs_pb2.GetJobRequest(job_id=job_id))
        watch = jobs_pb2.WatchJobRequest(
            job_id=job_id, after_step=whole_number(given, "after_step", 0, _STEPS), brief=True
        )
        messages = self._gateway.stream(method("Jobs/WatchJob"), watch)
        return self.streams.answer(messages, _job_events)

    async def _heat_map(self, request: Request) -> Response:
        # Here and below: with numpy, which no controller needs to start.
        from controller.web.noted import heat_map

        given = request.query_params
        check_names("parameter", given, ("measure", "order", "rows", "steps", "ranks", "attempt"))
        measure = one_of(given, "measure", tuple(Measure))
        rows = whole_number(given, "rows", 1024, range(1, _MOST_ROWS + 1))
        steps = whole_number(given, "steps", 200, range(1, NUM_STEP_RECORDS + 1))
        found = await heat_map(
            self._gateway,
            request.path_params["job_id"],
            Measure(measure),
            order=Order(one_of(given, "order", tuple(Order))),
            most_rows=rows,
            most_steps=steps,
            most_ranks=whole_number(given, "ranks", 0, range(2**31)),
            attempt=whole_number(given, "attempt", 0, _STEPS),
        )
        return Response(found, media_type=JSONResponse.media_type)

    async def _timeline(self, request: Request) -> Response:
        from controller.web.noted import step_timeline

        given = request.query_params
        check_names("parameter", given, ("step", "first", "most", "attempt"))
        step = whole_number(given, "step", 0, _STEPS) if "step" in given else None
        first = whole_number(given, "first", 0, range(2**31))
        most = whole_number(given, "most", 64, range(1, _MOST_TRACKS + 1))
        attempt = whole_number(given, "attempt", 0, _STEPS)
        job_id = request.path_params["job_id"]
        return JSONResponse(await step_timeline(self._gateway, job_id, step, first, most, attempt))

    async def _stacks(self, request: Request) -> Response:
        given = request.query_params
        check_names("parameter", given, ("rank",))
        asked = ranks_pb2.ReadStacksRequest(job_id=request.path_params["job_id"])
        if "rank" in given:
            asked.rank = whole_number(given, "rank", 0, range(2**31))
        found = self._gateway.stream(method("Ranks/ReadStacks"), asked)
        return JSONResponse({"ranks": [as_json(each) async for each in found]})

    async def _profile(self, request: Request) -> Response:
        given = request.query_params
        check_names("parameter", given, ("rank", "seconds", "beside"))
        seconds = whole_number(given, "seconds", 5, _PROFILE_SECONDS)
        rank = whole_number(given, "rank", 0, range(2**31))
        beside: int | str | None = given.get("beside")
        if beside not in (None, PEER):
            beside = whole_number(given, "beside", 0, range(2**31))
        job_id = request.path_params["job_id"]
        return JSONResponse(await profile(self._gateway, job_id, rank, seconds, beside))

    async def _logs(self, request: Request) -> Response:
        asked = _logs_request(request, follow=False)
        found = with_whole_characters(self._gateway.stream(method("Jobs/Logs"), asked))
        return JSONResponse({"chunks": [as_json(chunk) async for chunk in found]})

    async def _follow_logs(self, request: Request) -> Response:
        asked = _logs_request(request, follow=True)
        await self._gateway.call(method("Jobs/GetJob"), jobs_pb2.GetJobRequest(job_id=asked.job_id))
        messages = with_whole_characters(self._gateway.stream(method("Jobs/Logs"), asked))
        return self.streams.answer(messages, lambda chunk: iter([("chunk", as_json(chunk))]))

    async def _follow_run(self, request: Request) -> Response:
        """Begins with what was found so far, so that it needs no parameter to go on."""
        check_names("parameter", request.query_params, ())
        run_id = request.path_params["run_id"]
        # Its errors are answers, which those of a stream that has begun are not.
        kept = diagnostics_pb2.GetDiagnosticsRequest(run_id=run_id)
        await self._gateway.call(method("Diagnostics/GetDiagnostics"), kept)
        watch = diagnostics_pb2.WatchDiagnosticsRequest(run_id=run_id)
        messages = self._gateway.stream(method("Diagnostics/WatchDiagnostics"), watch)
        return self.streams.answer(messages, lambda news: iter([("progress", as_json(news))]))


def _refusing(handler: Handler) -> Handler:
    """The handler, whose refusals are answers."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            headers = {"Retry-After": "5"} if error.status == 503 else None
            return JSONResponse(error.as_json(), status_code=error.status, headers=headers)

    return handle


async def _with_spec(
    request: Request, kind: Callable[..., Message], others: tuple[str, ...]
) -> Message:
    """A request with the spec of a body."""
    body, document = await _spec_in(request, others)
    try:
        return kind(
            spec=struct_of(document), **{name: body[name] for name in others if name in body}
        )
    except TypeError as error:
        raise RequestError(400, f"the body is not as it should be: {error}") from error
    except SpecError as error:
        raise _wrong_spec(error) from error


async def _spec_in(
    request: Request, others: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body and the spec in it, which is an object or the text of a file."""
    body = await json_body(request)
    check_names("field", body, ("spec", "text", *others))
    if ("spec" in body) == ("text" in body):
        raise RequestError(400, "the body has to have one of spec and text")
    document = body.get("spec")
    if "text" in body:
        try:
            read = parse_document(str(body["text"]), "the spec")
        except SpecFileError as error:
            raise RequestError(400, str(error)) from error
        if read.problems:
            raise _wrong_spec(SpecError(read.problems))
        document = read.value
    if not isinstance(document, dict):
        raise RequestError(400, "the spec is no mapping of fields to values")
    return body, document


def _wrong_spec(error: SpecError) -> RequestError:
    problems = tuple((each.field, each.message) for each in error.problems)
    return RequestError(400, "the job spec has a problem", fields=problems)


def _logs_request(request: Request, *, follow: bool) -> jobs_pb2.LogsRequest:
    given = request.query_params
    check_names("parameter", given, ("rank", "attempt", "tail_bytes", "since_s", "grep"))
    of_all = given.get("attempt") == "all"
    # With either of them the whole log is asked for, unless it is said otherwise.
    is_selective = bool(given.get("since_s") or given.get("grep"))
    asked = jobs_pb2.LogsRequest(
        job_id=request.path_params["job_id"],
        follow=follow,
        attempt=0 if of_all else whole_number(given, "attempt", 0, _STEPS),
        all_attempts=of_all,
        tail_bytes=whole_number(given, "tail_bytes", 0 if is_selective else 65_536, _LOG_BYTES),
        timestamps=True,
        since_s=number(given, "since_s", 0.0),
        grep=given.get("grep", ""),
    )
    if "rank" in given:
        asked.rank = whole_number(given, "rank", 0, range(2**31))
    return asked


def _job_events(message: Message) -> Iterator[Event]:
    assert isinstance(message, jobs_pb2.WatchJobResponse)
    if message.HasField("job"):
        yield "job", as_json(message.job, _BULK if message.is_brief else ())
    if message.steps:
        yield "steps", [as_json(each) for each in message.steps]
