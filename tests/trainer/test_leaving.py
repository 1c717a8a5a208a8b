"""Ranks that leave an attempt keep their process, and go on in the next one bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.blackbox import Reader
from outlast.worker_contract import WorkerContract, WorkerExitCode
from outlast.worker_line import Join, Leave
from tests.contracts import contract_of
from tests.trainer.agent_lines import DEADLINE_S, AgentLines
from tests.trainer.jobs import (
    lose_a_peer,
    lose_a_peer_and_the_device,
    train,
    train_with_line,
)
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import curve, make_text, spec_of, steps_of

STEPS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_text(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def lines() -> Iterator[AgentLines]:
    lines = AgentLines()
    yield lines
    lines.close()


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"dp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"dp": 2, "pp": 2, "zero": {"level": 2}}),
        (4, {"dp": 2, "tp": 2, "zero": {"level": 3}}),
        (2, {"dp": 2, "zero": {"level": 1}}),
    ],
    ids=["dp", "tp-pp", "dp-pp-zero2", "dp-tp-zero3", "dp-zero1-lamb"],
)
def test_ranks_that_leave_and_join_train_on_bitwise_in_the_same_processes(
    ranks: RankPool,
    folder: Path,
    lines: AgentLines,
    world_size: int,
    parallel: dict[str, Any],
) -> None:
    optimizer = {"lr": 0.01, "name": "lamb" if parallel.get("zero") == {"level": 1} else "adamw"}
    spec = spec_of(folder, steps=STEPS, parallel=parallel, optimizer=optimizer)
    whole, pieces = folder / "whole", folder / "pieces"
    whole.mkdir()
    pieces.mkdir()
    expected = ranks.run(train, world_size, whole, spec, 1)
    everybody = range(world_size)
    training, results = begun(ranks, lines, world_size, pieces, spec)
    # At once, and then after a step, on which all agree though one alone is asked.
    for attempt, num_asked in ((1, world_size), (2, 1)):
        boxes = [pieces / f"a{attempt}-rank-{rank}.blackbox" for rank in everybody]
        pids = [pid_at_step(box, 8 * attempt) for box in boxes]
        for pid in pids[:num_asked]:
            lines.say(pid, Leave(attempt, after_step=attempt == 2))
        lines.wait_left(pids)
        for rank, pid in enumerate(pids):
            lines.say(pid, Join(following(pieces, spec, rank, world_size, attempt + 1)))
    training.join(DEADLINE_S)
    assert [result["pid"] for result in results] == pids
    assert [result["code"] for result in results] == [WorkerExitCode.DONE] * world_size
    # After a stop that was planned all hold the step that they go on from; else most do.
    copied = [result["copied"] for result in results]
    assert [each[-1] for each in copied] == [False] * world_size
    assert all(len(each) == 2 for each in copied)
    # In the memory of the first attempt.
    assert [result["models"] for result in results] == [1] * world_size
    assert [each["state"] for each in results] == [each["state"] for each in expected]
    # One step at most is done twice, and in the same way; none after a stop that was planned.
    first, second, third = ([*steps_of(pieces, attempt, 0)] for attempt in (1, 2, 3))
    assert second[-1].step + 1 == third[0].step
    found = curve([*first, *second, *third])
    assert len(found) <= STEPS + 1
    assert sorted(set(found)) == curve(steps_of(whole, 1, 0))


def test_a_rank_that_loses_a_peer_leaves_unasked_and_ends_with_its_agent(
    ranks: RankPool, folder: Path, lines: AgentLines
) -> None:
    spec = spec_of(folder, steps=STEPS, parallel={"dp": 2})
    results: list[dict[str, Any]] = []
    training = threading.Thread(
        target=lambda: results.extend(ranks.run(lose_a_peer, 2, folder, spec, lines.address)),
        daemon=True,
    )
    training.start()
    pid = lines.wait_first_left()
    lines.close()
    training.join(DEADLINE_S)
    survivor, failed = results
    assert survivor == {"code": WorkerExitCode.STOPPED, "pid": pid}
    assert failed["code"] == WorkerExitCode.FAILED
    assert json.loads((folder / "a1-rank-1.error.json").read_text())
    assert "lost" in (folder / "a1-rank-0.error.json").read_text().lower()


def test_a_rank_whose_device_is_broken_is_made_anew(
    ranks: RankPool, folder: Path, lines: AgentLines
) -> None:
    spec = spec_of(folder, steps=STEPS, parallel={"dp": 2})
    results = ranks.run(lose_a_peer_and_the_device, 2, folder, spec, lines.address)
    assert {result["code"] for result in results} == {WorkerExitCode.FAILED}
    assert "CUDA error" in (folder / "a1-rank-0.error.json").read_text()


def begun(
    ranks: RankPool,
    lines: AgentLines,
    world_size: int,
    folder: Path,
    spec: dict[str, Any],
) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """A thread in which ranks train, and what they give once it has ended."""
    results: list[dict[str, Any]] = []
    training = threading.Thread(
        target=lambda: results.extend(
            ranks.run(train_with_line, world_size, folder, spec, lines.address)
        ),
        daemon=True,
    )
    training.start()
    return training, results


def following(
    folder: Path, spec: dict[str, Any], rank: int, world_size: int, attempt: int
) -> WorkerContract:
    name = f"a{attempt}-rank-{rank}"
    return contract_of(
        folder,
        rank,
        world_size=world_size,
        attempt=attempt,
        spec_json=json.dumps(spec),
        rendezvous_port=int((folder / "port").read_text()),
        blackbox_path=folder / f"{name}.blackbox",
        error_path=folder / f"{name}.error.json",
        environment_path=folder / f"{name}.environment.json",
        log_path=folder / f"{name}.log",
        checkpoint_url=str(folder / "store" / "job-1"),
    )


def pid_at_step(box: Path, step: int) -> int:
    """Of the rank with this black box, once it has completed the step."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError, ValueError):
            reader = Reader(box)
            present = reader.present()
            reader.close()
            if present.completed_step >= step:
                return present.pid
        time.sleep(0.01)
    raise AssertionError(f"{box} did not come to step {step}")
