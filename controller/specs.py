"""The spec of a journalled job, parsed once, and what the edge needs of it."""

from __future__ import annotations

import json
from functools import lru_cache

from controller.core.edge.liveness import Limits
from controller.core.edge.settings import JobSettings
from controller.core.records import JobRecord
from outlast.detectors import DetectorsSpec
from outlast.layout import Layout
from outlast.recovery import RecoverySpec
from outlast.spec import JobSpec


@lru_cache(maxsize=256)
def spec_of(spec_json: str) -> JobSpec:
    """The spec of a job, which was validated when the job was submitted."""
    return JobSpec.model_validate_json(spec_json)


@lru_cache(maxsize=4096)
def code_digest_of(spec_json: str) -> str:
    """Which archive of code a job runs; "" of one that runs none."""
    code = json.loads(spec_json).get("workload", {}).get("code", {})
    return str(code.get("digest") or "")


def settings_of(job: JobRecord) -> JobSettings:
    """What the edge needs of a job's spec; the edge remembers it."""
    spec = spec_of(job.spec_json)
    return job_settings(spec.recovery, spec.detectors, spec.layout)


def job_settings(recovery: RecoverySpec, detectors: DetectorsSpec, layout: Layout) -> JobSettings:
    """Limits and detectors of a job as plain values."""
    return JobSettings(
        layout=layout,
        heartbeat_period_s=recovery.heartbeat_period_s,
        limits=Limits(
            late_s=recovery.heartbeat_late_s,
            lost_s=recovery.heartbeat_lost_s,
            silent_s=recovery.heartbeat_silent_s,
        ),
        controller_absence_limit_s=recovery.controller_absence_limit_s,
        first_step_timeout_s=recovery.first_step_timeout_s,
        hang_timeout_s=recovery.hang_timeout_s,
        modes={name: str(mode) for name, mode in detectors},
    )
