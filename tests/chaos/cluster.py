"""One cluster of real processes for one row, and the job that it trains.

What does not belong here: what is done to it (`strikes`).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from controller.local.cluster import LocalConfig
from controller.local.processes import members_of
from outlast.v1 import jobs_pb2
from tests.chaos.cable import Cable
from tests.chaos.expected import waits_for_store
from tests.chaos.matrix import STORE, Fault, LayoutName, Moment, Row
from tests.chaos.orders import UPLOADED_STEP, WORLD_SIZES, Desk
from tests.controller.processes import ROOT, command, is_alive, join_arguments, node_pids
from tests.e2e.cluster import Cluster, wait_for

NUM_STEPS = 60
# For a fault that goes on until it is told: steps longer than a pause, so that each has its
# share of them, and enough for three windows.
_LONG: dict[str, Any] = {"steps": 300, "model": {"hidden": 128, "seq_len": 256}}
STOP_S = 20.0
# Where the store is gone to the end: the job waits so long for its last checkpoint, and pauses.
LAST_TIMEOUT_S = 4
# More than a checkpoint of the job takes, and less than two.
_DISK_BYTES = 2**21

# A silent node and a start that stands still would otherwise take minutes of a row. Steps and
# starts take this long on a machine that does much else at once.
_RECOVERY = {
    "heartbeat_silent_s": 8,
    "hang_timeout_s": 20,
    "first_step_timeout_s": 40,
    "stop_timeout_s": 5,
}

_LAYOUTS: dict[LayoutName, dict[str, Any]] = {
    LayoutName.DP2: {"parallel": {"dp": 2, "micro_batch": 2}},
    LayoutName.PP2: {
        "parallel": {"dp": 1, "pp": 2, "micro_batch": 2},
        "model": {"layers": 2},
    },
    LayoutName.TP2_DP2: {
        "parallel": {"dp": 2, "tp": 2, "micro_batch": 2},
        "resources": {"workers_per_node": 2},
    },
}


class Plant:
    """A controller with its nodes, all of whose processes obey the orders of one desk."""

    def __init__(
        self, folder: Path, row: Row | None, layout: LayoutName, *, is_long: bool = False
    ) -> None:
        self.row = row
        self._is_long = is_long
        self.layout = layout
        self.folder = folder
        self.desk = Desk(folder / "orders")
        self.state_dir = folder / "state"
        self.cluster = Cluster(self.state_dir, lambda: self.address)
        self.job_id = ""
        self.controller: subprocess.Popen[bytes] | None = None
        self.cable = Cable(lambda: self.address)
        # Nodes that join by hand, as `outlast agent` makes them: the controller cannot end these.
        self._joined: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: list[int] = []

    @property
    def workers_per_node(self) -> int:
        return WORLD_SIZES[self.layout] // 2

    @property
    def address(self) -> str:
        document = json.loads((self.state_dir / "controller.json").read_text())
        return str(document["grpc"])

    @property
    def memory_dir(self) -> Path:
        """Host memory of all nodes."""
        if self._joined:
            return self.folder / "memory"
        config = LocalConfig(
            state_dir=self.state_dir, nodes=0, workers_per_node=0, controller_address=""
        )
        return config.memory_dir

    @property
    def agents(self) -> dict[str, int]:
        """Pids of agents by node: each is the name of its node's session."""
        if self._joined:
            return {node: process.pid for node, process in self._joined.items()}
        return node_pids(self.state_dir)

    @property
    def pids(self) -> dict[str, int | None]:
        """Pids of the controller and of all agents that live, by name."""
        controller = self.controller
        is_there = controller is not None and controller.poll() is None
        own = controller.pid if controller is not None and is_there else None
        alive = {node: pid if is_alive(pid) else None for node, pid in self.agents.items()}
        return {"controller": own, **alive}

    def log(self, name: str) -> str:
        """What a process of the row has logged so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Values that the controller exposes, by name and labels."""
        document = json.loads((self.state_dir / "controller.json").read_text())
        with urllib.request.urlopen(f"http://{document['http']}/metrics", timeout=STOP_S) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def job(self) -> jobs_pb2.Job:
        return self.cluster.job(self.job_id)

    def start_controller(self) -> None:
        """Start it, or start it again, and wait until it listens."""
        (self.state_dir / "controller.json").unlink(missing_ok=True)
        nodes = 0 if self._is_by_hand else self._num_nodes
        arguments = ["--local-nodes", str(nodes), "--workers-per-node", str(self.workers_per_node)]
        arguments += ["--agent-command", shlex.join(self._agent_command)]
        with (self.folder / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(
                command(self.state_dir, *arguments),
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for((self.state_dir / "controller.json").exists, "the controller to listen")

    def join_by_hand(self) -> None:
        """Nodes that the controller did not start: they can be stopped, or be out of its reach."""
        for number in range(self._num_nodes if self._is_by_hand else 0):
            self.join(f"node-{number}")

    def submit(self, **changes: Any) -> None:
        """Submit a job; `changes` replace sections of its spec. Only the first uses `disk`.

        In `recovery` and `checkpoint` they replace single values.
        """
        recovery = {**_RECOVERY, **changes.pop("recovery", {})}
        if self.row is not None and self.row.moment is Moment.DIAGNOSIS:
            recovery["in_place_restarts"] = 0
        if self.row is not None and self.row.fault in (Fault.AGENT_BACK, Fault.TWIN):
            # An agent takes seconds to be back on a machine that does much else.
            recovery |= {"stop_timeout_s": 40, "heartbeat_lost_s": 30, "heartbeat_silent_s": 40}
        if self.row is not None and self.row.fault is Fault.TWIN:
            # A rank is held while the second agent starts, and that alone must be no hang.
            recovery |= {"hang_timeout_s": 90}
            changes = {"detectors": {"hang": "off"}, **changes}
        checkpoint: dict[str, Any] = {
            "storage_interval_steps": UPLOADED_STEP,
            "upload_timeout_s": 6,
            **changes.pop("checkpoint", {}),
        }
        if self.row is not None and waits_for_store(self.row):
            # Where a place is named, the job waits for its last checkpoint.
            is_on_disk = self.disk.exists() and not self.job_id
            place = self.disk if is_on_disk else self.state_dir / "checkpoints"
            checkpoint |= {"url": f"file://{place}", "last_timeout_s": LAST_TIMEOUT_S}
        sections = {**_LAYOUTS[self.layout], "steps": NUM_STEPS, "checkpoint": checkpoint}
        if self._is_long:
            sections |= _LONG
        self.job_id = self.cluster.submit(
            **{"name": "chaos", **sections, "recovery": recovery, **changes}
        )

    def submit_next(self) -> None:
        """Submit the same job under another name; it never uses the small disk."""
        self.submit(name="next")

    @property
    def disk(self) -> Path:
        """A small file system for checkpoints, where the row needs one."""
        return self.folder / "disk"

    def stop(self) -> list[int]:
        """End everything in order; the pids that were left, which are killed."""
        sessions = [*self._sessions, *self.agents.values()]
        for process in self._joined.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        if self.controller is not None:
            self.controller.send_signal(signal.SIGCONT)
            self.controller.terminate()
            self._wait(self.controller)
        for process in self._joined.values():
            self._wait(process)
        self.cable.close()
        left = members_of(sessions)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def join(self, node: str, *, folder: str = "") -> None:
        """Start the agent of a node that joins by hand, or start it again.

        In a `folder` of its own it is a second one beside the first.
        """
        folder = folder or node
        argv = [*self._agent_command, "--node", node]
        argv += ["--controller", self.cable.address, "--workers", str(self.workers_per_node)]
        argv += ["--controller-file", str(self._directions)]
        argv += ["--state-dir", str(self.state_dir / "nodes" / folder)]
        argv += ["--memory-dir", str(self.folder / "memory" / folder)]
        argv += ["--data-dir", str(self.state_dir / "data"), "--metrics-port", "0"]
        argv += join_arguments(self.state_dir)
        with (self.folder / f"{node}.log").open("ab") as log:
            self._joined[folder] = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def note_sessions(self) -> None:
        """Remember who runs now, for the check that nobody is left."""
        self._sessions = [*self._sessions, *self.agents.values()]

    @property
    def _directions(self) -> Path:
        """Where agents that join by hand look for the controller: at their end of the cable."""
        path = self.folder / "controller.json"
        document = json.loads((self.state_dir / "controller.json").read_text())
        path.write_text(json.dumps({**document, "grpc": self.cable.address}))
        return path

    @property
    def _agent_command(self) -> list[str]:
        command = [sys.executable, "-m", "controller.agent"]
        if self.row is None or self.row.moment is not Moment.DIAGNOSIS:
            command += ["--suite-runner", "tests.chaos.quick_checks"]
        return command

    @property
    def _is_by_hand(self) -> bool:
        by_hand = (Fault.ZOMBIE, Fault.PARTITION, Fault.AGENT_BACK, Fault.TWIN)
        return self.row is not None and self.row.fault in by_hand

    @property
    def _num_nodes(self) -> int:
        """Two that train, and one more where a node may be replaced."""
        row = self.row
        if row is None:
            return 2
        loses_first = row.fault in STORE and row.moment in (Moment.RESTORE, Moment.RECOVERY)
        replaces = row.fault in (Fault.AGENT, Fault.NODE, Fault.ZOMBIE) or loses_first
        return 3 if replaces or row.moment is Moment.DIAGNOSIS else 2

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.desk.environment}


@contextmanager
def small_disk(plant: Plant, *, wanted: bool) -> Iterator[None]:
    """A file system of 2 MiB at `plant.disk`, which takes root to mount."""
    if not wanted:
        yield
        return
    plant.disk.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(plant.disk)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(plant.disk)], check=True)


def remains(plant: Plant) -> list[str]:
    """Files of host memory that are still there once everything has ended."""
    folder = plant.memory_dir
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    shutil.rmtree(folder, ignore_errors=True)
    return sorted(found)
