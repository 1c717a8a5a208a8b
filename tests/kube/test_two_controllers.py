"""deploy/kubernetes/two-controllers: what it changes of the base, as kubectl puts them together."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests.controller.probes import probe
from tests.e2e.cluster import wait_for
from tests.kube.cluster import Kube
from tests.kube.conftest import Kubectl
from tests.kube.manifests import FOLDER, documents, moved
from tests.kube.test_manifests import ROOT, Deployed, Object, create, lost
from tests.postgres.server import PASSWORD, Server, needs_postgres

COMPONENT = FOLDER / "two-controllers"
Objects = dict[tuple[str, str], Object]
CONTROLLER = "outlast-controller"


@pytest.fixture(scope="module")
def both(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Every object of the base with the component, by kind and name."""
    version = json.loads(kubectl("version", "--client", "-o", "json"))["clientVersion"]
    if int(re.sub(r"\D", "", version["minor"])) < 21:
        pytest.skip("kubectl knows components since 1.21")
    folder = tmp_path_factory.mktemp("mine")
    kustomization = {
        "resources": [os.path.relpath(FOLDER, folder)],
        "components": [os.path.relpath(COMPONENT, folder)],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return by_name(yaml.safe_load_all(kubectl("kustomize", str(folder))))


def by_name(found: Iterable[Object]) -> Objects:
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def pod(found: Objects) -> Object:
    return dict(found["Deployment", CONTROLLER]["spec"]["template"]["spec"])


def container(found: Objects) -> Object:
    (only,) = pod(found)["containers"]
    return dict(only)


def test_the_component_lists_every_file() -> None:
    listed = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())
    patches = {each["path"] for each in listed["patches"] if "path" in each}
    files = {path.name for path in COMPONENT.iterdir()} - {"kustomization.yaml"}
    assert {*listed["resources"], *patches} == files


def test_it_changes_the_controller_and_nothing_else(both: Objects) -> None:
    base = by_name(documents())
    # No budget: only one pod is ever ready, and its host must be able to be drained.
    assert both.keys() - base.keys() == {("PersistentVolumeClaim", "outlast-code")}
    assert base.keys() - both.keys() == {("PersistentVolumeClaim", "outlast-journal")}
    changed = {key for key in both.keys() & base.keys() if both[key] != base[key]}
    assert changed == {("Deployment", CONTROLLER), ("Service", CONTROLLER)}


def test_callers_are_sent_to_the_one_that_leads(both: Objects) -> None:
    assert "publishNotReadyAddresses" not in both["Service", CONTROLLER]["spec"]
    probes = {
        name: container(both)[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")
    } | {"readiness": container(both)["readinessProbe"]["httpGet"]}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {("http", "HTTPS")}


def test_two_wait_for_the_same_database_and_share_no_state_directory(both: Objects) -> None:
    assert both["Deployment", CONTROLLER]["spec"]["replicas"] == 2
    base, found = container(by_name(documents())), container(both)
    assert found["args"] == [*base["args"], "--wait"]
    from_secret = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in found["env"]
        if "secretKeyRef" in each["valueFrom"]
    }
    assert from_secret == {
        "OUTLAST_JOURNAL": {"name": "outlast-postgres", "key": "url"},
        "PGPASSWORD": {"name": "outlast-postgres", "key": "password"},
    }
    volumes = {each["name"]: each for each in pod(both)["volumes"]}
    mounted = {each["mountPath"]: volumes[each["name"]] for each in found["volumeMounts"]}
    # A lock of a file would stay with a controller that is frozen.
    assert mounted["/var/lib/outlast"].keys() == {"name", "emptyDir"}
    claim = mounted["/var/lib/outlast/code"]["persistentVolumeClaim"]["claimName"]
    assert both["PersistentVolumeClaim", claim]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_rollout_does_not_wait_for_both_to_be_ready(both: Objects) -> None:
    spec = both["Deployment", CONTROLLER]["spec"]
    assert spec["strategy"]["type"] == "RollingUpdate"
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == spec["replicas"]


def test_the_affinity_is_about_the_controllers_pods(both: Objects) -> None:
    labels = both["Deployment", CONTROLLER]["spec"]["template"]["metadata"]["labels"]
    affinity = pod(both)["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert term["podAffinityTerm"]["labelSelector"] == {"matchLabels": labels}


@pytest.mark.parametrize(
    "key",
    [
        ("Deployment", CONTROLLER),
        ("Service", CONTROLLER),
        ("PersistentVolumeClaim", "outlast-code"),
    ],
    ids=" ".join,
)
def test_the_server_keeps_every_object_as_it_is(
    kube: Kube, both: Objects, key: tuple[str, str]
) -> None:
    sent = moved(both[key], kube.namespace)
    made = create(kube, sent)
    assert lost(sent, made) == []


def test_the_guide_names_the_component_and_its_secret() -> None:
    guide = (ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text()
    (named,) = re.findall(r"^components:\n  - \.\./deploy/kubernetes/(.+)$", guide, re.MULTILINE)
    assert FOLDER / named == COMPONENT
    assert "create secret generic outlast-postgres" in guide


@needs_postgres
def test_both_answer_their_probes_and_the_second_takes_over(
    kube: Kube, both: Objects, tmp_path: Path
) -> None:
    """As the pods start them: flags of the manifest, URL and password from the environment."""
    database = Server()
    env = {"OUTLAST_JOURNAL": database.make_database(), "PGPASSWORD": PASSWORD}
    started: list[Deployed] = []

    def start(name: str) -> Deployed:
        (tmp_path / name).mkdir()
        started.append(Deployed(kube, tmp_path / name, of_pod=container(both), env=env))
        return started[-1]

    try:
        first = start("first")
        wait_for(lambda: first.addresses, "the first one to lead")
        second = start("second")
        wait_for(lambda: "controller waits: " in second.log.read_text(), "the other one to wait")
        (http,) = re.findall(r"probes are answered: http=(\S+)", second.log.read_text())
        assert answers(both, first, first.addresses["http"]) == [200, 200, 200]
        assert answers(both, second, http) == [200, 200, 503]
        first.stop()
        wait_for(lambda: second.addresses, "the other one to lead")
        assert second.addresses["http"] == http
        assert answers(both, second, http) == [200, 200, 200]
    finally:
        for each in started:
            each.stop()
        database.close()


def answers(found: Objects, deployed: Deployed, http: str) -> list[int]:
    """What the probes for startup, liveness and readiness are answered."""
    trusted = ssl.create_default_context(cafile=str(deployed.ca))
    paths = [
        container(found)[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    ]
    return [probe(http, path, tls=trusted)[0] for path in paths]
