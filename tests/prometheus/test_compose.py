"""deploy/compose.yaml, as far as it can be checked without Docker: what it names exists."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.prometheus.tools import ROOT

DEPLOY = ROOT / "deploy"
DOCUMENT: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
# Of the Compose specification: those that a service may have and that we use.
KEYS = {
    *("build", "image", "command", "entrypoint", "environment", "ports", "volumes", "user"),
    *("deploy", "healthcheck", "depends_on", "restart", "shm_size", "stop_grace_period"),
}


def targets() -> list[str]:
    """host:port of everything that Prometheus and Grafana are told to talk to."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    controller, agents = config["scrape_configs"]
    (manager,) = config["alerting"]["alertmanagers"]
    source = DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    urls = [
        agents["http_sd_configs"][0]["url"],
        yaml.safe_load(source.read_text())["datasources"][0]["url"],
    ]
    return [
        *controller["static_configs"][0]["targets"],
        *manager["static_configs"][0]["targets"],
        *(url.removeprefix("http://").partition("/")[0] for url in urls),
    ]


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_only_what_compose_knows(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= KEYS
    assert set(service.get("depends_on", ())) <= set(SERVICES)
    image, _, tag = service["image"].partition(":")
    assert image
    assert tag not in ("", "latest")


@pytest.mark.parametrize("name", SERVICES)
def test_service_mounts_what_exists_and_listens_on_loopback(name: str) -> None:
    service = SERVICES[name]
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        known = (
            (DEPLOY / source).exists() if source.startswith(".") else source in DOCUMENT["volumes"]
        )
        assert known, volume
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_parts_talk_to_services_that_are_there() -> None:
    assert {target.partition(":")[0] for target in targets()} <= set(SERVICES)


def test_image_is_built_from_the_dockerfile_of_the_project() -> None:
    assert SERVICES["controller"]["build"] == {"context": "..", "dockerfile": "deploy/Dockerfile"}
    assert SERVICES["agent"]["image"] == SERVICES["controller"]["image"]


def test_agents_see_the_controllers_own_checkpoints() -> None:
    folder = "checkpoints:/home/outlast/state/checkpoints"
    assert folder in SERVICES["controller"]["volumes"]
    assert folder in SERVICES["agent"]["volumes"]
    assert "--state-dir=/home/outlast/state" in SERVICES["controller"]["command"]
