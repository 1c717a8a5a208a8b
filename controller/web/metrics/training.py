"""How training goes: step, loss, speed, and how well the hardware is used."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.efficiency import epochs, hardware_flops, peak_of, time_left_s, token_perplexity
from controller.families import Counter, Family, Gauge, Histogram
from controller.specs import spec_of
from controller.web.metrics.sources import Sources
from outlast.flops import Convention, flops_per_token

_BY_JOB = ("job_id",)

STEP = Gauge("outlast_step", "Last completed step", _BY_JOB)
CHANGED = Gauge(
    "outlast_step_last_change_timestamp_seconds", "When the last step was completed", _BY_JOB
)
LOSS = Gauge("outlast_loss", "Training loss of the last step", _BY_JOB)
GRAD_NORM = Gauge("outlast_grad_norm", "Global gradient norm of the last step", _BY_JOB)
PERPLEXITY = Gauge(
    "outlast_perplexity",
    "exp(loss) of the last step; absent where the loss is not the cross-entropy of tokens in nats "
    "alone: of scripts, with the order of sentences, with terms of experts' routers",
    _BY_JOB,
)
EPOCHS = Gauge(
    "outlast_epochs",
    "Passes over the data of training so far, all sources together; absent where it is not known "
    "how many samples there are",
    _BY_JOB,
)
TIME_LEFT = Gauge(
    "outlast_time_left_seconds",
    "Until the last step, at the pace of the last steps; absent unless the job is RUNNING with "
    "steps to do, for a script, and before the first step of an attempt",
    _BY_JOB,
)
LEARNING_RATE = Gauge("outlast_learning_rate", "Learning rate of the last step", _BY_JOB)
SPEED = Gauge("outlast_tokens_per_second", "Speed over the last steps", _BY_JOB)
TOKENS = Counter("outlast_tokens_total", "Tokens trained on, redone steps included", _BY_JOB)
DURATION = Histogram("outlast_step_duration_seconds", "Time from data to optimizer step", _BY_JOB)
GOODPUT = Counter(
    "outlast_goodput_seconds_total",
    "Time in steps that the job had not completed before; its rate is the effective training "
    "time ratio",
    _BY_JOB,
)
REDONE = Counter("outlast_redone_steps_total", "Steps that were trained a second time", _BY_JOB)
FLOPS = Gauge(
    "outlast_model_flops_per_second",
    "Model FLOPs per second over the last steps. convention full: each token counted to attend to "
    "the whole sequence; windowed: to what its mask and window let through",
    (*_BY_JOB, "convention"),
)
UTILIZATION = Gauge(
    "outlast_model_flops_utilization_ratio",
    "The same as a share of what the job's devices could do. peak names it: a device by the data "
    "sheet, for the job's precision; elsewhere `matmul check`, measured on the job's nodes "
    "(float32, all workers together), absent until every node was checked under this controller",
    (*_BY_JOB, "convention", "peak"),
)
HARDWARE_FLOPS = Gauge(
    "outlast_hardware_flops_per_second",
    "FLOPs per second over the last steps that the devices really do: model FLOPs, and what the "
    "backward pass computes a second time (parallel.recompute); convention as of the model FLOPs",
    (*_BY_JOB, "convention"),
)
HARDWARE_UTILIZATION = Gauge(
    "outlast_hardware_flops_utilization_ratio",
    "The same as a share of what the job's devices could do; peak as of the model FLOPs "
    "utilization, which it exceeds by what is recomputed",
    (*_BY_JOB, "convention", "peak"),
)
FAMILIES: tuple[Family, ...] = (
    *(STEP, CHANGED, LOSS, PERPLEXITY, EPOCHS, TIME_LEFT, GRAD_NORM, LEARNING_RATE, SPEED, TOKENS),
    *(DURATION, GOODPUT, REDONE, FLOPS, UTILIZATION, HARDWARE_FLOPS, HARDWARE_UTILIZATION),
)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    curves, counters = sources.service.curves, sources.counters
    lasts = [
        (job, last) for job in sources.shown_jobs() if (last := curves.last(job.job_id)) is not None
    ]
    yield STEP.of(((job.job_id,), last.step) for job, last in lasts)
    yield CHANGED.of(((job.job_id,), last.at_s) for job, last in lasts)
    yield LOSS.of(((job.job_id,), last.loss) for job, last in lasts)
    yield PERPLEXITY.of(
        ((job.job_id,), value)
        for job, last in lasts
        if (value := token_perplexity(job, last)) is not None
    )
    yield EPOCHS.of(
        ((job.job_id,), value) for job, last in lasts if (value := epochs(job, last)) is not None
    )
    yield TIME_LEFT.of(
        ((job.job_id,), value)
        for job, last in lasts
        if (value := time_left_s(job, last, curves.step_s(job.job_id))) is not None
    )
    yield GRAD_NORM.of(((job.job_id,), last.grad_norm) for job, last in lasts)
    yield LEARNING_RATE.of(((job.job_id,), last.learning_rate) for job, last in lasts)
    yield TOKENS.of(((job.job_id,), curves.num_tokens(job.job_id)) for job, _ in lasts)
    counted = [(job.job_id, counters.job(job.job_id)) for job, _ in lasts]
    yield DURATION.of(((job_id,), counts.steps) for job_id, counts in counted)
    yield GOODPUT.of(((job_id,), counts.goodput_s) for job_id, counts in counted)
    yield REDONE.of(((job_id,), counts.redone_steps) for job_id, counts in counted)
    yield from _speeds(sources, [job for job, _ in lasts])


def _speeds(sources: Sources, jobs: list[JobRecord]) -> Iterator[Metric]:
    # A job that stands still has no speed: its last one would look like progress.
    speeds = [
        (job, sources.service.curves.tokens_per_s(job.job_id) if _is_training(job) else 0.0)
        for job in jobs
    ]
    yield SPEED.of(((job.job_id,), speed) for job, speed in speeds)
    known = sources.counters.matmul_flops
    peaks = {job.job_id: peak_of(job, known) for job in jobs}
    for per_token, rate, share in (
        (_model_flops, FLOPS, UTILIZATION),
        (hardware_flops, HARDWARE_FLOPS, HARDWARE_UTILIZATION),
    ):
        flops = [
            (job, convention, speed * per_token(job.spec_json, convention))
            for job, speed in speeds
            for convention in Convention
        ]
        yield rate.of(((job.job_id, convention), value) for job, convention, value in flops)
        yield share.of(
            ((job.job_id, convention, peak.name), value / peak.flops_per_s)
            for job, convention, value in flops
            if (peak := peaks[job.job_id]) is not None
        )


def _model_flops(spec_json: str, convention: Convention) -> float:
    return flops_per_token(spec_of(spec_json).model.shape, convention)


def _is_training(job: JobRecord) -> bool:
    return job.state is JobState.RUNNING
