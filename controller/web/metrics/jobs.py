"""Jobs as the journal has them: changes, states, attempts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.core import accounting
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.families import Counter, Family, Gauge, Info
from controller.specs import spec_of
from controller.web.metrics.sources import Sources
from outlast.skipped import num_skipped
from outlast.spec import JobSpec

_BY_JOB = ("job_id",)

INFO = Info(
    "outlast_job_info",
    "Facts about a job, to be joined",
    ("job_id", "name", "model", "parallelism"),
)
STATE = Gauge("outlast_job_state", "1 for the job's present state", ("job_id", "state"))
SINCE = Gauge(
    "outlast_job_state_change_timestamp_seconds", "When it came into its present state", _BY_JOB
)
NEEDS_PERSON = Gauge(
    "outlast_job_needs_person",
    "1 from when recovery paused it until a person resumes or cancels it",
    _BY_JOB,
)
NODE_INFO = Info("outlast_job_node_info", "1 for each node of a job", ("job_id", "node"))
TARGET = Gauge("outlast_job_target_step", "Steps that the job is to train", _BY_JOB)
ATTEMPT = Gauge("outlast_job_attempt", "Number of its present start", _BY_JOB)
RESTARTS = Counter("outlast_restarts_total", "Starts of the job after its first", _BY_JOB)
RETRIES = Gauge("outlast_retries_left", "Faults it may still survive", _BY_JOB)
SKIPPED = Gauge(
    "outlast_job_skipped_steps",
    "Steps that are left out because their batch gave NaN or Inf twice",
    _BY_JOB,
)
SECONDS = Gauge(
    "outlast_job_part_seconds",
    "Time since the job was submitted by what it went into; the parts sum to all of it",
    ("job_id", "part"),
)
ETTR = Gauge("outlast_job_ettr_ratio", "Productive share of the job's whole time", _BY_JOB)
ETTR_HOUR = Gauge("outlast_job_ettr_hour_ratio", "Productive share of the job's last hour", _BY_JOB)
FAMILIES: tuple[Family, ...] = (
    *(INFO, STATE, SINCE, NEEDS_PERSON, NODE_INFO, TARGET, ATTEMPT, RESTARTS, RETRIES),
    *(SKIPPED, SECONDS, ETTR, ETTR_HOUR),
)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    jobs = sources.shown_jobs()
    specs = [(job, spec_of(job.spec_json)) for job in jobs]
    yield INFO.of((job.job_id, job.name, _model(spec), _parallelism(spec)) for job, spec in specs)
    yield STATE.of(
        ((job.job_id, str(state)), job.state is state) for job in jobs for state in JobState
    )
    yield SINCE.of(((job.job_id,), job.since_s) for job in jobs)
    yield NEEDS_PERSON.of(((job.job_id,), job.needs_person) for job in jobs)
    yield NODE_INFO.of(
        (job.job_id, node)
        for job in jobs
        for node in job.nodes
        if node is not None and job.finished_s is None
    )
    targets = [(job, job.plan.total_steps) for job in jobs]
    yield TARGET.of(((job.job_id,), last) for job, last in targets if last is not None)
    yield ATTEMPT.of(((job.job_id,), job.attempt) for job in jobs)
    yield RESTARTS.of(((job.job_id,), job.restarts) for job in jobs)
    yield RETRIES.of(((job.job_id,), job.retry_left) for job in jobs)
    yield SKIPPED.of(((job.job_id,), num_skipped(job.skipped, last)) for job, last in targets)
    yield from _accounts(jobs, sources.clock.now_s())


def _accounts(jobs: list[JobRecord], now_s: float) -> Iterator[Metric]:
    """What the jobs' time went into."""
    parts = [(job.job_id, accounting.totals(job.account, now_s)) for job in jobs]
    hours = [(job.job_id, accounting.window(job.account, now_s)) for job in jobs]
    yield SECONDS.of(
        ((job_id, str(part)), seconds)
        for job_id, seconds_by_part in parts
        for part, seconds in seconds_by_part.items()
    )
    yield ETTR.of(((job_id,), accounting.ettr(seconds) or 0.0) for job_id, seconds in parts)
    yield ETTR_HOUR.of(((job_id,), accounting.ettr(seconds) or 0.0) for job_id, seconds in hours)


def _model(spec: JobSpec) -> str:
    return f"{spec.model.layers}x{spec.model.hidden}"


def _parallelism(spec: JobSpec) -> str:
    parallel = spec.parallel
    context = f"-cp{parallel.cp}" if parallel.cp > 1 else ""
    return f"tp{parallel.tp}{context}-pp{parallel.pp}-dp{parallel.dp}"
