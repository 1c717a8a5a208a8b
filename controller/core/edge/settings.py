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
_USUAL_PERIOD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Of one job. Defaults are those of `outlast.recovery.RecoverySpec`."""

    layout: Layout
    heartbeat_period_s: float = _USUAL_PERIOD_S
    limits: Limits = _LIMITS
    controller_absence_limit_s: float = 1800.0
    first_step_timeout_s: float = 1800.0
    hang_timeout_s: float = 300.0
    # By detector: off, log or act.
    modes: Mapping[str, str] = field(default_factory=dict)

    @property
    def step_timeout_s(self) -> float:
        """For how long no step may be heard of.

        Heartbeats bring steps. Every 2 s or more often, that is within `hang_timeout_s`, which is
        10 s at least; rarer ones may each bring a step later by their period.
        """
        return self.hang_timeout_s + max(0.0, self.heartbeat_period_s - _USUAL_PERIOD_S)


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
