"""What a job's own file says to the edge: its limits, and what its detectors may do.

The file is parsed outside, once for each text of it, and kept here as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from controller.core.edge.liveness import Limits
from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from outlast.ids import JobId
from outlast.layout import Layout

_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Of one job. Defaults are those of `outlast.recovery.RecoverySpec`."""

    layout: Layout
    heartbeat_period_s: float = 2.0
    limits: Limits = _LIMITS
    controller_absence_limit_s: float = 1800.0
    first_step_timeout_s: float = 1800.0
    hang_timeout_s: float = 300.0
    # By detector: off, log or act.
    modes: Mapping[str, str] = field(default_factory=dict)


# Of nodes without a job.
NO_JOB = JobSettings(layout=Layout(tp=1, pp=1, dp=1))

SettingsOf = Callable[[JobRecord], JobSettings]


class SettingsTable:
    """The settings of live jobs; a job that shrinks or grows has another text.

    Messages about a job may come after its end: those of an ended job are not kept.
    """

    def __init__(self, settings_of: SettingsOf) -> None:
        self._settings_of = settings_of
        self._known: dict[JobId, tuple[str, JobSettings]] = {}

    def of(self, job: JobRecord) -> JobSettings:
        if job.state in TERMINAL:
            return self._settings_of(job)
        known = self._known.get(job.job_id)
        if known is None or (known[0] is not job.spec_json and known[0] != job.spec_json):
            known = self._known[job.job_id] = (job.spec_json, self._settings_of(job))
        return known[1]

    def forget(self, job: JobId) -> None:
        self._known.pop(job, None)
