"""A synchronous client of the controller, for scripts and the command line.

Errors of the service become ours: a spec that is wrong raises `SpecError` with
every problem, a controller that does not answer raises `UnavailableError`.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import grpc

from outlast.access import Access, noted_in
from outlast.access import of as access_of
from outlast.channel import Bearer, open_channel
from outlast.client_errors import NotFoundError as NotFoundError
from outlast.client_errors import RefusedError as RefusedError
from outlast.client_errors import UnavailableError as UnavailableError
from outlast.client_errors import explained
from outlast.code.sending import with_code
from outlast.log_fields import LogFields
from outlast.paging import pages
from outlast.problems import SpecError
from outlast.spec.message import spec_message
from outlast.specfile import read_document
from outlast.v1 import (
    access_pb2,
    common_pb2,
    diagnostics_pb2,
    incidents_pb2,
    jobs_pb2,
    nodes_pb2,
    ranks_pb2,
    trends_pb2,
)
from outlast.v1.access_pb2_grpc import AccessStub
from outlast.v1.code_pb2_grpc import CodeStub
from outlast.v1.diagnostics_pb2_grpc import DiagnosticsStub
from outlast.v1.incidents_pb2_grpc import IncidentsStub
from outlast.v1.jobs_pb2_grpc import JobsStub
from outlast.v1.nodes_pb2_grpc import NodesStub
from outlast.v1.ranks_pb2_grpc import RanksStub
from outlast.v1.trends_pb2_grpc import TrendsStub

DEFAULT_ADDRESS = "127.0.0.1:7070"
# A busy controller answers in milliseconds; one that does not answer for so long is away.
CALL_TIMEOUT_S = 30.0
# Of the audit log in one answer, also by a controller from before it came in pages.
_MOST_ENTRIES = 10_000

_Response = TypeVar("_Response")


class Client:
    """A connection to a controller. Use it in a `with` block, or call `close`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        state_dir: Path | None = None,
        access: Access | None = None,
        longest_call_s: float = math.inf,
    ) -> None:
        """Connect to `address` (host:port), or to the controller of a state directory.

        `access` is what it is shown; by default what the environment or a login has for it.
        No call that has one answer takes longer than `longest_call_s`.

        Raises:
            UnavailableError: no controller runs on the state directory.
            AccessError: what it is to be shown cannot be read, or not be sent in clear text.
        """
        noted = noted_in(state_dir) if state_dir is not None and not address else None
        if state_dir is not None and not address and noted is None:
            raise UnavailableError(
                f"no controller runs on {state_dir}: its controller.json cannot be read; start "
                "one with `outlast up`"
            )
        self.address = address or (noted.address if noted else DEFAULT_ADDRESS)
        self._longest_call_s = longest_call_s
        shown = access or (noted.access if noted else access_of(self.address))
        self._bearer = Bearer(shown)
        self._channel = open_channel(self.address, shown, self._bearer)
        self._access = AccessStub(self._channel)
        self._code = CodeStub(self._channel)
        self._jobs = JobsStub(self._channel)
        self._nodes = NodesStub(self._channel)
        self._incidents = IncidentsStub(self._channel)
        self._ranks = RanksStub(self._channel)
        self._diagnostics = DiagnosticsStub(self._channel)
        self._trends = TrendsStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._bearer.close()
        self._channel.close()

    def who_am_i(self) -> access_pb2.WhoAmIResponse:
        """The caller, as the controller knows him."""
        return self._call(self._access.WhoAmI, access_pb2.WhoAmIRequest())

    def audit(
        self, *, most: int = 1_000, since_s: float = 0.0, caller: str = ""
    ) -> tuple[access_pb2.AuditEntry, ...]:
        """Calls that changed something or were refused, newest first; 0: all. For admins."""
        request = access_pb2.ReadAuditRequest(since_s=since_s, caller=caller)
        ask = partial(self._call, self._access.ReadAudit)
        answers = pages(ask, request, "most", most, at_once=_MOST_ENTRIES)
        return tuple(each for page in answers for each in page.entries)

    def submit(
        self,
        spec: dict[str, Any] | Path | str,
        *,
        request_id: str | None = None,
        wait_for_nodes: bool = False,
    ) -> jobs_pb2.Job:
        """Submit a spec, or the YAML or JSON file at a path; repeatable with a request id.

        Relative paths in it are below the current folder. The folder of `workload.code` is sent
        first, unless the controller has it as it is. With `wait_for_nodes` a job is queued
        though no connected node has what each of its nodes needs.

        Raises:
            SpecError: with every problem that the spec has.
            SpecFileError: the file is no job spec at all.
        """
        value: object = spec
        if not isinstance(spec, dict):
            if (read := read_document(spec)).problems:
                raise SpecError(read.problems)
            value = read.value
        if isinstance(value, dict):
            value = self.send_code(value)
        name = request_id or uuid.uuid4().hex
        request = jobs_pb2.SubmitRequest(
            spec=spec_message(value), request_id=name, wait_for_nodes=wait_for_nodes
        )
        return self._call(self._jobs.Submit, request).job

    def send_code(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The spec with the digest of the folder of `workload.code`, which is sent unless the
        controller has it; one without such a folder as it is.

        Raises:
            SpecError: with every problem of a spec whose folder would be sent, or why that cannot.
        """
        with self._translated():
            return with_code(spec, self._code)

    def check_fit(
        self, spec: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> jobs_pb2.CheckFitResponse:
        """How a job would fit the connected nodes; starts nothing."""
        request = jobs_pb2.CheckFitRequest(spec=spec_message(spec))
        return self._call(self._jobs.CheckFit, request, timeout_s=timeout_s)

    def get(
        self, job_id: str, *, with_steps: bool = False
    ) -> tuple[jobs_pb2.Job, tuple[common_pb2.StepReport, ...]]:
        """A job as it stands, and every step report of it by step if asked for."""
        request = jobs_pb2.GetJobRequest(job_id=job_id, with_steps=with_steps)
        response: jobs_pb2.GetJobResponse = self._call(self._jobs.GetJob, request)
        return response.job, tuple(response.steps)

    def list(self) -> tuple[jobs_pb2.Job, ...]:
        """Every job, oldest first."""
        response = self._call(self._jobs.ListJobs, jobs_pb2.ListJobsRequest())
        return tuple(response.jobs)

    def watch(self, job_id: str, *, after_step: int = 0) -> Iterator[jobs_pb2.WatchJobResponse]:
        """The job at once, then its changes and new step reports, until it ends.

        A job comes at most once a second, but for changes of its state; it is always whole.
        """
        request = jobs_pb2.WatchJobRequest(job_id=job_id, after_step=after_step, brief=True)
        known = jobs_pb2.Job()
        for update in self._stream(self._jobs.WatchJob, request):
            if update.HasField("job"):
                if update.is_brief:
                    update.job.nodes.extend(known.nodes)
                    update.job.spec.CopyFrom(known.spec)
                known = update.job
            yield update

    def cancel(self, job_id: str) -> jobs_pb2.Job:
        """End a job."""
        return self._call(self._jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id)).job

    def pause(self, job_id: str) -> jobs_pb2.Job:
        """Stop a job so that it can go on later."""
        return self._call(self._jobs.PauseJob, jobs_pb2.PauseJobRequest(job_id=job_id)).job

    def resume(
        self,
        job_id: str,
        *,
        from_scratch: bool = False,
        checkpoint_step: int | None = None,
        checkpoint_url: str = "",
    ) -> jobs_pb2.Job:
        """Resume a paused job, from its newest state by default.

        `from_scratch`: as when it was submitted. `checkpoint_step`: from its own committed
        checkpoint of that step. `checkpoint_url`: from another root's newest, or from that of
        `checkpoint_step` there. Newer states of its own are given up.
        """
        request = jobs_pb2.ResumeJobRequest(
            job_id=job_id,
            from_scratch=from_scratch,
            checkpoint_step=checkpoint_step,
            checkpoint_url=checkpoint_url,
        )
        return self._call(self._jobs.ResumeJob, request).job

    def push_checkpoint(
        self, job_id: str, *, url: str = "", timeout_s: float = 0.0
    ) -> jobs_pb2.Job:
        """Upload what the nodes of a paused job hold in host memory; its reason says how it goes.

        `url` is another checkpoint root than the job's own; `timeout_s` 0 is the spec's.
        """
        request = jobs_pb2.PushCheckpointRequest(job_id=job_id, url=url, timeout_s=timeout_s)
        return self._call(self._jobs.PushCheckpoint, request).job

    def logs(
        self, job_id: str, *, attempt: int = 0, **fields: Unpack[LogFields]
    ) -> Iterator[jobs_pb2.LogsResponse]:
        """Output of the job's workers in an attempt, 0 for the newest and -1 for all that are
        kept; with `follow`, until the job ends."""
        request = jobs_pb2.LogsRequest(
            job_id=job_id, attempt=max(0, attempt), all_attempts=attempt < 0, **fields
        )
        return self._stream(self._jobs.Logs, request)

    def nodes(self, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[nodes_pb2.Node, ...]:
        """Every node that has ever joined, by name."""
        found: dict[str, nodes_pb2.Node] = {}
        request = nodes_pb2.ListNodesRequest()
        ask = partial(self._call, self._nodes.ListNodes, timeout_s=timeout_s)
        for page in pages(ask, request, "most"):
            # One that needs attention meanwhile may come twice.
            found |= {node.node_id: node for node in page.nodes}
        return tuple(found[name] for name in sorted(found))

    def some_nodes(self, most: int) -> tuple[tuple[nodes_pb2.Node, ...], int]:
        """So many nodes at most, those that need attention first; and how many there are."""
        response = self._call(self._nodes.ListNodes, nodes_pb2.ListNodesRequest(most=most))
        return tuple(response.nodes), response.num_nodes

    def cordon(self, node_id: str) -> nodes_pb2.Node:
        """Keep new work off a node."""
        return self._call(self._nodes.CordonNode, nodes_pb2.CordonNodeRequest(node_id=node_id)).node

    def uncordon(self, node_id: str) -> nodes_pb2.Node:
        """Lift a cordon, a drain or a quarantine."""
        request = nodes_pb2.UncordonNodeRequest(node_id=node_id)
        return self._call(self._nodes.UncordonNode, request).node

    def drain(self, node_id: str) -> nodes_pb2.Node:
        """Cordon a node and move its work elsewhere."""
        return self._call(self._nodes.DrainNode, nodes_pb2.DrainNodeRequest(node_id=node_id)).node

    def forget_node(self, node_id: str) -> None:
        """Take a node that was given up and is gone off the list."""
        self._call(self._nodes.ForgetNode, nodes_pb2.ForgetNodeRequest(node_id=node_id))

    def rejoin_node(self, node_id: str) -> None:
        """Let a node get a certificate for another key with the join token."""
        self._call(self._nodes.RejoinNode, nodes_pb2.RejoinNodeRequest(node_id=node_id))

    def ranks(self, job_id: str, *, first: int = 0, most: int = 0) -> ranks_pb2.ListRanksResponse:
        """What was last heard of ranks from `first` on, up to `most` of them; 0: up to 4,096."""
        request = ranks_pb2.ListRanksRequest(job_id=job_id, first=first, most=most)
        return self._call(self._ranks.ListRanks, request)

    def times(
        self,
        job_id: str,
        *,
        ranks: range | None = None,
        attempt: int = 0,
        steps: tuple[int, int] = (0, 0),
        since_s: float = 0.0,
    ) -> Iterator[ranks_pb2.ReadTimesResponse]:
        """Ranks' last operations, steps and spans; with `since_s` what had not ended by then."""
        first, last = steps
        request = ranks_pb2.ReadTimesRequest(
            job_id=job_id, attempt=attempt, first_step=first, last_step=last, since_s=since_s
        )
        if ranks is not None:
            request.rank, request.num_ranks = ranks.start, len(ranks)
        return self._stream(self._ranks.ReadTimes, request)

    def stacks(
        self, job_id: str, *, rank: int | None = None, native: bool = False
    ) -> Iterator[ranks_pb2.ReadStacksResponse]:
        """Where ranks that run stand now; for `native` frames each stands still meanwhile."""
        request = ranks_pb2.ReadStacksRequest(job_id=job_id, rank=rank, native=native)
        return self._stream(self._ranks.ReadStacks, request)

    def profile(
        self, job_id: str, rank: int, *, seconds: int, rate: int = 100, native: bool = False
    ) -> ranks_pb2.RecordProfileResponse:
        """Where a rank that runs is in the next seconds, sampled so many times in each."""
        request = ranks_pb2.RecordProfileRequest(
            job_id=job_id, rank=rank, seconds=seconds, rate=rate, native=native
        )
        # A node has half a minute more than the recording to answer.
        timeout_s = seconds + 2 * CALL_TIMEOUT_S
        return self._call(self._ranks.RecordProfile, request, timeout_s=timeout_s)

    def incidents(
        self, job_id: str = "", *, newest: int = 0, brief: bool = False
    ) -> tuple[incidents_pb2.Incident, ...]:
        """Of a job or all, oldest first, or the `newest`; `brief` ones without evidence."""
        request = incidents_pb2.ListIncidentsRequest(job_id=job_id, brief=brief)
        ask = partial(self._call, self._incidents.ListIncidents)
        newest_first = list(pages(ask, request, "newest", newest))
        return tuple(each for page in reversed(newest_first) for each in page.incidents)

    def incident(self, incident_id: str) -> incidents_pb2.Incident:
        """One incident."""
        request = incidents_pb2.GetIncidentRequest(incident_id=incident_id)
        return self._call(self._incidents.GetIncident, request).incident

    def history(
        self, job_id: str, *, most: int = 0, after: str = "", only: str = ""
    ) -> jobs_pb2.GetHistoryResponse:
        """States that a job went through and checkpoints that were committed, `most` of each, or
        `only` "states" or "checkpoints"; older ones `after` another answer's `next`."""
        request = jobs_pb2.GetHistoryRequest(job_id=job_id, most=most, after=after, only=only)
        return self._call(self._jobs.GetHistory, request)

    def trends(self, job_id: str) -> trends_pb2.JobTrends:
        """What days and weeks of a job show."""
        return self._call(self._trends.GetJobTrends, trends_pb2.GetJobTrendsRequest(job_id=job_id))

    def diagnose(
        self, nodes: Sequence[str] = (), *, job_id: str = "", suite: str = "preflight"
    ) -> diagnostics_pb2.RunDiagnosticsResponse:
        """Begin a run of checks on these nodes, those of a job or all connected ones."""
        request = diagnostics_pb2.RunDiagnosticsRequest(nodes=nodes, job_id=job_id, suite=suite)
        return self._call(self._diagnostics.RunDiagnostics, request)

    def watch_diagnostics(self, run_id: str) -> Iterator[diagnostics_pb2.WatchDiagnosticsResponse]:
        """Findings of a run as they come; the last message has its report."""
        request = diagnostics_pb2.WatchDiagnosticsRequest(run_id=run_id)
        return self._stream(self._diagnostics.WatchDiagnostics, request)

    def diagnostic_runs(self) -> tuple[diagnostics_pb2.DiagnosticRun, ...]:
        """The runs that are kept, newest first, without their findings."""
        request = diagnostics_pb2.ListDiagnosticsRequest()
        ask = partial(self._call, self._diagnostics.ListDiagnostics)
        return tuple(run for page in pages(ask, request, "newest") for run in page.runs)

    def diagnostic_run(self, run_id: str) -> diagnostics_pb2.DiagnosticRun:
        """One run with all its findings."""
        request = diagnostics_pb2.GetDiagnosticsRequest(run_id=run_id)
        return self._call(self._diagnostics.GetDiagnostics, request).run

    def _call(
        self,
        method: Callable[..., _Response],
        request: object,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> _Response:
        with self._translated():
            return method(request, timeout=min(timeout_s, self._longest_call_s))

    def _stream(
        self, method: grpc.UnaryStreamMultiCallable[Any, _Response], request: object
    ) -> Iterator[_Response]:
        again = self._bearer.shown_again(self.who_am_i)
        with self._translated(), again, ExitStack() as stack:
            call = method(request)
            stack.callback(call.cancel)
            yield from call

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise explained(error, self.address) from error
