"""The rules and configurations that ship: valid, tested, explained, about metrics that exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.agent.observe import metrics as agent
from controller.families import Histogram
from controller.kube import metrics as kube
from controller.notify import metrics as notifications
from controller.web import metrics as controller
from tests.prometheus.tools import ROOT, RULES, needs_prometheus, promtool

RULE_FILES = sorted((RULES / "rules").glob("*.yml"))
TEST_FILES = sorted((RULES / "tests").glob("*.yml"))
_METRIC = re.compile(r"\b(?:[a-z_]+:)?outlast_[a-z0-9_]+(?::[a-z0-9_]+)?")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def rules() -> Iterator[dict[str, Any]]:
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def known_metrics() -> set[str]:
    """Every name that can be asked for: series of all pages, and recorded ones."""
    names = set(RECORDED)
    for family in (*controller.FAMILIES, *agent.FAMILIES, *kube.FAMILIES, *notifications.FAMILIES):
        parts = ("_bucket", "_sum", "_count") if isinstance(family, Histogram) else ("",)
        names |= {family.name + part for part in parts}
    return names


@needs_prometheus
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_rules_pass_the_linter(path: Path) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))


@needs_prometheus
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_rules_pass_their_own_tests(path: Path) -> None:
    promtool("test", "rules", str(path))


@needs_prometheus
def test_scrape_configuration_is_valid() -> None:
    promtool("check", "config", str(RULES / "prometheus.yml"))


@needs_prometheus
def test_kubernetes_scrape_configuration_is_valid_but_for_its_discovery(tmp_path: Path) -> None:
    # Debian builds Prometheus without Kubernetes; everything else of the file can be checked.
    document = yaml.safe_load((RULES / "prometheus-kubernetes.yml").read_text())
    for scrape in document["scrape_configs"]:
        (found,) = scrape.pop("kubernetes_sd_configs")
        assert found == {"role": "pod", "namespaces": {"names": ["outlast"]}}
        scrape["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    document["rule_files"] = [str(RULES / "rules" / "*.yml")]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    promtool("check", "config", str(path))


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_alerts_are_sent_somewhere(name: str) -> None:
    document = yaml.safe_load((RULES / name).read_text())
    (manager,) = document["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    assert document["rule_files"] == ["rules/*.yml"]


@needs_prometheus
def test_alertmanager_configuration_is_valid() -> None:
    path = RULES / "alertmanager.yml"
    done = subprocess.run(
        ["amtool", "check-config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_alert_is_tested_to_fire_to_be_quiet_and_to_resolve(name: str) -> None:
    wanted = f'alertname="{name}"'
    cases = [
        sorted(test["promql_expr_test"], key=lambda check: minutes(check["eval_time"]))
        for path in TEST_FILES
        for test in yaml.safe_load(path.read_text())["tests"]
        if any(wanted in check["expr"] for check in test["promql_expr_test"])
    ]
    assert cases, f"{name} has no test"
    for checks in cases:
        assert [bool(check["exp_samples"]) for check in checks] == [False, True, False]


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_what_it_means_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"Outlast([A-Z][a-z]+)+", name)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = _HEADING.findall((ROOT / path).read_text())
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_runbooks_are_about_alerts_that_exist() -> None:
    text = (ROOT / "docs" / "runbooks.md").read_text()
    assert {h for h in _HEADING.findall(text) if h.startswith("Outlast")} == set(ALERTS)


def test_readme_counts_the_alerts() -> None:
    assert f"{len(ALERTS)} alerts with runbooks" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "rule", list(rules()), ids=lambda rule: rule.get("alert") or rule["record"]
)
def test_rule_asks_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    asked = set(_METRIC.findall(rule["expr"]))
    assert asked or "up{" in rule["expr"]
    assert asked <= known_metrics()


def test_recorded_names_say_level_metric_and_operation() -> None:
    assert all(re.fullmatch(r"[a-z_]+:outlast_[a-z_]+:[a-z0-9_]+", name) for name in RECORDED)


def minutes(text: str) -> int:
    return int(text.removesuffix("m"))
