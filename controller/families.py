"""Kinds of metric families, declared as data so that the reference page can list them.

A collector declares its families at module level and, at each scrape, makes
them `of` what is true at that moment. Nothing here keeps a value for longer.

What does not belong here: values that have to be gathered between scrapes
(`Distribution` aside, which is their shape).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

LabelValues = Sequence[str]


class _Taken(Metric):
    """A family with the values of one moment, whose samples are made when they are read.

    That takes several times as long as taking the values, of thousands of nodes, and is done by
    the thread that writes the page, not in the controller's loop.
    """

    def __init__(self, family: Metric, fill: Callable[[], None]) -> None:
        self._family = family
        self._fill: Callable[[], None] | None = fill
        super().__init__(family.name, family.documentation, family.type)

    @property
    def samples(self) -> list[Sample]:
        """One for each value, in their order."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill()
        return self._family.samples

    @samples.setter
    def samples(self, given: list[Sample]) -> None:
        self._family.samples = given


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its full name as it is scraped, its help text and its labels."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


class Gauge(Family):
    """A value that goes up and down."""

    def of(self, samples: Iterable[tuple[LabelValues, float]]) -> Metric:
        """The family with these samples."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        taken = list(samples)

        def fill() -> None:
            for labels, value in taken:
                family.add_metric(labels, float(value))

        return _Taken(family, fill)

    def value(self, value: float) -> Metric:
        """The family when it has no labels."""
        return self.of([((), value)])


class Counter(Family):
    """A value that only rises; its name ends with `_total`."""

    def of(self, samples: Iterable[tuple[LabelValues, float]]) -> Metric:
        """The family with these samples."""
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        taken = list(samples)

        def fill() -> None:
            for labels, value in taken:
                family.add_metric(labels, float(value))

        return _Taken(family, fill)

    def value(self, value: float) -> Metric:
        """The family when it has no labels."""
        return self.of([((), value)])


class Info(Family):
    """Facts as labels of a series that is always 1; its name ends with `_info`."""

    def of(self, samples: Iterable[LabelValues]) -> Metric:
        """The family with these facts."""
        name = self.name.removesuffix("_info")
        family = InfoMetricFamily(name, self.text, labels=self.labels)
        taken = list(samples)

        def fill() -> None:
            for labels in taken:
                family.add_metric(labels, {})

        return _Taken(family, fill)


class Distribution:
    """How often a value fell into each bucket, and the sum of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take in one value; a bound belongs to the bucket below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count, as the exposition format wants them."""
        names = [*(repr(bound) for bound in self._bounds), "+Inf"]
        return [
            (name, float(total))
            for name, total in zip(names, accumulate(self._counts), strict=True)
        ]


class Histogram(Family):
    """A distribution of observed values."""

    def of(self, samples: Iterable[tuple[LabelValues, Distribution]]) -> Metric:
        """The family with these distributions."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, distribution in samples:
            family.add_metric(labels, distribution.buckets(), distribution.sum)
        return family
