"""A script with a session whose interpreter is not ours: nothing of ours is installed in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster
from tests.e2e.losing import memory_folder
from tests.e2e.script_jobs import EXAMPLES, log_of, losses, submit, succeeded, wait_step
from tests.foreign import foreign_python

pytestmark = pytest.mark.timeout(300)

STEPS = 60
# The script's folder has modules that are called as packages of ours.
OWN_MODULES = ("trainer", "checkpoint", "diagnostics", "controller")
BEGIN = "".join(f"import {name}\nassert {name}.IS_MINE\n" for name in OWN_MODULES)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    state_dir = tmp_path_factory.mktemp("foreign") / "state"
    nodes = ("--local-nodes", "2", "--workers-per-node", "1")
    with controller(state_dir, *nodes, *QUICKLY_CHECKED) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_python(tmp_path_factory.mktemp("python"))


def test_nothing_of_ours_is_there(python: Path) -> None:
    for name in ("outlast", "xxhash", "pydantic", "grpc"):
        done = subprocess.run(
            [python, "-I", "-c", f"import {name}"], capture_output=True, check=False
        )
        assert b"No module named" in done.stderr


def test_a_session_in_another_environment_goes_on_from_memory_and_from_storage(
    cluster: Cluster, process: Controller, python: Path, tmp_path: Path
) -> None:
    for name in OWN_MODULES:
        (tmp_path / f"{name}.py").write_text("IS_MINE = True\n")
    script = tmp_path / "train.py"
    script.write_text(BEGIN + (EXAMPLES / "ddp_session.py").read_text())

    def start() -> str:
        command = ["python", str(script), "--steps", f"{STEPS}", "--hidden", "1024"]
        workload = {"python": str(python)}
        return submit(
            cluster, *command, workload=workload, checkpoint={"storage_interval_steps": 10}
        )

    undisturbed = start()
    succeeded(cluster, undisturbed)
    job_id = start()
    wait_step(cluster, job_id, 12)
    os.kill(cluster.presents(job_id, 1)[1].pid, signal.SIGKILL)
    wait_step(cluster, job_id, 30)
    with cluster.client as client:
        client.pause(job_id)
    cluster.wait_state(job_id, "PAUSED")
    assert "from host memory" in log_of(cluster, job_id)
    assert "from storage" not in log_of(cluster, job_id)
    for folder in memory_folder(process.state_dir).glob(f"*/{job_id}"):
        shutil.rmtree(folder)
    with cluster.client as client:
        client.resume(job_id)
    assert succeeded(cluster, job_id).step == STEPS
    assert "from storage" in log_of(cluster, job_id)
    # Each start was a fork of a process of that interpreter.
    assert "imports are not shared" not in log_of(cluster, job_id)
    assert losses(cluster, job_id) == losses(cluster, undisturbed)
    assert len(losses(cluster, job_id)) == STEPS


def test_code_that_is_sent_along_runs_in_another_environment(
    cluster: Cluster, python: Path, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("import sys\nPREFIX = sys.prefix\n")
    (tmp_path / "train.py").write_text(
        "import helper\nfrom outlast import session\n"
        "assert session.is_active()\nprint('runs in', helper.PREFIX)\n"
    )
    workload = {"python": str(python), "code": {"path": str(tmp_path)}, "preload": ["helper"]}
    job_id = submit(cluster, "python", "train.py", workload=workload)
    shutil.rmtree(tmp_path)
    succeeded(cluster, job_id)
    assert f"runs in {python.parent.parent}" in log_of(cluster, job_id)
    assert "imports are not shared" not in log_of(cluster, job_id)


@pytest.mark.parametrize("preload", [["torch"], "off"], ids=["forked", "executed"])
def test_a_session_in_our_interpreter_leaves_the_scripts_own_modules_to_it(
    cluster: Cluster, tmp_path: Path, preload: list[str] | str
) -> None:
    for name in OWN_MODULES:
        (tmp_path / f"{name}.py").write_text("IS_MINE = True\n")
    script = tmp_path / "train.py"
    script.write_text(BEGIN + (EXAMPLES / "ddp_session.py").read_text())
    command = ["python", str(script), "--steps", "5", "--hidden", "64"]
    job_id = submit(cluster, *command, workload={"preload": preload})
    assert succeeded(cluster, job_id).step == 5
    assert "imports are not shared" not in log_of(cluster, job_id)
    assert len(losses(cluster, job_id)) == 5


def test_an_interpreter_that_runs_no_standby_runs_the_script_all_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("print('it runs')\n")
    job_id = submit(cluster, "python", str(script), nodes=1, workload={"python": str(python)})
    succeeded(cluster, job_id)
    said, output = log_of(cluster, job_id).splitlines()
    assert "imports are not shared, a new interpreter starts" in said
    assert "exit code 3" in said
    assert output == "it runs"
