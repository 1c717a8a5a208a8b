"""`python -m tests.chaos.healthy FOLDER --for-s N`: training in which nothing goes wrong.

Evaluations take long, checkpoints now and then too, and in the middle the whole machine
stands still for a while, as one does whose memory is moved. None of it is a fault: there must
be no incident and no second attempt, but the waits for checkpoints must be in the account of
the job. What is seen goes into FOLDER/healthy.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from controller.local.processes import members_of
from tests.chaos.cluster import Plant, remains
from tests.chaos.matrix import LayoutName

# Longer than a node may be late, a rank stand still, or a session be silent.
PAUSE_S = 10.0
LOOK_EVERY_S = 0.5
# Once after about half a minute; nearly a second, where a step takes a twentieth.
_EVALUATION = {"interval_steps": 400, "batches": 200}
_MANY_STEPS = 1_000_000
# Gradients of a few samples at a high rate have true spikes; a calm curve has none.
_CALM = {"data": {"global_batch": 16}, "optimizer": {"lr": 1e-4}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.healthy", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--for-s", type=float, default=300.0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    seen = train(Plant(given.folder, None, LayoutName.DP2), given.for_s)
    (given.folder / "healthy.json").write_text(json.dumps(seen))
    return 0


def train(plant: Plant, for_s: float) -> dict[str, object]:
    """Train for so long; how far it came and what was taken for a fault."""
    plant.desk.give(())
    plant.desk.slow_down("all")
    plant.start_controller()
    try:
        plant.cluster.wait_nodes(2)
        plant.submit(
            steps=_MANY_STEPS,
            eval=_EVALUATION,
            **_CALM,
            recovery={"hang_timeout_s": 120},
            checkpoint={"upload_timeout_s": 60, "storage_interval_steps": 400},
        )
        plant.cluster.wait_step(plant.job_id, 10)
        begun_s = time.monotonic()
        _watch(plant, for_s / 2)
        _pause(plant)
        _watch(plant, for_s / 2)
        trained_s = time.monotonic() - begun_s
        job = plant.job()
        incidents = plant.cluster.incidents(plant.job_id)
        with plant.cluster.client as client:
            client.cancel(plant.job_id)
        plant.cluster.wait_state(plant.job_id, "CANCELLED")
    finally:
        plant.stop()
        remains(plant)
    return {
        # Less than was asked for when something was found.
        "seconds": round(trained_s, 1),
        "state": job.state,
        "attempts": job.attempt,
        "steps": job.step,
        "committed_step": job.committed_step,
        "checkpoint_s": job.seconds.get("checkpoint", 0.0),
        "incidents": [f"{each.cause}: {each.reason}" for each in incidents],
    }


def _watch(plant: Plant, for_s: float) -> None:
    """Let it train, unless something was found already."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s and not plant.cluster.incidents(plant.job_id):
        time.sleep(LOOK_EVERY_S)


def _pause(plant: Plant) -> None:
    """Stop every process of the cluster at once, and let all of them go on."""
    assert plant.controller is not None
    pids = [plant.controller.pid, *members_of(list(plant.agents.values()))]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
