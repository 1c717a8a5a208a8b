"""`outlast demo` end to end: two real faults, and a curve that does not show them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from controller.local.cluster import NODE_MARK
from controller.local.processes import marked_with

# The faults of the full demo on half of its ranks and a seventh of its steps.
SPEC = {
    "name": "small",
    "steps": 40,
    "model": {"layers": 2, "hidden": 32, "heads": 2, "seq_len": 32},
    "parallel": {"pp": 2, "dp": 2, "micro_batch": 2},
    "data": {"global_batch": 8, "max_bytes": 65_536},
    "checkpoint": {"storage_interval_steps": 5},
    "resources": {"workers_per_node": 2, "standby": 1, "device": "cpu"},
    "recovery": {
        "heartbeat_period_s": 0.5,
        "heartbeat_late_s": 1.5,
        "heartbeat_lost_s": 3,
        "heartbeat_silent_s": 10,
        "stop_timeout_s": 10,
    },
    "eval": {"interval_steps": 10, "batches": 1},
}
# Alone it takes well under 90 s; other tests may be using the cores.
TIMEOUT_S = 240.0


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return [
        *(sys.executable, "-m", "outlast.cli.main", "demo"),
        *("--spec", str(path), "--out", str(tmp_path / "out")),
    ]


@pytest.fixture(autouse=True)
def _no_orphans(tmp_path: Path) -> Iterator[None]:
    yield
    assert orphans(tmp_path) == []


def orphans(tmp_path: Path) -> list[int]:
    """Processes of local nodes of a demo in this folder."""
    folders = [tmp_path / "out" / run / "nodes" for run in ("faulted", "fault-free")]
    return [
        pid
        for folder in folders
        for number in range(3)
        for pid in marked_with(NODE_MARK, str(folder / f"node-{number}"))
    ]


@pytest.mark.timeout(TIMEOUT_S)
def test_demo_survives_two_faults_with_identical_losses(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["loss_identical"] is True
    assert report["first_difference"] is None
    assert report["job"]["state"] == "SUCCEEDED"
    assert [fault["kind"] for fault in report["faults"]] == ["worker_killed", "node_lost"]
    assert [fault["cause"] for fault in report["faults"]] == ["worker_killed", "node_lost"]
    for fault in report["faults"]:
        assert fault["incident_id"]
        assert 0 <= fault["detection_s"] <= fault["recovery_s"]
        assert fault["timeline"]
    # The last sealed step is in host memory everywhere, so a killed worker costs one at most.
    assert report["faults"][0]["steps_redone"] <= 1
    assert 0 < report["ettr"] <= 1
    assert len(report["curve"]["losses"]) == SPEC["steps"]
    assert all(math.isfinite(loss) for _, loss in report["curve"]["losses"])
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert "Identical: all 40 losses" in done.stdout
    # Only the report is kept.
    assert not (tmp_path / "out" / "faulted").exists()


# An interrupt that comes when the extension module of gRPC imports another module.
INTERRUPTED = """
import os, signal, sys
from outlast.cli.demo import _stop_on_signals

def interrupt(frame, event, argument):
    loads = frame.f_code.co_name == "_lock_unlock_module" and frame.f_back is not None
    if event == "call" and loads and "grpc._cython.cygrpc" in sys.modules:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(interrupt)
try:
    _stop_on_signals()
    import outlast.client
except KeyboardInterrupt:
    sys.exit(130)
sys.exit("interrupted" if sys.getprofile() is None else "no import to interrupt")
"""


def test_interrupt_during_the_import_of_grpc_is_not_lost() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr


@pytest.mark.timeout(TIMEOUT_S)
def test_interrupted_demo_leaves_nothing_running(command: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(orphans(tmp_path)) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output.decode()
        assert b"Traceback" not in output
    finally:
        process.kill()
        process.wait()
