"""Every command against a real controller process that has no nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from outlast.cli.agent import agent_arguments
from outlast.cli.connect import connector
from outlast.cli.errors import ExitCode
from outlast.cli.follow import Follower
from outlast.client import Client
from tests.checkpoint.helpers import commit_steps
from tests.cli.running import TIMEOUT_S, outlast, outlast_json, outlast_process

SPEC = {"name": "tiny", "steps": 5}


def start_controller(folder: Path) -> subprocess.Popen[bytes]:
    """`outlast controller` on free ports, once it says where it listens."""
    noted = folder / "controller.json"
    noted.unlink(missing_ok=True)
    ports = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outlast.cli.main", "controller"),
                *("--state-dir", str(folder), *ports),
            ],
            stdout=log,
            stderr=log,
        )
    deadline_s = time.monotonic() + TIMEOUT_S
    while not noted.exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline_s, (folder / "log").read_text()
        time.sleep(0.05)
    return process


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A controller started by `outlast controller`, and ended by SIGTERM."""
    folder = tmp_path_factory.mktemp("state")
    process = start_controller(folder)
    try:
        yield folder
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == ExitCode.OK, (folder / "log").read_text()
        assert "Outlast listens at" in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def job_id(state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that waits for nodes."""
    path = tmp_path_factory.mktemp("spec") / "job.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    facts = outlast_json(
        *("submit", str(path), "--request-id", "r1", "--state-dir", str(state_dir))
    )
    again = outlast_json(
        *("submit", str(path), "--request-id", "r1", "--state-dir", str(state_dir))
    )
    assert again["job"]["job_id"] == facts["job"]["job_id"]
    return str(facts["job"]["job_id"])


def test_jobs_lists_the_job(state_dir: Path, job_id: str) -> None:
    found = outlast_json("jobs", "--state-dir", str(state_dir))
    assert job_id in [job["job_id"] for job in found["jobs"]]
    done = outlast("jobs", OUTLAST_STATE_DIR=str(state_dir))
    assert done.stdout.startswith("JOB")
    assert job_id in done.stdout


@pytest.mark.parametrize("how", ["id", "name", "prefix"])
def test_status_says_for_what_the_job_waits(state_dir: Path, job_id: str, how: str) -> None:
    word = {"id": job_id, "name": "tiny", "prefix": job_id[:-2]}[how]
    found = outlast_json("status", word, "--state-dir", str(state_dir))
    assert found["job"]["job_id"] == job_id
    assert found["training"] is False
    assert "waits for its first nodes" in found["explanation"]
    assert "waiting for" in found["job"]["reason"]
    assert found["job"]["spec"]["model"]["layers"] == 4


def test_status_in_words(state_dir: Path, job_id: str) -> None:
    done = outlast("status", job_id, "--state-dir", str(state_dir))
    assert done.stdout.startswith("It is not training")
    assert "step 0 of 5" in done.stdout


def test_controller_address_alone_is_enough(state_dir: Path, job_id: str) -> None:
    address = json.loads((state_dir / "controller.json").read_text())["grpc"]
    found = outlast_json("status", job_id, "--controller", address)
    assert found["job"]["job_id"] == job_id
    assert outlast_json("nodes", OUTLAST_CONTROLLER=address) == {"nodes": []}


def test_fleet_and_incidents_are_empty(state_dir: Path, job_id: str) -> None:
    where = ("--state-dir", str(state_dir))
    assert outlast_json("nodes", *where) == {"nodes": []}
    assert outlast_json("incidents", *where) == {"incidents": []}
    assert outlast_json("incidents", job_id, *where) == {"incidents": []}
    assert outlast("incidents", *where).stdout == "no incidents\n"
    assert outlast("nodes", *where).stdout == "no nodes\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "nothing"),
        ("incidents", "show", "nothing.i1"),
        ("nodes", "cordon", "nothing"),
        ("nodes", "drain", "nothing"),
        ("nodes", "uncordon", "nothing"),
        ("nodes", "forget", "nothing"),
        ("nodes", "rejoin", "nothing"),
        ("diagnose", "nothing"),
        ("diagnose", "--suite", "nothing"),
        ("diagnose", "--show", "nothing"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_bad_input(state_dir: Path, arguments: tuple[str, ...]) -> None:
    done = outlast(*arguments, "--state-dir", str(state_dir))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_controller_reports_every_problem_of_a_spec(state_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: tiny\nsteps: -1\nmodle: {}\n")
    done = outlast("submit", str(path), "--state-dir", str(state_dir))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "  steps: " in done.stderr
    assert "  modle: is not a field" in done.stderr


def test_logs_of_a_job_without_nodes_say_why(state_dir: Path, job_id: str) -> None:
    done = outlast("logs", job_id, "--state-dir", str(state_dir))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "on its nodes" in done.stderr


def test_pause_resume_cancel_and_watch(state_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "other"}))
    where = ("--state-dir", str(state_dir))
    job = outlast_json("submit", str(path), "--set", "steps=7", *where)["job"]
    assert job["total_steps"] == 7
    name = job["job_id"]
    assert outlast_json("pause", name, *where)["job"]["state"] == "PAUSED"
    assert "It is not training: it is paused" in outlast("status", name, *where).stdout
    none = outlast("resume", name, "--checkpoint", "40", *where)
    assert none.returncode == ExitCode.BAD_INPUT
    assert "none is committed there" in none.stderr
    anew = outlast_json("resume", name, "--from-scratch", *where)["job"]
    assert anew["state"] == "QUEUED"
    assert [chosen["step"] for chosen in anew["chosen_starts"]] == [0]
    refused = outlast("resume", name, *where)
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "not paused" in refused.stderr
    assert outlast_json("cancel", name, *where)["job"]["state"] == "CANCELLED"
    watched = outlast("watch", name, *where)
    assert watched.returncode == ExitCode.JOB_FAILED
    assert "CANCELLED" in watched.stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--from-scratch", "--checkpoint", "40"), "exclude each other"),
        (("--checkpoint", "40", "--step", "30"), "goes with --checkpoint URL"),
        (("--step", "30"), "which is not given"),
    ],
)
def test_choices_of_resume_that_contradict_each_other_are_refused(
    options: tuple[str, ...], problem: str
) -> None:
    refused = outlast("resume", "some-job", *options)
    assert refused.returncode == ExitCode.BAD_INPUT
    assert problem in refused.stderr


def test_submit_watch_ends_with_the_job(state_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "watched"}))
    where = ("--state-dir", str(state_dir))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "outlast.cli.main", "submit"),
            *(str(path), "--watch", "--json", *where),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["job"]["state"] == "QUEUED"
        assert outlast("cancel", first["job"]["job_id"], *where).returncode == ExitCode.OK
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert json.loads(rest.splitlines()[-1])["job"]["state"] == "CANCELLED"
    assert process.returncode == ExitCode.JOB_FAILED


def test_a_live_job_s_name_is_taken_until_it_has_ended(state_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "taken"}))
    where = ("--state-dir", str(state_dir))
    first = outlast_json("submit", str(path), *where)["job"]["job_id"]
    refused = outlast("submit", str(path), *where)
    assert refused.returncode == ExitCode.BAD_INPUT
    assert f"name: 'taken' is the name of job {first} (QUEUED)" in refused.stderr
    assert "--set name=..." in refused.stderr
    assert outlast("cancel", "taken", *where).returncode == ExitCode.OK
    second = outlast_json("submit", str(path), *where)["job"]["job_id"]
    # The name now means the newer one; the older one has its id.
    assert outlast_json("status", "taken", *where)["job"]["job_id"] == second
    assert outlast_json("status", first, *where)["job"]["job_id"] == first
    assert outlast("cancel", second, *where).returncode == ExitCode.OK
    assert outlast_json("status", "taken", *where)["job"]["job_id"] == second


def test_a_job_says_where_its_checkpoints_are(state_dir: Path, job_id: str, tmp_path: Path) -> None:
    where = ("--state-dir", str(state_dir))
    url = f"file://{state_dir}/checkpoints/{job_id}"
    assert url in outlast("status", job_id, *where).stdout
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "stored", "checkpoint": {"url": f"{tmp_path}/store"}}))
    done = outlast("submit", str(path), *where)
    stored = outlast_json("status", "stored", *where)["job"]["job_id"]
    shown = done.stdout.splitlines()
    assert shown[0] == f"submitted {stored}"
    assert f"checkpoints: file://{tmp_path}/store/{stored}" in shown
    empty = outlast("ckpt", "ls", "stored", *where)
    assert empty.returncode == ExitCode.BAD_INPUT
    assert f"file://{tmp_path}/store/{stored}: no checkpoints" in empty.stderr
    commit_steps(f"file://{tmp_path}/store/{stored}", tmp_path / "memory", [50])
    assert outlast("ckpt", "ls", "stored", *where).stdout.splitlines()[1].startswith("50 ")
    assert outlast("ckpt", "verify", "stored", *where).stdout == "step 50: whole\n"
    assert outlast("cancel", "stored", *where).returncode == ExitCode.OK
    ended = outlast("resume", "stored", *where)
    assert ended.returncode == ExitCode.BAD_INPUT
    assert "submit its spec again" in ended.stderr


def test_status_without_a_name_means_the_only_job(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    where = ("--state-dir", str(folder))
    controller = start_controller(folder)
    try:
        none = outlast("status", *where)
        assert none.returncode == ExitCode.BAD_INPUT
        assert "there is no job" in none.stderr
        path = tmp_path / "job.json"
        for name in ("one", "two"):
            path.write_text(json.dumps({"name": name}))
            assert outlast("submit", str(path), *where).returncode == ExitCode.OK
            if name == "one":
                assert outlast_json("status", *where)["job"]["name"] == "one"
        several = outlast("status", *where)
        assert several.returncode == ExitCode.BAD_INPUT
        assert "which job? There are two-" in several.stderr
        assert outlast("cancel", "one", *where).returncode == ExitCode.OK
        # Of several, the only one that has not ended.
        assert outlast_json("status", *where)["job"]["name"] == "two"
    finally:
        controller.kill()
        controller.wait()


def test_second_controller_on_the_same_folder_is_refused(state_dir: Path) -> None:
    done = outlast_process(
        *("controller", "--state-dir", str(state_dir), "--grpc", "127.0.0.1:0"),
        *("--http", "127.0.0.1:0"),
    )
    assert done.returncode == ExitCode.BAD_INPUT
    assert "Traceback" not in done.stderr
    assert str(state_dir) in done.stderr


def test_taken_port_is_named(state_dir: Path, tmp_path: Path) -> None:
    address = json.loads((state_dir / "controller.json").read_text())["grpc"]
    done = outlast_process(
        *("controller", "--state-dir", str(tmp_path), "--grpc", address, "--http", "127.0.0.1:0")
    )
    assert done.returncode == ExitCode.BAD_INPUT
    # It may have been `outlast up` that was called.
    assert done.stderr.startswith("outlast: ")
    assert address in done.stderr
    assert "--grpc" in done.stderr


def test_malformed_address_is_bad_usage(tmp_path: Path) -> None:
    done = outlast_process("controller", "--state-dir", str(tmp_path), "--grpc", "nonsense")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "it must be host:port" in done.stderr


def test_following_survives_the_death_of_the_controller(tmp_path: Path) -> None:
    """The job trains on meanwhile, so its watcher waits, and finds the next controller."""
    spec = tmp_path / "job.json"
    spec.write_text(json.dumps(SPEC))
    folder = tmp_path / "state"
    folder.mkdir()
    where = ("--state-dir", str(folder))
    controller = start_controller(folder)
    try:
        job = outlast_json("submit", str(spec), *where)["job"]
        with Client(state_dir=folder) as client:
            follower = Follower(connector("", folder), client.get(job["job_id"])[0])
        follower.start()
        controller.kill()
        controller.wait()
        wait_for(lambda: "does not answer" in follower.snapshot().trouble)
        # At another port, which the state folder names.
        controller = start_controller(folder)
        wait_for(lambda: follower.snapshot().trouble == "")
        assert outlast("cancel", "tiny", *where).returncode == ExitCode.OK
        wait_for(lambda: follower.snapshot().is_finished)
    finally:
        controller.kill()
        controller.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until it holds; fail at the deadline."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_agent_joins_and_its_node_can_be_cordoned_and_checked(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    where = ("--state-dir", str(folder))
    controller = start_controller(folder)
    address = json.loads((folder / "controller.json").read_text())["grpc"]
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "outlast.cli.main", "agent", "--node", "extra-1"),
                *("--controller", address, "--workers", "1", *where),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: bool(outlast_json("nodes", *where)["nodes"]))
        (node,) = outlast_json("nodes", *where)["nodes"]
        assert (node["node_id"], node["workers"], node["connected"]) == ("extra-1", 1, True)
        assert "extra-1" in outlast("nodes", *where).stdout
        assert outlast_json("nodes", "cordon", "extra-1", *where)["node"]["cordoned"] is True
        assert "READY, cordoned" in outlast("nodes", *where).stdout
        refused = outlast("nodes", "forget", "extra-1", *where)
        assert refused.returncode == ExitCode.BAD_INPUT
        assert "it is connected; stop its agent first" in refused.stderr
        assert outlast_json("nodes", "uncordon", "extra-1", *where)["node"]["cordoned"] is False
        checked = outlast("diagnose", "extra-1", "--json", *where)
        run = json.loads(checked.stdout)["run"]
        assert {finding["node"] for finding in run["findings"]} == {"extra-1"}, checked.stderr
        failed = any(report["verdict"] == "fail" for report in run["node_reports"])
        assert checked.returncode == (ExitCode.JOB_FAILED if failed else ExitCode.OK)
        kept = outlast_json("diagnose", "--list", *where)["runs"]
        assert [item["run_id"] for item in kept] == [run["run_id"]]
        assert run["run_id"] in outlast("diagnose", "--list", *where).stdout
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(TIMEOUT_S) == ExitCode.OK, (tmp_path / "agent.log").read_text()
    finally:
        for process in (agent, controller):
            process.kill()
            process.wait()
        memory_dir = Path(agent_arguments("extra-1", folder)[5])
        shutil.rmtree(memory_dir.parent, ignore_errors=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("outlast stat", ["status"]),
        ("outlast status tin", ["tiny", "{job}"]),
        ("outlast ckpt ls tiny-", ["{job}"]),
        ("outlast incidents show x", []),
        ("outlast nodes cordon n", []),
    ],
)
def test_the_shell_completes_commands_and_names(
    state_dir: Path, job_id: str, words: str, expected: list[str]
) -> None:
    done = outlast_process(
        _OUTLAST_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
        OUTLAST_STATE_DIR=str(state_dir),
    )
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.split() == [word.format(job=job_id) for word in expected]


def test_completion_without_a_controller_is_empty_and_silent(tmp_path: Path) -> None:
    done = outlast_process(
        _OUTLAST_COMPLETE="complete_bash",
        COMP_WORDS="outlast status ",
        COMP_CWORD="2",
        OUTLAST_STATE_DIR=str(tmp_path),
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (ExitCode.OK, "", "")


def test_the_completion_of_the_shell_can_be_installed(tmp_path: Path) -> None:
    """For the shell that it is called from, which whoever runs the tests may have left."""

    def called_from_bash(option: str) -> str:
        # Something after the command: else the shell would become it.
        script = '"$0" -m outlast.cli.main "$1" && true'
        return subprocess.run(
            ["bash", "-c", script, sys.executable, option],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "HOME": str(tmp_path)},
            check=True,
        ).stdout

    called_from_bash("--install-completion")
    assert "_outlast_completion" in (tmp_path / ".bash_completions" / "outlast.sh").read_text()
    assert "_OUTLAST_COMPLETE" in called_from_bash("--show-completion")
