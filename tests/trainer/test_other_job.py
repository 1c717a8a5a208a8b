"""A job that begins with a checkpoint of another job, on as many ranks as it likes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.storage import Storage
from controller.agent.workers.launch import StartRefusedError
from controller.agent.workers.preflight import Preflight
from controller.core.edge.reports import worker_exited
from controller.core.node_events import WorkerExited
from outlast.cli.places import Nodes, look
from outlast.failures import ErrorKind
from outlast.ids import NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerExitCode
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import curve, log_of, make_text, spec_of, steps_of, train_and_upload

DONE, FAILED, STOPPED = WorkerExitCode


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of two ranks with checkpoints of steps 2 and 4; its end is step 8."""
    folder = tmp_path_factory.mktemp("first")
    make_text(folder)
    spec = job(folder, {"dp": 2})
    train_and_upload(ranks, folder, spec, attempt=1, stop_after=2)
    train_and_upload(ranks, folder, spec, attempt=2, stop_after=2)
    return folder


@pytest.fixture
def first(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def job(texts: Path, parallel: dict[str, Any], *, steps: int = 8, **checkpoint: Any) -> Any:
    return spec_of(
        texts,
        steps=steps,
        precision="fp64",
        parallel=parallel,
        eval={"interval_steps": None},
        checkpoint={"storage_interval_steps": 2, **checkpoint},
    )


def run(
    ranks: RankPool, folder: Path, spec: dict[str, Any], attempt: int = 1, stop_after: int = 0
) -> set[int]:
    folder.mkdir(exist_ok=True)
    world_size = parse_spec(spec).layout.world_size
    results = ranks.run(train, world_size, folder, spec, attempt, stop_after)
    return {result["code"] for result in results}


def error_of(folder: Path, rank: int) -> str:
    return str(json.loads((folder / f"a1-rank-{rank}.error.json").read_text())["message"])


def end_of(folder: Path, rank: int) -> WorkerExited:
    """The end of a rank as the controller takes it in, with what it did last."""
    report = json.loads((folder / f"a1-rank-{rank}.error.json").read_text())
    end = agents_pb2.WorkerExit(
        code=FAILED,
        exception_type=report["type"],
        exception_message=report["message"],
        traceback=report["traceback"],
        last_operation=agents_pb2.Operation(op="broadcast", group="world", sequence=6, detail=0),
    )
    return worker_exited(NodeId("n1"), "job-2", 1, rank, end)


def found_before(spec: dict[str, Any], root: Path) -> list[str]:
    """What a look at the checkpoint says on submit and, the same, on the node of rank 0."""
    parsed = parse_spec(spec)
    seen = look(parsed, {}, Nodes.HERE)
    said = [f"{problem.field} {problem.message}" for problem in seen.problems]
    start = agents_pb2.StartWorkers(
        ranks=(0,), committed_step=-1, checkpoint_url=f"file://{root}/own/job-2"
    )
    command = agents_pb2.Command(job_id="job-2", attempt=1, start_workers=start)
    check = Preflight(20.0, lambda job_id, why: None, data_dir=root).check(command, parsed)
    if not said:
        asyncio.run(check)
        return said
    with pytest.raises(StartRefusedError) as caught:
        asyncio.run(check)
    assert caught.value.kind is ErrorKind.CONFIG
    assert str(caught.value) == "; ".join(said)
    return said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"tp": 2}, None),
        ({"hidden": 64}, "model.hidden = "),
        ({"layers": 8}, "model.layers = "),
        ({"ffn_hidden": 24}, "model.ffn_hidden = "),
        ({"vocab_size": 300}, "model.vocab_size = 256, and this job has 300"),
        ({"positions": "rope"}, "model.positions = learned, and this job has others than learned"),
        ({"tied_embeddings": False}, "model.tied_embeddings = true, and this job has false"),
        ({"precision": "fp32"}, "precision = fp64, and this job has fp32"),
    ],
)
def test_another_model_is_found_before_a_rank_is_started(
    first: Path, changes: dict[str, Any], words: str | None
) -> None:
    root = first / "store" / "job-1"
    spec = job(first, {"tp": changes.get("tp", 1)}, load=str(root))
    for name, value in changes.items():
        section = spec if name == "precision" else spec["model"] if name != "tp" else {}
        section[name] = value
    said = found_before(spec, first)
    if words is None:
        assert said == []
        return
    (problem,) = said
    assert problem.startswith("checkpoint.load is ")
    assert "whose checkpoint of step 4 is of another model: it has " in problem
    assert words in problem


def test_it_goes_on_where_the_other_was_with_more_ranks(ranks: RankPool, first: Path) -> None:
    root = str(first / "store" / "job-1")
    whole, second = first / "whole", first / "second"
    assert run(ranks, whole, job(first, {})) == {DONE}
    assert run(ranks, second, job(first, {"tp": 2, "dp": 2}, load=root)) == {DONE}
    for one, two in zip(steps_of(whole, 1, 0)[4:], steps_of(second, 1, 3), strict=True):
        assert (two.step, two.loss) == (one.step, pytest.approx(one.loss, rel=1e-9))
    # Sums are in another order from here on, and the job says so.
    note = json.loads((second / "a1-rank-3.environment.json").read_text())
    assert note["changes"] == ["parallel.tp 1 is now 2"]


def test_an_older_step_of_the_other_may_be_chosen(ranks: RankPool, first: Path) -> None:
    root, second = str(first / "store" / "job-1"), first / "second"
    assert run(ranks, second, job(first, {}, load=root, load_step=2)) == {DONE}
    assert steps_of(second, 1, 0)[0].step == 3


def test_its_own_checkpoints_come_first_once_it_has_any(ranks: RankPool, first: Path) -> None:
    root, second = str(first / "store" / "job-1"), first / "second"
    spec = job(first, {"pp": 2}, load=root)
    second.mkdir()
    train_and_upload(ranks, second, spec, attempt=1, stop_after=2)
    shutil.rmtree(second / "memory")
    assert run(ranks, second, spec, attempt=2) == {DONE}
    assert steps_of(second, 2, 1)[0].step == 7


def test_a_corrupt_checkpoint_of_the_other_is_passed_over_and_left_alone(
    ranks: RankPool, first: Path
) -> None:
    store, second = first / "store" / "job-1", first / "second"
    storage = Storage(str(store))
    _, manifest = storage.read_commit(4)
    storage.close()
    payload = store / f"step-00000004.2/{manifest.parts[0].file}"
    payload.write_bytes(payload.read_bytes()[:-1])
    assert run(ranks, second, job(first, {"tp": 2}, load=str(store))) == {DONE}
    assert curve(steps_of(second, 1, 0))[0][0] == 3
    assert "falling back to step 2" in log_of(second, 1, 1)
    assert (store / "commits" / "00000004.json").exists()
    assert not (store / "quarantine").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"load_step": 3}, "no checkpoint of step 3 below"),
        ({"load": "/nowhere/job-7"}, "no checkpoint below /nowhere/job-7 can be loaded"),
        ({"steps": 4}, "is not before the end of this job, steps = 4"),
        ({"norm": "rmsnorm"}, "it is of another model"),
    ],
)
def test_what_cannot_be_begun_with_is_named_on_every_rank(
    ranks: RankPool, first: Path, settings: dict[str, Any], said: str
) -> None:
    second = first / "second"
    norm = settings.get("norm")
    checkpoint = {key: value for key, value in settings.items() if key != "norm"}
    spec = job(first, {"dp": 2}, **({"load": str(first / "store" / "job-1")} | checkpoint))
    spec["model"] |= {"norm": norm} if norm else {}
    assert run(ranks, second, spec) == {FAILED}
    assert said in error_of(second, 0)
    assert said in error_of(second, 1)
    exits = [end_of(second, rank) for rank in (0, 1)]
    assert [found.fault_class for found in exits] == ["config"] * 2
    assert "broadcast" not in exits[0].detail, "what a rank did last says nothing of it"


def test_other_samples_than_the_other_job_read_are_refused(ranks: RankPool, first: Path) -> None:
    second = first / "second"
    spec = job(first, {}, load=str(first / "store" / "job-1")) | {"seed": 5}
    assert run(ranks, second, spec) == {FAILED}
    assert "its loader stood at" in error_of(second, 0)
    assert "seed and data.global_batch" in error_of(second, 0)
