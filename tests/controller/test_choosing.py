"""Where a paused job is to go on is looked at before anything starts; what cannot be is refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.rpc.choosing import chosen_start
from outlast.ids import Attempt, JobId
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.v1 import jobs_pb2
from tests.checkpoint.helpers import commit_steps
from tests.controller.core.driver import make_plan
from tests.controller.fakes import Lab, lab, spec_document
from tests.controller.test_rpc import failure, reasons

# What `Lab.start_job` submits.
SPEC = parse_spec(spec_document())


def run_paused(
    tmp_path: Path, scenario: Callable[[Lab, str, str], Awaitable[None]], *steps: int
) -> None:
    """A scenario with a paused job whose storage has checkpoints of these steps."""

    async def run() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await bench.jobs.PauseJob(jobs_pb2.PauseJobRequest(job_id=job_id))
            url = (await bench.reach(job_id, "PAUSED")).checkpoint_url
            if steps:
                await asyncio.to_thread(commit_steps, url, tmp_path / "memory", steps)
            await scenario(bench, job_id, url)

    asyncio.run(run())


async def commit_model(url: str, memory: Path, spec: JobSpec, *steps: int) -> None:
    """Checkpoints with what decides the size of the model of `spec`, and as many parameters."""
    model = spec.model
    shapes: dict[str, tuple[int, ...]] = {
        "model.tokens.weight": (model.vocab_rows, model.hidden),
        "model.positions.weight": (model.seq_len, model.hidden),
        **{f"model.blocks.{layer}.norm.bias": (model.hidden,) for layer in range(model.layers)},
    }
    others = num_parameters(spec) - sum(map(math.prod, shapes.values()))
    shapes["model.others"] = (others,)

    def make(step: int) -> list[NamedTensor]:
        return [
            NamedTensor(name, torch.full(shape, float(step)), shape, (0,) * len(shape))
            for name, shape in shapes.items()
        ]

    await asyncio.to_thread(commit_steps, url, memory, steps, make=make)


async def resume(bench: Lab, job_id: str, **fields: object) -> jobs_pb2.Job:
    request = jobs_pb2.ResumeJobRequest(job_id=job_id, **fields)  # type: ignore[arg-type]
    return (await bench.jobs.ResumeJob(request)).job


async def refusal(bench: Lab, job_id: str, **fields: object) -> str:
    """What is wrong with a request, which leaves the job as it was."""
    error = await failure(resume(bench, job_id, **fields))
    assert (await bench.job(job_id)).state == "PAUSED"
    assert reasons(error) == ["INVALID_SPEC"]
    return error.details() or ""


def test_agents_are_told_what_was_chosen(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        await resume(bench, job_id, checkpoint_step=2)
        await bench.started(2)
        start = bench.agents[0].last("start_workers").start_workers
        (chosen,) = start.chosen_starts
        assert (chosen.step, chosen.attempt, chosen.url) == (2, 1, "")
        assert start.committed_step == 2
        (told,) = (await bench.job(job_id)).chosen_starts
        assert told == chosen

    run_paused(tmp_path, scenario, 1, 2, 3)


def test_from_scratch_needs_no_storage(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        await resume(bench, job_id, from_scratch=True)
        await bench.started(2)
        start = bench.agents[0].last("start_workers").start_workers
        assert (start.chosen_starts[0].step, start.committed_step) == (0, -1)

    run_paused(tmp_path, scenario)


def test_a_step_that_is_not_committed_is_refused_with_those_that_are(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        problem = await refusal(bench, job_id, checkpoint_step=7)
        assert problem.endswith(f"is 7; committed in {url}: 3, 2, 1"), problem

    run_paused(tmp_path, scenario, 1, 2, 3)


def test_nothing_committed_is_said(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        assert "none is committed there" in await refusal(bench, job_id, checkpoint_step=7)
        elsewhere = await refusal(bench, job_id, checkpoint_url=f"file://{tmp_path}/nothing")
        assert "none is committed there" in elsewhere

    run_paused(tmp_path, scenario)


def test_a_damaged_checkpoint_is_refused_as_far_as_it_shows(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        folder = Path(url.removeprefix("file://"))
        (payload,) = (folder / "step-00000002.1").glob("*.distcp")
        payload.write_bytes(payload.read_bytes()[:-1])
        problem = await refusal(bench, job_id, checkpoint_step=2)
        assert payload.name in problem
        assert "outlast ckpt salvage" in problem
        (folder / "step-00000003.1/manifest.json").unlink()
        assert "manifest.json is missing" in await refusal(bench, job_id, checkpoint_step=3)

    run_paused(tmp_path, scenario, 1, 2, 3)


@pytest.mark.parametrize("step", [None, 2])
def test_another_folder_is_looked_at_too(tmp_path: Path, step: int | None) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        other = f"file://{tmp_path}/other"
        await commit_model(other, tmp_path / "memory-2", SPEC, 2, 3)
        await resume(bench, job_id, checkpoint_url=f"{other}/", checkpoint_step=step)
        await bench.started(2)
        (chosen,) = (await bench.job(job_id)).chosen_starts
        assert (chosen.url, chosen.step) == (other, 0)
        assert chosen.url_step == (-1 if step is None else step)

    run_paused(tmp_path, scenario)


@pytest.mark.parametrize("step", [None, 2])
def test_another_folder_with_another_model_is_refused(tmp_path: Path, step: int | None) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        layers = SPEC.model.layers
        deeper = parse_spec(spec_document(model={"layers": layers + 2}))
        other = f"file://{tmp_path}/other"
        await commit_model(other, tmp_path / "memory-2", deeper, 2)
        problem = await refusal(bench, job_id, checkpoint_url=other, checkpoint_step=step)
        assert "whose checkpoint of step 2 is of another model" in problem, problem
        assert f"it has model.layers = {layers + 2}, and this job has {layers};" in problem, problem
        # Its shapes say nothing that a spec knows, but how large it is.
        unknown = f"file://{tmp_path}/unknown"
        await asyncio.to_thread(commit_steps, unknown, tmp_path / "memory-3", (2,))
        problem = await refusal(bench, job_id, checkpoint_url=unknown, checkpoint_step=step)
        assert "whose step 2 holds a model of 49 parameters" in problem, problem

    run_paused(tmp_path, scenario)


def test_the_checkpoint_of_a_script_has_no_model_to_compare(tmp_path: Path) -> None:
    script = parse_spec({"name": "job", "workload": {"command": ["python", "train.py"]}})
    job = JobRecord(
        job_id=JobId("job"),
        name="job",
        request_id="request",
        spec_json=script.canonical_json(),
        checkpoint_url=f"file://{tmp_path}/own",
        plan=make_plan(nodes=1, workers_per_node=1, total_steps=None),
        submitted_s=time.time(),
        state=JobState.PAUSED,
        since_s=time.time(),
        reason="paused",
        attempt=Attempt(1),
        nodes=(None,),
    )
    other = f"file://{tmp_path}/other"
    commit_steps(other, tmp_path / "memory", (2,))
    chosen = asyncio.run(chosen_start(job, jobs_pb2.ResumeJobRequest(), other))
    assert (chosen.url, chosen.url_step) == (other, -1)


def test_contradictions_and_bad_urls_are_refused(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        both = await refusal(bench, job_id, from_scratch=True, checkpoint_step=2)
        assert "is given with a checkpoint" in both
        assert "checkpoint_url" in await refusal(bench, job_id, checkpoint_url="s4://bucket/job")
        assert "own folder" in await refusal(bench, job_id, checkpoint_url=url)

    run_paused(tmp_path, scenario, 1)


def test_what_was_given_up_cannot_be_chosen_again(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        await resume(bench, job_id, checkpoint_step=1)
        await bench.started(2)
        await bench.train(2, resumed=1)
        await bench.reach(job_id, "RUNNING")
        await bench.jobs.PauseJob(jobs_pb2.PauseJobRequest(job_id=job_id))
        await bench.reach(job_id, "PAUSED")
        assert Storage(url).committed_steps() == [3, 2, 1]
        problem = await refusal(bench, job_id, checkpoint_step=3)
        assert problem.endswith(f"committed in {url}: 1")

    run_paused(tmp_path, scenario, 1, 2, 3)


def test_a_choice_from_which_nothing_was_trained_is_called_off_by_the_next(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str, url: str) -> None:
        await resume(bench, job_id, checkpoint_step=1)
        await bench.started(2)
        await bench.jobs.PauseJob(jobs_pb2.PauseJobRequest(job_id=job_id))
        await bench.reach(job_id, "PAUSED")
        await resume(bench, job_id, checkpoint_step=3)
        await bench.started(3)
        (chosen,) = (await bench.job(job_id)).chosen_starts
        assert (chosen.step, chosen.attempt) == (3, 2)

    run_paused(tmp_path, scenario, 1, 2, 3)


def test_a_job_that_runs_or_has_ended_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            error = await failure(resume(bench, job_id, from_scratch=True))
            assert reasons(error) == ["JOB_NOT_PAUSED"]
            assert "outlast pause" in (error.details() or "")
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            await bench.reach(job_id, "CANCELLED")
            error = await failure(resume(bench, job_id, checkpoint_step=1))
            assert reasons(error) == ["JOB_ENDED"]

    asyncio.run(scenario())
