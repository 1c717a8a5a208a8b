"""A job whose code lies on the submitter's side only, in real processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import outlast_json
from tests.controller.processes import Controller, controller
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.script_jobs import log_of, submit

pytestmark = pytest.mark.timeout(300)

SECRETS = {name: f"secret {secrets.token_hex(16)}" for name in ("OF_AGENT", "OF_FILE")}
# It waits for a file, and then ends.
TRAIN = """
import hashlib, os, pathlib, sys, time
import helper
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
for name in ("OF_AGENT", "OF_FILE"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
print(f"attempt {attempt} says {helper.WORD} in {pathlib.Path.cwd()}", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    state_dir = tmp_path_factory.mktemp("code") / "state"
    # Agents have the environment of the controller that starts them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_AGENTS", SECRETS["OF_AGENT"])
        with controller(state_dir, "--local-nodes", "2", "--workers-per-node", "1") as it:
            yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


def folders_of(process: Controller, job_id: str) -> list[Path]:
    return list(process.state_dir.glob(f"nodes/*/code/{job_id}/*"))


def test_a_job_runs_the_submitters_code_after_a_fault_and_a_restart_of_the_controller(
    cluster: Cluster, process: Controller, tmp_path: Path
) -> None:
    folder, go = tmp_path / "code", tmp_path / "go"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("WORD = 'sent along'\n")
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "weights.bin").write_text("ignored")
    (tmp_path / "secret").write_text(f"{SECRETS['OF_FILE']}\n")
    spec = {
        "name": "mine",
        "workload": {
            "command": ["python", "train.py", str(go)],
            "preload": ["helper"],
            "env": {
                "OF_AGENT": {"from_env": "SECRET_OF_AGENTS"},
                "OF_FILE": {"from_file": str(tmp_path / "secret")},
            },
        },
        "resources": {"nodes": 2},
        "recovery": {"heartbeat_period_s": 0.5, "stop_timeout_s": 10, "preflight": False},
    }
    (tmp_path / "job.json").write_text(json.dumps(spec))
    arguments = ("--code", str(folder), "--controller", process.grpc)
    answer = outlast_json("submit", str(tmp_path / "job.json"), *arguments)
    job_id = answer["job"]["job_id"]
    shutil.rmtree(folder)

    def ran(attempt: int) -> bool:
        said = f"attempt {attempt} says sent along in "
        return all(said in log_of(cluster, job_id, rank) for rank in (0, 1))

    wait_for(lambda: ran(1), "the script to run on both nodes")
    assert processes_with(SECRETS["OF_FILE"]), "ranks, and what they are forked from"
    (first, second) = folders_of(process, job_id)
    assert sorted(path.name for path in first.iterdir() if path.name != "__pycache__") == [
        ".gitignore",
        "helper.py",
        "train.py",
    ]
    assert first.name == second.name == digest_of(cluster, job_id)
    process.kill()
    process.start()
    cluster.wait_nodes(2)
    cluster.kill_rank(job_id, 1, 1)
    wait_for(lambda: ran(2), "the script to run again, under the new controller")
    go.touch()
    cluster.wait_state(job_id, "SUCCEEDED")
    wait_for(lambda: not folders_of(process, job_id), "the code to be gone with the job")
    wait_for(lambda: not processes_with(SECRETS["OF_FILE"]), "no process to have the secret")
    for name, value in SECRETS.items():
        digest = hashlib.sha256(value.encode()).hexdigest()
        assert f"{name} {digest}" in log_of(cluster, job_id), "ranks have it"
    assert not files_with(process.state_dir.parent, *SECRETS.values()), "and no file has it"


def processes_with(text: str) -> list[str]:
    """Processes that have a text in the environment that they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
    return found


def files_with(folder: Path, *texts: str) -> list[Path]:
    """Files of a controller and its nodes that have one of the texts."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes() if path.is_file() else b""
            if any(text.encode() in data for text in texts):
                found.append(path)
    return found


def digest_of(cluster: Cluster, job_id: str) -> str:
    spec = cluster.job(job_id).spec
    return str(spec["workload"]["code"]["digest"]).removeprefix("sha256:")  # type: ignore[index]


def test_code_that_was_lost_ends_the_job_at_once(
    cluster: Cluster, process: Controller, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('never')\n")
    document = {
        "name": "lost",
        "workload": {
            "command": ["python", "train.py"],
            "code": {"path": str(tmp_path)},
        },
        "resources": {"nodes": 2},
    }
    with cluster.client as client:
        nodes = [node.node_id for node in client.nodes()]
        for node in nodes:
            client.cordon(node)
        job_id = client.submit(document, wait_for_nodes=True).job_id
        (process.state_dir / "code" / digest_of(cluster, job_id)).unlink()
        for node in nodes:
            client.uncordon(node)
    job = cluster.wait_state(job_id, "FAILED")
    assert job.attempt == 1
    assert "there is no code" in job.reason
    (incident,) = cluster.incidents(job_id)
    assert incident.action == "fail"


def test_a_secret_that_no_node_has_ends_the_job_before_a_rank_starts(
    cluster: Cluster, tmp_path: Path
) -> None:
    job_id = submit(
        cluster,
        *("python", "-c", "print('never')"),
        workload={"env": {"MY_TOKEN": {"from_file": str(tmp_path / "none")}}},
    )
    job = cluster.wait_state(job_id, "FAILED")
    assert job.attempt == 1
    assert f"workload.env.MY_TOKEN is from the file {tmp_path / 'none'}" in job.reason
    assert not list(cluster.state_dir.glob(f"nodes/*/jobs/{job_id}/a1/*.log"))
