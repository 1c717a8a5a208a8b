"""Jobs whose ranks run a script of the user's own, as end-to-end tests submit and read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outlast.v1 import jobs_pb2
from tests.controller.processes import ROOT
from tests.e2e.cluster import Cluster, wait_for

EXAMPLES = ROOT / "examples" / "scripts"
# They run the script that follows: SIGUSR1 raises in it; it waits for a file at a step.
RAISING = Path(__file__).with_name("raising.py")
HOLDING = RAISING.with_name("holding.py")
# Before a script: so many steps last longer than it takes to do something about them.
PACED = (str(RAISING.with_name("pacing.py")), "0.03", str(RAISING))
# A lost node is known within seconds.
SOON = {
    "heartbeat_period_s": 0.5,
    "heartbeat_late_s": 2,
    "heartbeat_lost_s": 4,
    "heartbeat_silent_s": 15,
    "stop_timeout_s": 10,
}
STEP_LINE = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def submit(cluster: Cluster, *command: str, nodes: int = 2, **more: Any) -> str:
    document = {
        "name": "script",
        "workload": {"command": list(command), **more.pop("workload", {})},
        "resources": {"nodes": nodes},
        "recovery": {**SOON, **more.pop("recovery", {})},
        **more,
    }
    with cluster.client as client:
        return client.submit(document).job_id


def log_of(cluster: Cluster, job_id: str, rank: int = 0) -> str:
    """Of all attempts, in their order."""
    pattern = f"nodes/*/jobs/{job_id}/a*/rank-{rank:05d}.log"
    paths = sorted(cluster.state_dir.glob(pattern), key=lambda path: path.parent.name)
    return "".join(path.read_text() for path in paths)


def losses(cluster: Cluster, job_id: str) -> dict[int, str]:
    """What the script printed of each step, the newest time that it was done."""
    return {int(step): loss for step, loss in STEP_LINE.findall(log_of(cluster, job_id))}


def wait_step(cluster: Cluster, job_id: str, step: int) -> None:
    wait_for(lambda: step in losses(cluster, job_id), f"the script to print step {step}")


def succeeded(cluster: Cluster, job_id: str) -> jobs_pb2.Job:
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.reason == "every rank ended with exit code 0"
    return job
