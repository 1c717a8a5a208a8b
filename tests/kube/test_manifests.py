"""deploy/kubernetes: complete, taken by the API server as it is, and enough for a controller."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from kubernetes import client

import outlast
from controller.kube.objects import METRICS_PORT, labels
from controller.kube.observed import LABEL_JOB
from tests.controller.access.certificates import authority, server, tokens_file
from tests.e2e.cluster import wait_for
from tests.kube import played
from tests.kube.asked import eviction, refused, running
from tests.kube.cluster import Kube
from tests.kube.conftest import Kubectl
from tests.kube.manifests import (
    DEFINITION,
    FOLDER,
    NAMESPACE,
    RIGHTS,
    documents,
    kustomization,
    moved,
)

Object = dict[str, Any]
ROOT = FOLDER.parents[1]
JOB = FOLDER / "example-job.yaml"
# Kinds that belong to no namespace.
OF_THE_CLUSTER = ("Namespace", "ClusterRole", "ClusterRoleBinding", DEFINITION)
# A field of the budget that servers before 1.26 do not know.
UNHEALTHY = "unhealthyPodEvictionPolicy"


def the(kind: str, name: str) -> Object:
    (found,) = [
        item for item in documents() if (item["kind"], item["metadata"]["name"]) == (kind, name)
    ]
    return found


def container() -> Object:
    (only,) = _pod()["containers"]
    return dict(only)


def _pod() -> Object:
    return dict(the("Deployment", "outlast-controller")["spec"]["template"]["spec"])


def create(kube: Kube, document: Object) -> Object:
    """Have the server make an object; it as the server keeps it."""
    api, namespace = kube.client(), kube.namespace
    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)
    match document["kind"]:
        case "Namespace":
            made = core.create_namespace(document)
        case "ConfigMap":
            made = core.create_namespaced_config_map(namespace, document)
        case "Service":
            made = core.create_namespaced_service(namespace, document)
        case "PersistentVolumeClaim":
            made = core.create_namespaced_persistent_volume_claim(namespace, document)
        case "Deployment":
            made = apps.create_namespaced_deployment(namespace, document)
        case "PodDisruptionBudget":
            made = create_budget(kube, document)
        case "NetworkPolicy":
            networking = client.NetworkingV1Api(api)
            made = networking.create_namespaced_network_policy(namespace, document)
        case kind:
            pytest.fail(f"nothing here makes a {kind}")
    return dict(api.sanitize_for_serialization(made))


def create_budget(kube: Kube, document: Object) -> Object:
    version = played.policy_version(kube.client())
    if version == "v1beta1":
        # What an old server knows of it: the real one here is older than our budget.
        spec = {key: item for key, item in document["spec"].items() if key != UNHEALTHY}
        document = {**document, "apiVersion": "policy/v1beta1", "spec": spec}
    objects = client.CustomObjectsApi(kube.client())
    made: Object = objects.create_namespaced_custom_object(
        "policy", version, kube.namespace, "poddisruptionbudgets", document
    )
    return made


def lost(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Where the server did not keep what it was sent."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [
            where
            for key, value in sent.items()
            for where in lost(value, kept.get(key), f"{path}.{key}")
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        pairs = enumerate(zip(sent, kept, strict=True))
        return [where for at, (one, other) in pairs for where in lost(one, other, f"{path}[{at}]")]
    return [] if sent == kept else [f"{path}: {sent!r} became {kept!r}"]


def test_the_base_lists_every_file() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", JOB.name}
    assert set(kustomization()["resources"]) == files


def test_every_object_says_whose_it_is_and_where() -> None:
    for document in documents():
        metadata = document["metadata"]
        assert metadata["labels"]["app.kubernetes.io/name"] == "outlast", metadata
        is_clusters = document["kind"] in OF_THE_CLUSTER
        assert metadata.get("namespace") == (None if is_clusters else NAMESPACE), metadata


@pytest.mark.parametrize(
    "document",
    [each for each in documents() if each["kind"] not in (*RIGHTS, DEFINITION)],
    ids=lambda document: f"{document['kind']} {document['metadata']['name']}",
)
def test_the_server_keeps_every_object_as_it_is(kube: Kube, document: Object) -> None:
    sent = moved(document, kube.namespace)
    made = create(kube, sent)
    if document["kind"] == "Namespace":
        kube.core().delete_namespace(made["metadata"]["name"])
    version = played.policy_version(kube.client())
    if document["kind"] == "PodDisruptionBudget" and version == "v1beta1":
        sent = {**sent, "apiVersion": "policy/v1beta1"}
        sent["spec"] = {key: item for key, item in sent["spec"].items() if key != UNHEALTHY}
    assert lost(sent, made) == []


def test_kubectl_reads_the_same_objects(kubectl: Kubectl) -> None:
    def by_name(found: Iterator[Object] | list[Object]) -> dict[tuple[str, str], Object]:
        return {(item["kind"], item["metadata"]["name"]): item for item in found}

    assert by_name(yaml.safe_load_all(kubectl("kustomize", str(FOLDER)))) == by_name(documents())


def test_kubectl_applies_the_base_to_any_namespace(
    kube: Kube, kubectl: Kubectl, tmp_path: Path
) -> None:
    if kube.kind == "fake":
        pytest.skip("kubectl reads the schema of a server first; the fake has none")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    # Old ones give the namespace the suffix too, later ones the name that all objects are told.
    suffix = f"-{kube.namespace}-kubectl"
    older = [
        {"op": "replace", "path": "/apiVersion", "value": "policy/v1beta1"},
        {"op": "remove", "path": f"/spec/{UNHEALTHY}"},
    ]
    budget = {"group": "policy", "version": "v1", "kind": "PodDisruptionBudget"}
    target = {**budget, "name": "outlast-training"}
    is_old = played.policy_version(kube.client()) == "v1beta1"
    kustomization = {
        "namespace": NAMESPACE + suffix,
        "nameSuffix": suffix,
        # Old words: Debian's kubectl 1.20 knows no others, and later ones know these too.
        "bases": [os.path.relpath(FOLDER, overlay)],
        "patchesJson6902": [{"target": target, "path": "older.yaml"}] if is_old else [],
    }
    (overlay / "older.yaml").write_text(yaml.safe_dump(older))
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    config = f"--kubeconfig={kube.write_config(tmp_path / 'kubeconfig', kube.admin_token)}"
    made = kubectl(config, "apply", "-k", str(overlay)).splitlines()
    assert len(made) == len(documents())
    # The definition belongs to no namespace, and other tests need it.
    is_there = [line for line in made if not line.endswith(" created")]
    assert not [line for line in is_there if DEFINITION.lower() not in line]
    again = kubectl(config, "apply", "-k", str(overlay)).splitlines()
    assert all(line.endswith(" unchanged") for line in again)
    objects = yaml.safe_load_all(kubectl("kustomize", str(overlay)))
    rest = tmp_path / "rest.yaml"
    rest.write_text(yaml.safe_dump_all(each for each in objects if each["kind"] != DEFINITION))
    kubectl(config, "delete", "-f", str(rest), "--wait=false")


def test_the_kustomization_of_the_guide_is_one(kubectl: Kubectl, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text()
    version = json.loads(kubectl("version", "--client", "-o", "json"))["clientVersion"]
    if int(re.sub(r"\D", "", version["minor"])) < 21:
        pytest.skip("kubectl knows `patches` with a target since 1.21; the guide asks for 1.26")
    (written,) = re.findall(r"```yaml\n(# my-cluster.*?)```", guide, re.DOTALL)
    written = written.replace("../deploy/kubernetes", os.path.relpath(FOLDER, tmp_path))
    (tmp_path / "kustomization.yaml").write_text(written)
    made = yaml.safe_load_all(kubectl("kustomize", str(tmp_path)))
    (deployment,) = [item for item in made if item["kind"] == "Deployment"]
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--kube-image={only['image']}" in only["args"][-2:]


def test_all_images_are_of_this_release() -> None:
    image = f"outlast:{outlast.__version__}"
    assert container()["image"] == image
    assert f"--kube-image={image}" in container()["args"]
    assert f"-t {image} " in (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_image_holds_every_package() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line.split()[1] for line in dockerfile.splitlines() if line.startswith("COPY ")]
    copied = {path for path in lines if "." not in path}
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for package in ("outlast", "controller", "trainer", "checkpoint", "diagnostics", "demo"):
        assert package in copied
        assert f"!{package}" in ignored
        for path in (ROOT / package).rglob("*"):
            if path.is_symlink():
                target = path.resolve().relative_to(ROOT)
                assert any(target.is_relative_to(folder) for folder in copied), target


def test_the_image_has_every_extra_that_its_users_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = sorted(set(project["optional-dependencies"]) - {"dev"})
    assert f"'.[{','.join(extras)}]'" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_image_holds_the_tools_that_checks_start() -> None:
    assert "--no-install-recommends perftest" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_only_agents_and_clients_may_connect_to_the_controller() -> None:
    policies = {
        document["metadata"]["name"]: document["spec"]
        for document in documents()
        if document["kind"] == "NetworkPolicy"
    }
    by_port = {
        port["port"]: rule.get("from")
        for rule in policies["outlast-controller"]["ingress"]
        for port in rule["ports"]
    }
    who = [each["podSelector"]["matchLabels"] for each in by_port[7070]]
    agent = labels("any")
    assert who[0].items() <= agent.items()
    assert who[1] == {"outlast.dev/client": "true"}
    assert policies["outlast-agents"]["podSelector"]["matchLabels"].items() <= agent.items()
    ports = [
        port["port"] for rule in policies["outlast-agents"]["ingress"][1:] for port in rule["ports"]
    ]
    assert ports == [METRICS_PORT]


def test_the_service_leads_to_the_controller() -> None:
    service = the("Service", "outlast-controller")["spec"]
    # Agents need no probe to have passed before they may dial again.
    assert service["publishNotReadyAddresses"] is True
    template = the("Deployment", "outlast-controller")["spec"]["template"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    listening = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for port in service["ports"]:
        assert listening[port["targetPort"]] == port["port"]
        assert f"--{port['name']}=0.0.0.0:{port['port']}" in container()["args"]


def test_a_training_pod_is_not_drained_and_an_idle_one_is(kube: Kube) -> None:
    create_budget(kube, moved(the("PodDisruptionBudget", "outlast-training"), kube.namespace))
    core = kube.core()
    for name, job in (("busy-0", "gpt"), ("idle-0", None)):
        running(kube, name)
        labels = {"app.kubernetes.io/component": "agent", LABEL_JOB: job}
        core.patch_namespaced_pod(name, kube.namespace, {"metadata": {"labels": labels}})
    played.settle_budget(kube.client(), kube.namespace, "outlast-training", disruptions_allowed=0)
    evict = core.create_namespaced_pod_eviction
    busy = refused(evict, "busy-0", kube.namespace, eviction("busy-0"))
    assert busy == (429, "TooManyRequests")
    evict("idle-0", kube.namespace, eviction("idle-0"))
    # The controller takes the label away with the workers.
    taken_off = {"metadata": {"labels": {LABEL_JOB: None}}}
    core.patch_namespaced_pod("busy-0", kube.namespace, taken_off)
    evict("busy-0", kube.namespace, eviction("busy-0"))


def test_roles_grant_nothing_wholesale() -> None:
    rules = [rule for document in documents() for rule in document.get("rules") or ()]
    assert rules
    for rule in rules:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]


class Deployed:
    """The controller as the Deployment starts it, as a process of this machine."""

    def __init__(
        self,
        kube: Kube,
        folder: Path,
        *,
        of_pod: Object | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`of_pod`: its container, that of the base unless given; `env`: what Secrets put there."""
        of_pod = of_pod or container()
        self.state_dir = folder / "state"
        template = folder / "pod.yaml"
        template.write_text(the("ConfigMap", "outlast-agent-template")["data"]["pod.yaml"])
        here = {
            "--state-dir": str(self.state_dir),
            "--grpc": "127.0.0.1:0",
            "--http": "127.0.0.1:0",
            "--kube-namespace": kube.namespace,
            "--kube-pod-template": str(template),
            "--join-token-file": str(folder / "join-token"),
            "--tls-dir": str(server(authority(folder / "ca"), folder / "tls")),
            "--tokens-file": str(folder / "tokens.yaml"),
        }
        self.ca = folder / "ca" / "ca.crt"
        self.token = folder / "token"
        self.token.write_text(tokens_file(folder / "tokens.yaml")["sam"])
        given = dict(each.split("=", 1) for each in of_pod["args"] if "=" in each)
        flags = [each for each in of_pod["args"] if "=" not in each]
        # What a pod finds in its own file system has to be elsewhere here, and nothing else.
        arguments = [f"{name}={value}" for name, value in (given | here).items()]
        assert set(here) <= set(given)
        self.log = folder / "controller.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "outlast.cli.main", *of_pod["command"][1:]),
                    *arguments,
                    *flags,
                    *("--kube-config", str(kube.write_config(folder / "kubeconfig"))),
                    f"--kube-controller=outlast-controller.{kube.namespace}:7070",
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
            )

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens, by `grpc` and `http`; empty before it does."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            document: dict[str, str] = json.loads((self.state_dir / "controller.json").read_text())
        except FileNotFoundError:
            return {}
        return document

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def deployed(kube: Kube, tmp_path: Path) -> Iterator[Deployed]:
    deployed = Deployed(kube, tmp_path)
    try:
        wait_for(lambda: deployed.addresses, "the controller to listen")
        yield deployed
    finally:
        deployed.stop()


def test_the_controller_answers_its_probes(deployed: Deployed) -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container()[probe]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("http", "HTTPS")
        with urllib.request.urlopen(
            f"https://{deployed.addresses['http']}{asked['path']}",
            timeout=20,
            context=ssl.create_default_context(cafile=str(deployed.ca)),
        ) as answer:
            assert answer.status == 200


def test_the_example_job_brings_pods_with_all_devices_and_the_template(
    kube: Kube, deployed: Deployed
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "outlast.cli.main", "submit", str(JOB)),
            *("--controller", deployed.addresses["grpc"]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "OUTLAST_CA": str(deployed.ca),
            "OUTLAST_TOKEN_FILE": str(deployed.token),
        },
    )
    assert done.returncode == 0, done.stderr
    resources = yaml.safe_load(JOB.read_text())["resources"]
    wanted = 32 // resources["workers_per_node"] + resources["standby"]
    pods = kube.core().list_namespaced_pod
    wait_for(lambda: len(pods(kube.namespace).items) == wanted, f"{wanted} pods")
    for found in pods(kube.namespace).items:
        (agent,) = found.spec.containers
        assert agent.resources.limits == {"nvidia.com/gpu": "8"}
        # Not the first to go when its host runs short of memory.
        assert {"cpu", "memory"} <= agent.resources.requests.keys()
        assert "/checkpoints" in [mount.mount_path for mount in agent.volume_mounts]
        assert found.spec.security_context.run_as_user == 10001
        # The Secret that the controller itself has its token from.
        (join,) = [each.secret for each in found.spec.volumes if each.name == "join-token"]
        mounted = {
            each["name"]: each["secret"]["secretName"]
            for each in _pod()["volumes"]
            if "secret" in each
        }
        assert join.secret_name == mounted["join-token"]
        assert "--join-token-file" in agent.args
        # And what it checks the controller by, without the controller's key.
        (ca,) = [each.secret for each in found.spec.volumes if each.name == "tls"]
        assert ca.secret_name == mounted["tls"]
        assert [item.key for item in ca.items] == ["ca.crt"]
        assert "--tls-dir" in agent.args
        dialled = agent.args[agent.args.index("--controller") + 1]
        assert dialled.partition(":")[0] == f"outlast-controller.{kube.namespace}"
    assert kube.missing_rights() == set()
