"""Names, types and help texts of all metrics, as promtool judges them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controller.agent.observe import metrics as agent
from controller.families import Counter, Distribution, Family, Gauge, Histogram, Info
from controller.kube import metrics as kube
from controller.notify import metrics as notifications
from controller.web import metrics as controller
from tests.prometheus.tools import DASHBOARDS, RULES, needs_prometheus, promtool

_NAME = re.compile(r"outlast_[a-z0-9_]+")
PAGES = (controller.FAMILIES, agent.FAMILIES, kube.FAMILIES, notifications.FAMILIES)


class OneSampleEach(Collector):
    """Every family with one series."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            labels = ["x"] * len(family.labels)
            match family:
                case Gauge() | Counter():
                    yield family.of([(labels, 1.0)])
                case Info():
                    yield family.of([labels])
                case Histogram():
                    yield family.of([(labels, Distribution((1.0,)))])


@needs_prometheus
@pytest.mark.parametrize("families", PAGES)
def test_promtool_has_nothing_to_say_of_names_and_texts(families: tuple[Family, ...]) -> None:
    registry = CollectorRegistry()
    registry.register(OneSampleEach(families))
    promtool("check", "metrics", text=generate_latest(registry).decode())


def test_every_metric_is_used() -> None:
    """What no dashboard shows and no rule asks for, nobody looks at."""
    files = [*DASHBOARDS.glob("*.json"), *(RULES / "rules").glob("*.yml")]
    used = set(_NAME.findall("\n".join(path.read_text() for path in files)))
    for families in PAGES:
        for family in families:
            parts = ("_bucket", "_sum", "_count") if isinstance(family, Histogram) else ("",)
            assert used & {family.name + part for part in parts}, f"{family.name} is used nowhere"


def test_no_two_metrics_have_the_same_name() -> None:
    names = [
        family.name
        for family in (
            *controller.FAMILIES,
            *agent.FAMILIES,
            *kube.FAMILIES,
            *notifications.FAMILIES,
        )
    ]
    assert len(names) == len(set(names))
    assert all(name.startswith("outlast_") for name in names)


@pytest.mark.parametrize("families", PAGES)
def test_kinds_are_told_by_names(families: tuple[Family, ...]) -> None:
    for family in families:
        assert isinstance(family, Counter) == family.name.endswith("_total"), family.name
        assert isinstance(family, Info) == family.name.endswith("_info"), family.name
        # A histogram is kept per bucket: ranks and nodes would multiply it.
        if isinstance(family, Histogram):
            assert not {"rank", "node"} & set(family.labels), family.name
