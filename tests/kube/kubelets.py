"""The rest of a cluster, played by a thread: a scheduler, and a kubelet on each host.

Pods are bound by the rules that our manifests use (one agent a host, hosts to
avoid, cordons, taints), and a pod's container becomes a process of this machine
with the arguments of its manifest. A host that fails takes its processes with it
and confirms nothing any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from controller.kube.foreign_image import RUNTIME_DIR
from controller.local.processes import members_of

ROOT = Path(__file__).resolve().parents[2]
PERIOD_S = 0.1
POD_IP = "127.0.0.1"


@dataclass
class _Container:
    process: subprocess.Popen[bytes]
    folders: list[Path]


@dataclass
class Kubelets:
    """Hosts and what runs on them, until `stop`."""

    core: client.CoreV1Api
    namespace: str
    folder: Path
    """Logs and state of the pods."""
    memory: Path
    """On tmpfs: the pods' shared memory."""
    runs: bool = True
    """Whether containers become processes; else pods only look as if they ran."""
    options: tuple[str, ...] = ()
    """Arguments of a container after those of its manifest; not in images of jobs."""
    images: dict[str, dict[str, str]] = field(default_factory=dict)
    """Variables that images set for their containers."""
    on_began: Callable[[str, str], None] = lambda host, uid: None
    """A container has begun on a host; called in the thread with the pod's uid."""
    on_ended: Callable[[str, str], None] = lambda host, uid: None
    """It has ended, with its host or because it was told to."""
    failed: set[str] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._containers: dict[str, _Container] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelets", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and everything that runs on any host."""
        self._stopping.set()
        self._thread.join(30)
        for container in self._containers.values():
            _kill(container)
        shutil.rmtree(self.memory, ignore_errors=True)

    def add_host(self, name: str, ready: str = "True") -> None:
        """A machine joins the cluster."""
        self.core.create_node({"metadata": {"name": name, "labels": {"pool": "gpu"}}})
        self.set_ready(name, ready)

    def set_ready(self, name: str, status: str) -> None:
        """What the node controller says of a host, True, False or Unknown, and its taints."""
        condition = {"type": "Ready", "status": status, "reason": "Test", "message": "as told"}
        self.core.patch_node_status(name, {"status": {"conditions": [condition]}})
        key = "node.kubernetes.io/" + ("unreachable" if status == "Unknown" else "not-ready")
        effects = () if status == "True" else ("NoSchedule", "NoExecute")
        ours = [{"key": key, "effect": effect} for effect in effects]
        while not self._taint(name, ours):
            # Somebody else has written meanwhile; nothing of theirs may be lost.
            continue

    def _taint(self, name: str, ours: list[dict[str, str]]) -> bool:
        """Replace the node controller's taints; False when the host changed since it was read."""
        host = client.ApiClient().sanitize_for_serialization(self.core.read_node(name))
        present = host["spec"].get("taints", [])
        others = [taint for taint in present if not taint["key"].startswith("node.kubernetes.io/")]
        metadata = {"resourceVersion": host["metadata"]["resourceVersion"]}
        try:
            self.core.patch_node(name, {"metadata": metadata, "spec": {"taints": others + ours}})
        except ApiException as error:
            if error.status != 409:
                raise
            return False
        return True

    def fail(self, name: str) -> None:
        """A host dies, with all that runs there, and the cluster notices."""
        with self._lock:
            self.failed.add(name)
            for pod in self._pods():
                if pod.spec.node_name != name:
                    continue
                if pod.metadata.uid in self._containers:
                    _kill(self._containers[pod.metadata.uid])
                self.on_ended(name, pod.metadata.uid)
        self.set_ready(name, "Unknown")

    def mend(self, name: str) -> None:
        """A host that had failed runs again, with nothing on it."""
        self.set_ready(name, "True")
        with self._lock:
            self.failed.remove(name)

    def hosts_in_use(self) -> list[str]:
        """Hosts with a pod that is not being deleted."""
        return sorted(
            pod.spec.node_name
            for pod in self._pods()
            if pod.spec.node_name and not pod.metadata.deletion_timestamp
        )

    def _pods(self) -> list[Any]:
        return list(self.core.list_namespaced_pod(self.namespace).items)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                with self._lock:
                    self._turn()
            except HTTPError:
                # The server is away; kubelets go on when it is back.
                continue
            except ApiException as error:
                # Another writer was faster, or the server is starting and grants nothing yet.
                if error.status not in (403, 404, 409, 500, 503):
                    self.errors.append(error)

    def _turn(self) -> None:
        pods = self._pods()
        taken = {pod.spec.node_name for pod in pods if pod.spec.node_name}
        hosts = self.core.list_node().items
        for pod in pods:
            host = pod.spec.node_name
            if host is None:
                chosen = next((h for h in hosts if self._fits(pod, h, taken)), None)
                if chosen is not None and not pod.metadata.deletion_timestamp:
                    taken.add(chosen.metadata.name)
                    self._bind(pod, chosen.metadata.name)
                elif pod.metadata.deletion_timestamp:
                    self._finish(pod)
                else:
                    self._say_unschedulable(pod)
            elif host in self.failed:
                continue
            elif pod.metadata.deletion_timestamp:
                self._finish(pod)
            elif pod.status.phase == "Pending":
                self._begin(pod)

    def _fits(self, pod: Any, host: Any, taken: set[str]) -> bool:
        name = host.metadata.name
        ready = any(c.type == "Ready" and c.status == "True" for c in host.status.conditions or ())
        marks = [taint.key for taint in host.spec.taints or ()]
        if host.spec.unschedulable:
            marks.append("node.kubernetes.io/unschedulable")
        # Tolerations for a while count for pods that run, not for new ones.
        tolerated = [t.key for t in pod.spec.tolerations or () if t.toleration_seconds is None]
        if name in taken or not ready or not set(marks) <= set(tolerated):
            return False
        affinity = pod.spec.affinity.node_affinity
        if affinity is None:
            return True
        terms = affinity.required_during_scheduling_ignored_during_execution.node_selector_terms
        return any(
            all((name in need.values) == (need.operator == "In") for need in term.match_fields)
            for term in terms
        )

    def _bind(self, pod: Any, host: str) -> None:
        binding = {
            "metadata": {"name": pod.metadata.name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": host},
        }
        # The answer is a Status, which the client would read as a Binding.
        self.core.create_namespaced_pod_binding(
            pod.metadata.name, self.namespace, binding, _preload_content=False
        )

    def _say_unschedulable(self, pod: Any) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        if not pod.status.conditions:
            self.core.patch_namespaced_pod_status(
                pod.metadata.name, self.namespace, {"status": {"conditions": [condition]}}
            )

    def _begin(self, pod: Any) -> None:
        if self.runs and pod.metadata.uid not in self._containers:
            self._containers[pod.metadata.uid] = self._spawn(pod)
        condition = {"type": "PodScheduled", "status": "True"}
        status = {
            "phase": "Running",
            "podIP": POD_IP,
            "hostIP": POD_IP,
            "conditions": [condition],
        }
        self.core.patch_namespaced_pod_status(pod.metadata.name, self.namespace, {"status": status})
        self.on_began(pod.spec.node_name, pod.metadata.uid)

    def _finish(self, pod: Any) -> None:
        """The container is told to end; the pod goes when it has."""
        container = self._containers.get(pod.metadata.uid)
        if container is not None and container.process.poll() is None:
            container.process.send_signal(signal.SIGTERM)
            return
        if container is not None:
            _kill(container)
        if pod.spec.node_name:
            self.on_ended(pod.spec.node_name, pod.metadata.uid)
        # Options in the query do not count when there is a body.
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.metadata.uid}}
        self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, body=options)

    def _spawn(self, pod: Any) -> _Container:
        (spec,) = pod.spec.containers
        values = {
            "spec.nodeName": pod.spec.node_name,
            "status.podIP": POD_IP,
        }
        variables = {item.name: values[item.value_from.field_ref.field_path] for item in spec.env}
        folder = self.folder / f"{pod.metadata.name}-{pod.metadata.uid[:8]}"
        mounts = {}
        for volume in pod.spec.volumes:
            is_memory = volume.empty_dir.medium == "Memory"
            path = (self.memory if is_memory else folder) / pod.metadata.uid[:8] / volume.name
            path.mkdir(parents=True)
            mounts[volume.name] = path
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [_expand(argument, variables) for argument in spec.args]
        for mount in spec.volume_mounts:
            arguments = [
                argument.replace(mount.mount_path, str(mounts[mount.name]), 1)
                if argument.startswith(mount.mount_path)
                else argument
                for argument in arguments
            ]
        # Pods have a network of their own; here all share one.
        arguments[arguments.index("--metrics-port") + 1] = "0"
        # What is brought to images of jobs; here both are one.
        assert spec.command[0] in ("python", f"{RUNTIME_DIR}/bin/python3")
        # There our tests' modules are not known.
        options = self.options if spec.command[0] == "python" else ()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *spec.command[1:], *arguments, *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.images.get(spec.image, {}), **variables},
            )
        return _Container(process=process, folders=list(mounts.values()))


def _expand(text: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def _kill(container: _Container) -> None:
    for pid in members_of([container.process.pid]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    container.process.wait(60)
    for folder in container.folders:
        shutil.rmtree(folder, ignore_errors=True)
