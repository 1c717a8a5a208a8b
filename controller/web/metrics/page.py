"""The page: every collector of the controller.

Figures are computed from the state when somebody asks. States are one-hot
gauges, facts are `_info` series to be joined, and no label has values without
bound: a job, a node, or a word of a closed set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from controller.families import Distribution, Family
from controller.web.metrics import (
    checkpoints,
    checks,
    fleet,
    incidents,
    itself,
    jobs,
    training,
    trends,
)
from controller.web.metrics.sources import Sources

_SUBJECTS = (jobs, training, checkpoints, incidents, fleet, checks, trends)
FAMILIES: tuple[Family, ...] = (
    *itself.FAMILIES,
    *(family for subject in _SUBJECTS for family in subject.FAMILIES),
)

Collect = Callable[[], Iterator[Metric]]


class ControllerMetrics:
    """Everything about jobs, nodes and the controller itself."""

    def __init__(self) -> None:
        self._commits = Distribution(itself.COMMIT_BOUNDS_S)
        self._sources: Sources | None = None
        self._adapters: list[Collect] = []

    def committed(self, seconds: float) -> None:
        """The journal took so long for an append."""
        self._commits.add(seconds)

    def read_from(self, sources: Sources) -> None:
        """Say where the figures come from."""
        self._sources = sources

    def add(self, collect: Collect) -> None:
        """Show the figures of an adapter, too."""
        self._adapters.append(collect)

    def collect(self) -> Iterator[Metric]:
        """Every figure as it is now; call it in the controller's loop."""
        sources = self._sources
        assert sources is not None, "read_from comes first"
        sources.counters.keep_only([job.job_id for job in sources.shown_jobs()])
        yield from itself.collect(sources, self._commits)
        for subject in _SUBJECTS:
            yield from subject.collect(sources)
        for collect in self._adapters:
            yield from collect()
