"""The job spec that a command line of `outlast run` becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.ids import NAME_PATTERN
from outlast.spec.parse import parse_spec
from outlast.torchrun.flags import run_options
from outlast.torchrun.job import job_name, spec_of_run


def document(line: str, workers: int = 1, **environ: str) -> dict[str, Any]:
    options = run_options(line.split(), environ)
    return spec_of_run(options, name="train-1", working_dir="/work", workers_per_node=workers)


def test_a_script_is_run_with_python_where_the_user_stands() -> None:
    assert document("--nproc-per-node 4 --nodes 2 --standalone train.py --lr 1e-3", 4) == {
        "name": "train-1",
        "workload": {
            "command": ["python", "train.py", "--lr", "1e-3"],
            "working_dir": "/work",
            "workers_per_node": 4,
        },
        "resources": {"nodes": 2},
        "recovery": {"ladder": ["restart"], "preflight": False},
    }


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-m my.package -x", ["python", "-m", "my.package", "-x"]),
        ("--no-python ./run.sh a", ["./run.sh", "a"]),
        ("--run-path train.py a", ["python", "train.py", "a"]),
        ("--no-python --run-path train.py", ["python", "train.py"]),
    ],
)
def test_modules_and_programs_are_run_as_such(line: str, command: list[str]) -> None:
    assert document(line)["workload"]["command"] == command


@pytest.mark.parametrize(
    ("line", "environ", "budget"),
    [
        ("train.py", {}, None),
        ("--max-restarts 0 train.py", {}, 0),
        ("--max-restarts 3 train.py", {}, 3),
        ("train.py", {"PET_MAX_RESTARTS": "2"}, 2),
        ("train.py", {"PET_MAX_RESTARTS": "0"}, 0),
    ],
)
def test_restarts_are_as_many_as_were_asked_for_or_those_of_outlast(
    line: str, environ: dict[str, str], budget: int | None
) -> None:
    found = document(line, **environ)
    assert found["recovery"].get("retry_budget") == budget
    read = parse_spec(found).recovery
    assert read.retry_budget == (10 if budget is None else budget)
    assert read.retry_program_errors == (budget is not None)


@pytest.mark.parametrize(
    ("line", "nodes", "least", "local"),
    [
        ("train.py", 1, None, 1),
        ("--nnodes 3 train.py", 3, None, 3),
        ("--nodes 3 train.py", 3, None, 3),
        ("--nodes 3 --nnodes 2 train.py", 2, None, 3),
        ("--nodes 3 --nnodes 1 train.py", 1, None, 3),
        ("--nnodes 2:4 train.py", 4, 2, 4),
        ("--nodes 3 --nnodes 2:4 train.py", 3, 2, 3),
        ("--nodes 2 --nnodes 2:4 train.py", 2, None, 2),
        ("--server h:1 --nodes 3 train.py", 3, None, 3),
    ],
)
def test_nodes_are_those_of_the_job_and_spares(
    line: str, nodes: int, least: int | None, local: int
) -> None:
    found = document(line)
    assert found["resources"] == {"nodes": nodes}
    assert found["workload"].get("min_nodes") == least
    assert found["workload"].get("max_nodes") == (None if least is None else nodes)
    assert run_options(line.split(), {}).local_nodes == local
    assert parse_spec(found).num_nodes == nodes


def test_nobody_is_waited_for_by_a_command_that_must_end() -> None:
    ladders = {
        line: document(f"{line} train.py")["recovery"]["ladder"]
        for line in ("--nodes 2", "--nodes 2 --nnodes 1", "--nnodes 1:2", "--server host:7070")
    }
    assert ladders == {
        "--nodes 2": ["restart"],
        "--nodes 2 --nnodes 1": ["restart", "replace"],
        "--nnodes 1:2": ["restart", "replace"],
        "--server host:7070": ["restart", "diagnose", "replace"],
    }


def test_nodes_of_a_controller_are_checked_first_and_those_of_this_machine_are_not() -> None:
    assert not parse_spec(document("train.py")).recovery.preflight
    assert parse_spec(document("--server host:7070 train.py")).recovery.preflight


def test_what_torchrun_sets_by_flags_is_set() -> None:
    line = "--rdzv-backend c10d --rdzv-id 7 --role actor --shutdown-timeout 4 train.py"
    workload = document(line)["workload"]
    assert workload["env"] == {"TORCHELASTIC_RUN_ID": "7", "ROLE_NAME": "actor"}
    assert workload["stop_grace_s"] == 4.0


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train-1f"),
        ("/a/b/My_Train.v2.py", "my-train-v2-1f"),
        ("my.package", "my-package-1f"),
        ("./run.sh", "run-sh-1f"),
        ("...", "run-1f"),
    ],
)
def test_a_job_is_called_like_its_script(script: str, name: str) -> None:
    assert job_name(script, "1f") == name


@given(st.text(max_size=80))
def test_any_script_gives_a_job_a_name_that_is_allowed(script: str) -> None:
    assert NAME_PATTERN.fullmatch(job_name(script, "00ff00"))


@pytest.mark.parametrize(
    ("code", "script", "working_dir", "command"),
    [
        (".", "train.py", ".", ["python", "train.py"]),
        ("..", "train.py", "here", ["python", "here/train.py"]),
        ("..", "../other/train.py", "here", ["python", "other/train.py"]),
        ("..", "/opt/train.py", "here", ["python", "/opt/train.py"]),
        (".", "-m pkg.train", ".", ["python", "-m", "pkg.train"]),
    ],
)
def test_places_of_a_folder_that_is_sent_are_the_same_in_it(
    tmp_path: Path, code: str, script: str, working_dir: str, command: list[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    options = run_options(f"--server h:1 --code {code} {script}".split(), {})
    found = spec_of_run(options, name="n", working_dir=str(here), workers_per_node=1)
    assert found["workload"]["code"] == {"path": str(tmp_path if code == ".." else here)}
    assert found["workload"]["working_dir"] == working_dir
    assert found["workload"]["command"] == command
    parse_spec(found)


def test_a_folder_that_is_sent_has_the_current_one_in_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    options = run_options(["--server", "h:1", "--code", "other", "train.py"], {})
    with pytest.raises(ValueError, match="--code other: the current folder is not in it"):
        spec_of_run(options, name="n", working_dir=str(tmp_path), workers_per_node=1)
