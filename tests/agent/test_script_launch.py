"""What the ranks of a script are given, and what is refused before any is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from controller.agent.workers import launch
from controller.agent.workers.launch import StartRefusedError
from controller.agent.workers.script_launch import as_scripts, check_places
from controller.agent.workers.supervisor import Launch
from outlast.failures import ErrorKind
from outlast.spec.parse import parse_spec
from outlast.worker_contract import flight_record_pipe
from tests.agent.harness import start_command
from tests.agent.test_launch import config


def launches(
    tmp_path: Path,
    attempt: int = 1,
    ranks: tuple[int, ...] = (2, 3),
    device: str = "cpu",
    **workload: Any,
) -> list[Launch]:
    """Those of the second of two nodes with two ranks each."""
    workload = {"command": ["python", "train.py"], "workers_per_node": 2, **workload}
    spec = parse_spec({"name": "job", "workload": workload, "resources": {"nodes": 2}})
    command = start_command(attempt, ranks=ranks, spec_json=spec.canonical_json())
    command.start_workers.world_size = 4
    command.start_workers.rank_nodes[:] = ["n1", "n1", "n0", "n0"]
    made = launch.make_launches(
        config(tmp_path), command, device=device, rendezvous_fd=9, requested_ns=5
    )
    return as_scripts(made, spec, command.start_workers, state_dir=tmp_path)


def environment(one: Launch) -> dict[str, str]:
    assert one.contract.script is not None
    return dict(one.contract.script.environment)


def test_ranks_find_their_places_as_torchrun_has_them(tmp_path: Path) -> None:
    first, second = (environment(one) for one in launches(tmp_path, attempt=3))
    assert (first["RANK"], second["RANK"]) == ("2", "3")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["GROUP_RANK"]) == ("4", "2", "1")
    assert first["TORCHELASTIC_RESTART_COUNT"] == "2", "of the third attempt"
    assert first["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert first["TORCHELASTIC_ERROR_FILE"].endswith("a3/rank-00002.error.json")


def test_no_rank_hosts_the_store(tmp_path: Path) -> None:
    assert [one.contract.rendezvous_fd for one in launches(tmp_path, ranks=(0, 1))] == [None, None]


def test_what_the_agent_is_told_is_kept_from_scripts_and_their_own_variables_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_JOIN_TOKEN_FILE", "/secret")
    monkeypatch.setenv("PYTHONPATH", "/known")
    monkeypatch.setenv("OF_AGENT", "1")
    own = {"WORLD_SIZE": "7", "MINE": "2"}
    found = environment(launches(tmp_path, env=own, python_path=["/a", "/b"])[0])
    assert "OUTLAST_JOIN_TOKEN_FILE" not in found
    assert (found["WORLD_SIZE"], found["MINE"], found["OF_AGENT"]) == ("7", "2", "1")
    assert found["PYTHONPATH"] == os.pathsep.join(("/a", "/b", "/known"))


def test_nccl_records_what_its_groups_do_where_ranks_have_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    one = launches(tmp_path, device="cuda")[0]
    found = environment(one)
    assert found["TORCH_FR_BUFFER_SIZE"] == "7", "as the user has it"
    pipe = found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{one.contract.rank}.pipe"
    assert Path(pipe) == flight_record_pipe(one.paths.log.parent, one.contract.rank)
    assert not any("DEBUG_INFO" in name for name in environment(launches(tmp_path)[0]))


def test_a_script_runs_in_the_folder_of_its_attempt_or_in_its_own(tmp_path: Path) -> None:
    one = launches(tmp_path)[0]
    assert one.contract.script is not None
    assert Path(one.contract.script.cwd) == one.paths.log.parent
    other = launches(tmp_path, working_dir="/tmp")[0]
    assert other.contract.script is not None
    assert other.contract.script.cwd == "/tmp"


def test_another_interpreter_finds_the_session_behind_the_scripts_own_folders(
    tmp_path: Path,
) -> None:
    one = launches(tmp_path, python="/other/bin/python", python_path=["/a"])[0]
    first, session = environment(one)["PYTHONPATH"].split(os.pathsep)[:2]
    assert first == "/a"
    assert (Path(session) / "outlast" / "session" / "__init__.py").is_file()
    assert "PYTHONPATH" not in environment(launches(tmp_path)[0]).keys() - os.environ.keys()


def test_imports_are_shared_unless_the_spec_says_otherwise(tmp_path: Path) -> None:
    shared, alone = (
        launches(tmp_path, preload=preload)[0].contract.script for preload in (["torch"], "off")
    )
    assert shared is not None
    assert alone is not None
    assert (shared.python, alone.python) == (("train.py",), ())


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            {"command": ["python", "{0}/none.py"]},
            "workload.command has '{0}/none.py', which is not",
        ),
        ({"command": ["{0}/plain.py"]}, "which is not executable; put python before it"),
        ({"command": ["no-such-program"]}, "which is no program of this node's PATH"),
        (
            {"command": ["python", "{0}/plain.py"], "python": "{0}/none/bin/python"},
            "workload.python has '{0}/none/bin/python', which is not there",
        ),
        (
            {"command": ["python", "{0}/plain.py"], "working_dir": "{0}/none"},
            "workload.working_dir has '{0}/none', which is no folder",
        ),
        (
            {"command": ["python", "{0}/plain.py"], "python_path": ["{0}/none"]},
            "workload.python_path has '{0}/none', which is not there",
        ),
    ],
    ids=["script", "mode", "program", "python", "folder", "path"],
)
def test_what_is_not_on_the_node_is_refused_with_its_field(
    tmp_path: Path, workload: dict[str, Any], said: str
) -> None:
    (tmp_path / "plain.py").write_text("pass\n")
    filled = {name: _filled(value, tmp_path) for name, value in workload.items()}
    with pytest.raises(StartRefusedError) as caught:
        check_places(parse_spec({"name": "job", "workload": filled}))
    assert caught.value.kind is ErrorKind.MISSING
    assert said.format(tmp_path) in str(caught.value)


def _filled(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [each.format(folder) for each in value]
    return value.format(folder)


@pytest.mark.parametrize("command", [["true"], ["python", "-m", "json"], ["python", "-c", "pass"]])
def test_what_is_there_is_not_refused(command: list[str]) -> None:
    check_places(parse_spec({"name": "job", "workload": {"command": command}}))
