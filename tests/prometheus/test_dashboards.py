"""The dashboards that ship: what the generator makes, whole for Grafana, and readable.

They are not rendered here: no Grafana can be installed from Debian or PyPI. The
rules of grafana/dashboard-linter that we keep are tests of this file; what the
queries return is tested on a real Prometheus in test_real.py.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.catalogue import documents
from tests.prometheus.test_rules import known_metrics
from tests.prometheus.tools import DASHBOARDS, ROOT, needs_prometheus, promtool

GRAFANA = ROOT / "deploy" / "grafana"
FILES = sorted(DASHBOARDS.glob("*.json"))
# Units of Grafana that our panels may use.
UNITS = {
    *("none", "s", "percentunit", "bytes", "Bps", "pps", "flops"),
    *("watt", "celsius", "hertz"),
}
_METRIC = re.compile(r"\b(?:[a-z_]+:)?outlast_[a-z0-9_]+(?::[a-z0-9_]+)?")


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DASHBOARDS / name).read_text())
    return document


BOARDS = [pytest.param(load(path.name), id=path.stem) for path in FILES]
PANELS = [
    pytest.param(panel, id=f"{path.stem}: {panel['title']}")
    for path in FILES
    for panel in load(path.name)["panels"]
    if panel["type"] != "row"
]


def test_committed_dashboards_are_what_the_generator_makes() -> None:
    committed = {path.name: path.read_text() for path in FILES}
    assert committed == documents(), "run `python -m deploy.grafana.generate`"


def test_there_is_a_dashboard_for_each_subject() -> None:
    subjects = {"fleet", "job", "recovery", "nodes", "checkpoints", "trends"}
    assert {path.stem for path in FILES} == {f"outlast-{subject}" for subject in subjects}


@pytest.mark.parametrize("document", BOARDS)
def test_dashboard_survives_the_sdk_and_back(document: dict[str, Any]) -> None:
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert again == document


@pytest.mark.parametrize("document", BOARDS)
def test_dashboard_is_whole(document: dict[str, Any]) -> None:
    # What Grafana 11 writes; newer ones read it.
    assert document["schemaVersion"] == 41
    assert document["editable"] is False
    assert document["uid"].startswith("outlast-")
    assert document["description"].endswith(".")
    assert document["refresh"] == "30s"
    variables = {variable["name"]: variable for variable in document["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "__inputs" not in document
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    titles = [(panel["type"], panel["title"]) for panel in document["panels"]]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("document", BOARDS)
def test_panels_lie_side_by_side(document: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in document["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


@pytest.mark.parametrize("panel", PANELS)
def test_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert re.fullmatch(r"[A-Z].*[^.]", panel["title"])
    assert re.fullmatch(r"[A-Z].*\.", panel["description"])
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("panel", PANELS)
def test_queries_are_sound(panel: dict[str, Any]) -> None:
    names = [target["refId"] for target in panel["targets"]]
    assert names
    assert len(names) == len(set(names))
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        asked = set(_METRIC.findall(target["expr"]))
        assert (asked and asked <= known_metrics()) or "ALERTS" in target["expr"]
        # A window of its own would be empty, or hide peaks, at other resolutions.
        windows = re.findall(r"\[([^\]]+)\]", target["expr"])
        assert set(windows) <= {"$__rate_interval"}
        if panel["type"] in ("timeseries", "state-timeline", "status-history"):
            assert target["legendFormat"]
            assert target["range"] is True
        else:
            assert target["instant"] is True


def test_provisioning_finds_the_dashboards_and_lets_nobody_change_them() -> None:
    file = GRAFANA / "provisioning" / "dashboards" / "outlast.yml"
    (provider,) = yaml.safe_load(file.read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    file = GRAFANA / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(file.read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["editable"] is False


@needs_prometheus
def test_measured_bubble_is_that_of_the_schedule(tmp_path: Path) -> None:
    """Two stages, two micro-batches, 1F1B: a third. What stage 1 idles at the end is in no series.

    The other job, which has no bubble, must not count.
    """
    (panel,) = [
        panel for panel in load("outlast-job.json")["panels"] if panel["title"] == "Pipeline bubble"
    ]
    expression: str = panel["targets"][0]["expr"]
    expression = expression.replace("$job_id", "a").replace("$__rate_interval", "5m")
    counted = [("a", 0, "busy", 36), ("a", 0, "waiting", 18), ("a", 1, "busy", 36)]
    counted += [("a", 1, "waiting", 6), ("b", 0, "busy", 60), ("b", 0, "waiting", 0)]
    series = [
        {
            "series": "outlast_rank_pipeline_seconds_total"
            f'{{job_id="{job}",rank="{rank}",stage="{rank}",state="{state}"}}',
            "values": f"0+{per_minute}x10",
        }
        for job, rank, state, per_minute in counted
    ]
    check = {
        "expr": f"round({expression}, 0.001)",
        "eval_time": "10m",
        "exp_samples": [{"labels": "{}", "value": 0.333}],
    }
    path = tmp_path / "bubble.yml"
    whole = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [check]}]}
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", **whole}))
    promtool("test", "rules", str(path))
