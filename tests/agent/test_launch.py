"""What must be true before workers start, without starting any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.agent.config import AgentConfig
from controller.agent.workers import launch
from controller.agent.workers.launch import StartRefusedError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.agent.harness import start_command


def spec(**resources: object) -> JobSpec:
    return parse_spec({"name": "job", "parallel": {"tp": 2, "dp": 2}, "resources": resources})


def config(folder: Path) -> AgentConfig:
    return AgentConfig(
        node="n0",
        controller="127.0.0.1:1",
        state_dir=folder / "state",
        memory_dir=folder / "memory",
        data_dir=folder / "data",
        workers=2,
    )


@pytest.mark.parametrize(
    ("device", "num_gpus", "chosen"),
    [("cpu", 8, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda"), ("cuda", 2, "cuda")],
)
def test_cuda_is_chosen_when_each_rank_can_have_a_gpu(
    tmp_path: Path, device: str, num_gpus: int, chosen: str
) -> None:
    for number in range(num_gpus):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    assert launch.choose_device(spec(device=device), 2, tmp_path) == chosen


def test_node_without_the_gpus_that_a_job_insists_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefusedError, match="2 workers need a GPU each and this node has 0"):
        launch.choose_device(spec(device="cuda"), 2, tmp_path)


def test_assignment_holds_what_a_worker_must_know(tmp_path: Path) -> None:
    command = start_command(3, ranks=(1, 0), committed_step=40, checkpoint_url="memory://c/job")
    for first_step, last_step in ((7, 7), (20, 30)):
        command.start_workers.skipped.add(first=first_step, last=last_step)
    launches = launch.make_launches(
        config(tmp_path), command, device="cpu", rendezvous_fd=9, requested_ns=5
    )
    second, first = (one.contract for one in launches)
    assert [(one.rank, one.attempt) for one in (second, first)] == [(1, 3), (0, 3)]
    assert [one.requested_ns for one in launches] == [5, 5]
    assert (second.local_rank, first.local_rank) == (0, 1)
    assert (second.rendezvous_fd, first.rendezvous_fd) == (None, 9)
    assert first.committed_step == 40
    assert [str(each) for each in first.skipped] == ["7", "20-30"]
    assert first.memory_dir == tmp_path / "memory" / "job" / "rank-00000"
    assert first.memory_dir.is_dir()
    assert first.log_path.parent == tmp_path / "state" / "jobs" / "job" / "a3"
    assert parse_spec(json.loads(first.spec_json)).name == "job"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("sections", "lives_on"),
    [
        ({}, False),
        ({"recovery": {"heal": True}}, True),
        ({"recovery": {"heal": True}, "workload": {"command": ["train.py"]}}, True),
    ],
)
def test_ranks_that_live_on_have_a_line_to_their_agent(
    tmp_path: Path, device: str, sections: dict[str, Any], lives_on: bool
) -> None:
    command = start_command(1)
    document = json.loads(command.start_workers.spec_json) | sections
    command.start_workers.spec_json = json.dumps(document)
    made = launch.make_launches(
        config(tmp_path),
        command,
        device=device,
        rendezvous_fd=9,
        requested_ns=0,
        agent_line="the line",
    )
    assert {one.contract.agent_line for one in made} == {"the line" if lives_on else ""}


def test_every_rank_saves_and_only_the_node_of_rank_0_commits(tmp_path: Path) -> None:
    command = start_command(ranks=(2, 3), checkpoint_url="memory://c/job")
    plan = launch.upload_plan(config(tmp_path), command, spec())
    assert plan.saver_ranks == (0, 1, 2, 3)
    assert plan.local_ranks == (2, 3)
    assert not plan.is_coordinator
    assert launch.upload_plan(config(tmp_path), start_command(), spec()).is_coordinator


@pytest.mark.parametrize(
    ("ranks", "committed_step", "tries"),
    [((0, 1), -1, True), ((2, 3), -1, False), ((0, 1), 0, False)],
)
def test_storage_is_tried_where_rank_0_is_until_something_is_committed(
    ranks: tuple[int, ...], committed_step: int, tries: bool
) -> None:
    command = start_command(2, ranks=ranks, committed_step=committed_step)
    assert launch.should_try_storage(command) is tries


@pytest.mark.parametrize("node", ["", "a/b"])
def test_node_name_that_is_none_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(ValueError, match="it must be a name without"):
        AgentConfig(
            node=node,
            controller="c:1",
            state_dir=tmp_path,
            memory_dir=tmp_path,
            data_dir=tmp_path,
            workers=1,
        )
