"""The few shapes that our panels have, with everything that they share.

Every panel has a title, a sentence that says what it shows, a unit, and takes
its data source from the variable of its dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import StackingMode, VisibilityMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "outlast"
# Of Grafana's 24 columns.
STAT_WIDTH, GRAPH_WIDTH = 4, 12
_STAT_HEIGHT, _GRAPH_HEIGHT = 4, 8
# Of a heat map, more than which would be a line of pixels each.
_MOST_MOMENTS = 120


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and how its series are called in the legend."""

    expr: str
    legend: str


class _Described(Protocol):
    """What all builders of panels have in common."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: model.DataSourceRef) -> Self: ...
    def height(self, h: int) -> Self: ...
    def span(self, w: int) -> Self: ...
    def unit(self, unit: str) -> Self: ...


_Panel = TypeVar("_Panel", bound=_Described)


def number(title: str, description: str, unit: str, expr: str) -> Builder[model.Panel]:
    """One value as it is now."""
    panel = _described(stat.Panel(), title, description, unit, STAT_WIDTH, _STAT_HEIGHT)
    return panel.with_target(_query(Query(expr, "")).instant().ref_id("A"))


def graph(
    title: str, description: str, unit: str, *queries: Query, stacked: bool = False
) -> Builder[model.Panel]:
    """Values over time."""
    panel = _described(timeseries.Panel(), title, description, unit, GRAPH_WIDTH, _GRAPH_HEIGHT)
    for name, query in zip("ABCD", queries, strict=False):
        panel.with_target(_query(query).range().ref_id(name))
    if stacked:
        panel.fill_opacity(60).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return panel


def states(title: str, description: str, query: Query) -> Builder[model.Panel]:
    """Which of several one-hot series is 1, over time."""
    panel = _described(
        statetimeline.Panel(), title, description, "none", GRAPH_WIDTH, _GRAPH_HEIGHT
    )
    return panel.merge_values(True).with_target(_query(query).range().ref_id("A"))


def heat_map(
    title: str, description: str, unit: str, query: Query, *, least: float, most: float
) -> Builder[model.Panel]:
    """A row for each series over time, from blue at `least` to red at `most`."""
    panel = _described(
        statushistory.Panel(), title, description, unit, 2 * GRAPH_WIDTH, 2 * _GRAPH_HEIGHT
    )
    panel.with_target(_query(query).range().ref_id("A")).max_data_points(_MOST_MOMENTS)
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_BL_YL_RD))
    return panel.min(least).max(most).show_value(VisibilityMode.NEVER)


def rows(title: str, description: str, expr: str, *, unit: str = "none") -> Builder[model.Panel]:
    """One row for each series as it is now."""
    panel = _described(table.Panel(), title, description, unit, GRAPH_WIDTH, _GRAPH_HEIGHT)
    panel.with_target(_query(Query(expr, "")).instant().ref_id("A").format(PromQueryFormat.TABLE))
    return panel.with_transformation(
        model.DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {"Time": True, "__name__": True, "job": True}},
        )
    )


def board(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """An empty dashboard with what all have: links to each other, and the data source."""
    links = (
        dashboard.DashboardLink("Outlast")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .include_vars(True)
        .keep_time(True)
    )
    return (
        dashboard.Dashboard(f"Outlast / {title}")
        .uid(uid)
        .description(description)
        .tags([_TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(links)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )


def choice(name: str, label: str, query: str, *, many: bool) -> dashboard.QueryVariable:
    """A variable with the values of a label."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_DESC)
    )
    return variable.multi(True).include_all(True).all_value(".+") if many else variable


def mark(name: str, expr: str) -> dashboard.AnnotationQuery:
    """A line across every graph wherever the query has a value."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(expr)
    )


def heading(title: str) -> dashboard.Row:
    """The title of the panels that follow."""
    return dashboard.Row(title)


def _described(
    panel: _Panel, title: str, description: str, unit: str, width: int, height: int
) -> _Panel:
    return (
        panel.title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(height)
    )


def _query(query: Query) -> prometheus_builder.Dataquery:
    built = prometheus_builder.Dataquery().expr(query.expr).datasource(DATASOURCE)
    return built.legend_format(query.legend) if query.legend else built
