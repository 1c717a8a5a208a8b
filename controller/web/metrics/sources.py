"""Where the figures come from: what every collector is given at a scrape."""

from __future__ import annotations

from dataclasses import dataclass

from controller.clock import SteadyClock
from controller.core.edge.edge import Edge
from controller.core.records import JobRecord
from controller.counters import Counters
from controller.effects import Effects
from controller.service import Service
from controller.sessions.incoming import Incoming
from controller.sessions.session import Sessions
from controller.trends.watch import TrendWatch

# Long enough for any scraper to see how a job ended.
ENDED_JOBS_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The parts of a controller that know something worth showing."""

    service: Service
    edge: Edge
    sessions: Sessions
    effects: Effects
    counters: Counters
    incoming: Incoming
    clock: SteadyClock
    trends: TrendWatch

    def shown_jobs(self) -> list[JobRecord]:
        """Jobs that have series: all but those that ended a while ago, so that a
        controller that lives for months stays small."""
        now_s = self.clock.now_s()
        return [
            job
            for job in self.service.state.jobs.values()
            if job.finished_s is None or now_s - job.finished_s < ENDED_JOBS_S
        ]
