"""Checkpoints in storage: how old, how large, how long they take, how often they fail."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.families import Counter, Family, Gauge, Histogram
from controller.specs import spec_of
from controller.web.metrics.sources import Sources

_BY_JOB = ("job_id",)

STEP = Gauge("outlast_checkpoint_committed_step", "Newest step that is in storage, whole", _BY_JOB)
INTERVAL = Gauge(
    "outlast_checkpoint_interval_steps", "Steps between two uploads, by the job's spec", _BY_JOB
)
AT = Gauge(
    "outlast_checkpoint_last_success_timestamp_seconds",
    "When a checkpoint was committed last; absent until one is, under this controller",
    _BY_JOB,
)
SIZE = Gauge("outlast_checkpoint_size_bytes", "Size of the checkpoint committed last", _BY_JOB)
BYTES = Counter("outlast_checkpoint_bytes_total", "Bytes of all committed checkpoints", _BY_JOB)
DURATION = Histogram(
    "outlast_checkpoint_stage_duration_seconds",
    "upload: bytes to storage; commit: the rest of the way, from the seal in host memory to "
    "the commit record",
    ("job_id", "stage"),
)
FAILURES = Counter(
    "outlast_checkpoint_failures_total",
    "Checkpoints that did not get to storage, and old ones that could not be removed",
    ("job_id", "stage"),
)
FAMILIES: tuple[Family, ...] = (STEP, INTERVAL, AT, SIZE, BYTES, DURATION, FAILURES)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    jobs = sources.shown_jobs()
    counted = [(job.job_id, sources.counters.job(job.job_id)) for job in jobs]
    yield STEP.of(((job.job_id,), job.committed_step or 0) for job in jobs)
    yield INTERVAL.of(
        ((job.job_id,), spec_of(job.spec_json).checkpoint.storage_interval_steps) for job in jobs
    )
    done = [(job_id, counts) for job_id, counts in counted if counts.committed_at_s is not None]
    yield AT.of(((job_id,), counts.committed_at_s or 0.0) for job_id, counts in done)
    yield SIZE.of(((job_id,), counts.committed_size_bytes) for job_id, counts in done)
    yield BYTES.of(((job_id,), counts.stored_bytes) for job_id, counts in counted)
    yield DURATION.of(
        ((job_id, stage), distribution)
        for job_id, counts in counted
        for stage, distribution in (("upload", counts.upload), ("commit", counts.commit))
    )
    yield FAILURES.of(
        ((job_id, stage), count)
        for job_id, counts in counted
        for stage, count in counts.troubles.items()
    )
