"""A job on Kubernetes from its submission to its last trace, with a host that dies on the way.

The API server is the fixture's; scheduler and kubelets are played, agents and
workers are real processes. The controller has exactly the rights of
deploy/kubernetes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.kube import quarantine
from outlast.ports import free_port
from tests.chaos.orders import Desk
from tests.e2e.by_hand import QUICK_CHECKS
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.held import obeyed
from tests.e2e.script_jobs import EXAMPLES, submit
from tests.foreign import foreign_python
from tests.kube.cluster import Kube
from tests.kube.kubelets import ROOT, Kubelets

pytestmark = pytest.mark.timeout(600)

# A job has two, and loses one: each host more is an agent more that starts and imports torch.
NUM_HOSTS = 3
NUM_NODES = 2
JOB: dict[str, Any] = {
    "steps": 60,
    "parallel": {"dp": NUM_NODES, "micro_batch": 2},
    "data": {"global_batch": 4, "max_bytes": 65536},
}


class Controller:
    """`outlast controller` with a Kubernetes cluster, as a user starts it."""

    def __init__(self, kube: Kube, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "controller.log"
        self._command = [
            *(sys.executable, "-m", "outlast.cli.main", "controller"),
            *("--state-dir", str(self.state_dir)),
            *("--grpc", self.address, "--http", "127.0.0.1:0"),
            *("--kube-namespace", kube.namespace, "--kube-image", "outlast:test"),
            *("--kube-controller", self.address),
            *("--kube-workers", "1", "--kube-devices", "0"),
            *("--kube-idle-s", "5"),
            *("--kube-config", str(kube.write_config(folder / "kubeconfig"))),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)
        wait_for(lambda: self._listens(), "the controller to listen")

    def kill(self) -> None:
        """SIGKILL: nothing is cleaned up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()
        try:
            document = json.loads((self.state_dir / "controller.json").read_text())
        except FileNotFoundError:
            return False
        return bool(document["pid"] == self.process.pid)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "orders")
    with obeyed(desk):
        yield desk


@pytest.fixture
def kubelets(kube: Kube, desk: Desk, tmp_path: Path) -> Iterator[Kubelets]:
    memory = Path(f"/dev/shm/outlast-kube-{os.getpid()}-{uuid.uuid4().hex[:6]}")
    checks = ("--suite-runner", QUICK_CHECKS)
    kubelets = Kubelets(kube.core(), kube.namespace, tmp_path / "pods", memory, options=checks)
    for number in range(NUM_HOSTS):
        kubelets.add_host(f"host-{number}")
    kubelets.start()
    yield kubelets
    kubelets.stop()
    assert not kubelets.errors


@pytest.fixture
def controller(kube: Kube, kubelets: Kubelets, tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(kube, tmp_path)
    controller.start()
    yield controller
    controller.kill()
    print((tmp_path / "controller.log").read_text())


def test_job_outlives_its_host_and_leaves_nothing_behind(
    kube: Kube, kubelets: Kubelets, desk: Desk, controller: Controller
) -> None:
    cluster = Cluster(controller.state_dir, lambda: controller.address)
    core = kube.core()

    reference = cluster.submit(**JOB)
    cluster.wait_state(reference, "SUCCEEDED")

    # It must not end before its host is lost.
    desk.slow_down("steps", step_s=0.5)
    job_id = cluster.submit(**JOB)
    cluster.wait_step(job_id, 10)
    lost = cluster.job(job_id).nodes[1]
    assert set(cluster.job(job_id).nodes) <= set(kubelets.hosts_in_use())
    kubelets.fail(lost)
    desk.speed_up()

    # Closed for everybody.
    wait_for(lambda: quarantine.TAINT in _taints(core, lost), f"{lost} to be tainted")
    host = core.read_node(lost)
    assert host.spec.unschedulable
    assert host.metadata.annotations[quarantine.SESSION].startswith(f"{lost}/")
    assert "not ready" in host.metadata.annotations[quarantine.REASON]
    assert host.metadata.annotations[quarantine.PRIOR_CORDON] == "false"

    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.attempt == 2
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("node_lost", "replace_nodes")
    assert [entry.phase for entry in incident.timeline].count("preflight") == 1
    assert cluster.losses(job_id) == cluster.losses(reference)

    desk.slow_down("steps")
    cancelled = cluster.submit(**{**JOB, "steps": 1_000_000})
    cluster.wait_step(cancelled, 5)
    assert lost not in cluster.job(cancelled).nodes
    controller.kill()
    controller.start()
    cluster.wait_nodes(NUM_NODES)
    cluster.wait_step(cancelled, cluster.job(cancelled).step + 5)
    assert cluster.job(cancelled).attempt == 1
    with cluster.client as client:
        client.cancel(cancelled)
    cluster.wait_state(cancelled, "CANCELLED")
    # The lost host's pod too, although its kubelet confirms nothing.
    wait_for(lambda: not _left(core, kube.namespace), "everything of ours to be gone")
    for number in range(NUM_HOSTS):
        name = f"host-{number}"
        if name != lost:
            host = core.read_node(name)
            assert not host.spec.unschedulable
            assert not host.spec.taints
            assert not _our_annotations(host)

    # The bad host stays closed until a person has looked at it.
    assert quarantine.TAINT in _taints(core, lost)
    core.patch_node(lost, {"spec": {"unschedulable": None}})
    wait_for(lambda: not _our_annotations(core.read_node(lost)), "the quarantine to be over")
    assert quarantine.TAINT not in _taints(core, lost)
    # It asked for the pod's eviction, as a person would.
    done = {(asked.verb, asked.resource) for asked in kube.controller_requests()}
    assert ("create", "pods/eviction") in done
    assert kube.missing_rights() == set()


IMAGE = "registry.example/torch:1"


def test_a_job_in_an_image_of_its_own_takes_the_hosts_of_idle_agents(
    kube: Kube, kubelets: Kubelets, controller: Controller, tmp_path: Path
) -> None:
    """Its Python is another than the agents', whom what the image sets for that does no harm."""
    python = foreign_python(tmp_path)
    library = tmp_path / "library"
    (library / "grpc").mkdir(parents=True)
    (library / "grpc" / "__init__.py").write_text("raise ImportError('of the image')\n")
    (library / "of_the_image.py").write_text("")
    kubelets.images[IMAGE] = {
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(library),
    }
    cluster = Cluster(controller.state_dir, lambda: controller.address)
    cluster.wait_state(cluster.submit(**JOB), "SUCCEEDED")
    assert len(kubelets.hosts_in_use()) == NUM_NODES

    script = tmp_path / "train.py"
    noted = tmp_path / "noted"
    begin = f"import of_the_image, sys\nprint(sys.executable, file=open({str(noted)!r}, 'a'))\n"
    script.write_text(begin + (EXAMPLES / "ddp_session.py").read_text())
    command = ("python", str(script), "--steps", "60", "--hidden", "256")
    # The host that is left and one of an idle agent; that of the other in place of the lost one.
    job_id = submit(cluster, *command, nodes=NUM_NODES, workload={"image": IMAGE})
    cluster.wait_step(job_id, 10)
    job = cluster.job(job_id)
    with cluster.client as client:
        images = {node.node_id: node.capacity.image for node in client.nodes() if node.connected}
    assert {images[node] for node in job.nodes} == {IMAGE}
    kubelets.fail(job.nodes[1])

    done = cluster.wait_state(job_id, "SUCCEEDED")
    assert done.attempt == 2
    assert job.nodes[1] not in done.nodes
    assert done.step == 60
    # Two ranks, twice.
    assert noted.read_text().splitlines() == [str(python)] * 2 * NUM_NODES
    assert kube.missing_rights() == set()


def _taints(core: Any, host: str) -> list[str]:
    return [taint.key for taint in core.read_node(host).spec.taints or ()]


def _our_annotations(host: Any) -> list[str]:
    return [key for key in host.metadata.annotations or () if key.startswith("outlast.dev/")]


def _left(core: Any, namespace: str) -> list[str]:
    found = [
        *core.list_namespaced_pod(namespace).items,
        *core.list_namespaced_service(namespace).items,
        *core.list_namespaced_config_map(namespace, label_selector="app.kubernetes.io/name").items,
    ]
    return [item.metadata.name for item in found]
