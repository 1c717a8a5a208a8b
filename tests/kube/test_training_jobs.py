"""TrainingJobs of a cluster, with a controller that asks its callers for tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from controller.access.audit import Audit
from controller.core import events as ev
from controller.kube.config import KubeConfig
from controller.kube.training_job import OWNER
from deploy import crd
from outlast.channel import HEADER, bearer
from outlast.ids import JobId
from outlast.v1 import jobs_pb2
from tests.controller.access.certificates import tokens_file
from tests.controller.core.driver import make_plan
from tests.controller.fakes import Lab, lab, spec_document, until
from tests.kube.cluster import Kube
from tests.kube.conftest import Kubectl
from tests.kube.fleets import HURRIED, Fleet, fleet
from tests.kube.jobs import Asked, TrainingJobs
from tests.kube.manifests import DEFINITION, documents

SPEC = {key: value for key, value in spec_document().items() if key != "name"}


@asynccontextmanager
async def controller(kube: Kube, folder: Path) -> AsyncIterator[tuple[Lab, str]]:
    """A controller of TrainingJobs, and an admin's token."""
    tokens = folder / "tokens.yaml"
    given = tokens_file(tokens)
    config = KubeConfig(
        namespace=kube.namespace,
        image="outlast:test",
        controller="127.0.0.1:1",
        workers=1,
        num_devices=0,
        config_file=kube.write_config(folder / "kubeconfig"),
        patience=HURRIED,
        training_jobs=True,
    )
    async with lab(folder / "state", tokens_file=tokens, kube=config) as bench:
        yield bench, given["kim"]


async def said(jobs: TrainingJobs, name: str, state: str) -> dict[str, Any]:
    """The status of an object, once it has this state."""
    found: dict[str, Any] = {}

    async def look() -> None:
        found.update(await asyncio.to_thread(jobs.status, name))

    deadline = asyncio.get_running_loop().time() + 60.0
    while found.get("state") != state:
        assert asyncio.get_running_loop().time() < deadline, f"not {state}: {found}"
        await asyncio.sleep(0.1)
        await look()
    return found


def test_an_object_is_a_job_until_it_is_deleted(kube: Kube, tmp_path: Path) -> None:
    jobs = TrainingJobs(kube)

    async def live() -> None:
        async with controller(kube, tmp_path) as (bench, token):
            agents = await bench.add_agents(2)
            await asyncio.to_thread(lambda: jobs.apply("llama", **SPEC))
            status = await said(jobs, "llama", "STARTING")
            shown = ((HEADER, bearer(token)),)
            asked = jobs_pb2.GetJobRequest(job_id=status["jobId"])
            made = (await bench.jobs.GetJob(asked, metadata=shown)).job
            assert (made.name, made.owner) == ("llama", OWNER)
            assert len(agents) == status["nodes"] == 2
            await asyncio.to_thread(lambda: jobs.change("llama", suspend=True))
            await said(jobs, "llama", "PAUSED")
            await asyncio.to_thread(lambda: jobs.change("llama", suspend=False))
            await said(jobs, "llama", "STARTING")
            await asyncio.to_thread(jobs.delete, "llama")

            async def is_cancelled() -> bool:
                found = await bench.jobs.GetJob(asked, metadata=shown)
                return found.job.state == "CANCELLED"

            while not await is_cancelled():
                await asyncio.sleep(0.1)

    asyncio.run(live())
    done = [(each.caller, each.call, each.outcome) for each in Audit(tmp_path / "state").read()]
    assert done[::-1] == [
        (OWNER, f"Jobs/{call}", "OK") for call in ("Submit", "PauseJob", "ResumeJob", "CancelJob")
    ]
    told = [item.reason for item in kube.core().list_namespaced_event(kube.namespace).items]
    assert {"Starting", "Paused"} <= set(told)
    assert kube.missing_rights() == set()


def test_a_spec_that_is_none_is_said_to_be_until_it_is_mended(kube: Kube, tmp_path: Path) -> None:
    jobs = TrainingJobs(kube)
    jobs.apply("llama", **{**SPEC, "stepps": 10})

    async def live() -> None:
        async with controller(kube, tmp_path) as (bench, _):
            status = await said(jobs, "llama", "INVALID")
            assert "stepps: is not a field (did you mean steps?)" in status["reason"]
            assert "jobId" not in status
            await bench.add_agents(2)
            await asyncio.to_thread(lambda: jobs.change("llama", stepps=None))
            await said(jobs, "llama", "STARTING")

    asyncio.run(live())


def test_a_spec_with_very_many_mistakes_is_refused_with_words(kube: Kube, tmp_path: Path) -> None:
    jobs = TrainingJobs(kube)
    jobs.apply("llama", **{f"no-field-{number}": 1 for number in range(400)})

    async def live() -> None:
        async with controller(kube, tmp_path):
            status = await said(jobs, "llama", "INVALID")
            assert status["reason"].startswith("the job spec has 51 problems:")
            assert "is not a field" in status["reason"]

    asyncio.run(live())


def test_an_object_that_is_made_again_waits_for_the_end_of_the_first_job(
    kube: Kube, tmp_path: Path
) -> None:
    jobs = TrainingJobs(kube)

    async def live() -> None:
        async with controller(kube, tmp_path) as (bench, _):
            agents = await bench.add_agents(2)
            await asyncio.to_thread(lambda: jobs.apply("llama", **SPEC))
            first = await said(jobs, "llama", "STARTING")
            for agent in agents:
                agent.silent_on.add("stop_workers")
            await asyncio.to_thread(jobs.delete, "llama")
            await asyncio.to_thread(lambda: jobs.apply("llama", **SPEC))
            status = await said(jobs, "llama", "WAITING")
            assert f"is the name of job {first['jobId']}" in status["reason"]
            for agent in agents:
                agent.silent_on.clear()
                await agent.answer(agent.last("stop_workers"))
            status = await said(jobs, "llama", "STARTING")
            assert status["jobId"] != first["jobId"]

    asyncio.run(live())


def test_a_status_of_the_object_before_does_no_harm(kube: Kube, tmp_path: Path) -> None:
    jobs, calls = TrainingJobs(kube), Asked()
    jobs.apply("llama", steps=1)
    jobs.say("llama", {"uid": "of another", "jobId": "llama-0", "state": "RUNNING"})

    async def live() -> None:
        async with fleet(kube, tmp_path, hosts=0, calls=calls) as it:
            await until(lambda: bool(calls.calls), "the job to be submitted", within_s=60.0)
            _submitted(it, calls.calls[0][1])
            status = await said(jobs, "llama", "QUEUED")
            assert status["jobId"] == "llama-1"

    asyncio.run(live())


def test_a_job_of_somebody_else_is_not_followed(kube: Kube, tmp_path: Path) -> None:
    """Who submits may choose any id for his request."""
    calls = Asked()

    async def live() -> None:
        async with fleet(kube, tmp_path, hosts=0, calls=calls) as it:
            _submitted(it, f"trainingjob/{kube.namespace}/no-uid", owner="sam")
            TrainingJobs(kube).apply("llama", steps=1)
            await until(lambda: bool(calls.calls), "another one to be submitted", within_s=60.0)
        assert not [call for call in calls.calls if call[0] == "cancel"]

    asyncio.run(live())


def _submitted(it: Fleet, request_id: str, owner: str = OWNER) -> None:
    it.tell(
        ev.JobSubmitted(
            job_id=JobId("llama-1"),
            name="llama",
            request_id=request_id,
            spec_json="{}",
            checkpoint_url="memory://",
            plan=make_plan(),
            owner=owner,
        )
    )


def test_what_was_deleted_while_no_controller_ran_is_cancelled(kube: Kube, tmp_path: Path) -> None:
    jobs, calls = TrainingJobs(kube), Asked()

    async def live() -> None:
        async with fleet(kube, tmp_path, hosts=0, calls=calls) as it:
            await asyncio.to_thread(lambda: jobs.apply("llama", steps=1))
            await until(lambda: bool(calls.calls), "the job to be submitted", within_s=60.0)
            what, request_id = calls.calls[0]
            assert what == "submit"
            _submitted(it, request_id)
            await said(jobs, "llama", "QUEUED")
            await it.cluster.leave()
            await asyncio.to_thread(jobs.delete, "llama")
            calls.calls.clear()
            await it.restart()
            await until(lambda: ("cancel", "llama-1") in calls.calls, "the cancel", within_s=60.0)
            assert not [each for each in calls.calls if each[0] == "submit"]

    asyncio.run(live())


def test_objects_for_another_fleet_are_left_alone(kube: Kube, tmp_path: Path) -> None:
    jobs, calls = TrainingJobs(kube), Asked()
    jobs.apply("theirs", {"outlast.dev/fleet": "other"}, steps=1)
    jobs.apply("ours", {"outlast.dev/fleet": "outlast"}, steps=1)

    async def live() -> None:
        async with fleet(kube, tmp_path, hosts=0, calls=calls):
            await until(lambda: bool(calls.calls), "ours to be submitted", within_s=60.0)

    asyncio.run(live())
    assert {each["name"] for each in calls.documents} == {"ours"}
    assert jobs.status("theirs") == {}


def test_the_definition_is_that_of_this_release() -> None:
    assert crd.FILE.read_text() == crd.text(), "run `python -m deploy.crd`"
    (found,) = (each for each in documents() if each["kind"] == DEFINITION)
    assert found == crd.definition()


def test_the_server_knows_the_schema(kube: Kube) -> None:
    if kube.kind != "real":
        pytest.skip("the server in memory has no schemas; `make test-kube` has them")
    extensions: Any = client.ApiextensionsV1Api(kube.client())
    name = crd.definition()["metadata"]["name"]
    kept = extensions.read_custom_resource_definition(name)
    reasons = [each.type for each in kept.status.conditions if each.status == "True"]
    # No rule of schemas is broken.
    assert "NonStructuralSchema" not in reasons
    jobs = TrainingJobs(kube)
    for wrong in ({"steps": 0}, {"steps": "many"}, {"precision": "fp7"}, {"suspend": "yes"}):
        with pytest.raises(client.ApiException) as caught:
            jobs.apply("wrong", **{**SPEC, **wrong})
        assert caught.value.status == 422
    # As `outlast` writes what is left to be chosen.
    jobs.apply("chosen", model={"preset": None}, parallel={"zero": {"reshard_after": None}})
    # What it does not know is kept, for the controller to refuse.
    made = jobs.apply("llama", **{**SPEC, "stepps": 10})
    assert made["spec"] == {**SPEC, "stepps": 10}


def test_kubectl_shows_and_steers_them(kube: Kube, kubectl: Kubectl, tmp_path: Path) -> None:
    """The commands of docs/how-to/run-on-kubernetes.md."""
    if kube.kind != "real":
        pytest.skip("the server in memory does not discover; `make test-kube` has one that does")
    config = kube.write_config(tmp_path / "of-admin", kube.admin_token)
    manifest = tmp_path / "llama.yaml"
    manifest.write_text(
        json.dumps(
            {
                "apiVersion": "outlast.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "llama", "namespace": kube.namespace},
                "spec": SPEC,
            }
        )
    )

    async def shown(*arguments: str) -> str:
        given = (f"--kubeconfig={config}", "-n", kube.namespace, *arguments)
        return await asyncio.to_thread(lambda: kubectl(*given))

    async def live() -> None:
        jobs = TrainingJobs(kube)
        async with controller(kube, tmp_path) as (bench, _):
            await bench.add_agents(2)
            await shown("apply", "-f", str(manifest))
            await said(jobs, "llama", "STARTING")
            await shown("wait", "--for=condition=Running=False", "--timeout=60s", "tj/llama")
            table = await shown("get", "trainingjobs")
            assert table.split()[:7] == ["NAME", "STATE", "STEP", "STEPS", "RESTARTS", "JOB", "AGE"]
            assert table.split()[7:9] == ["llama", "STARTING"]
            patch = json.dumps({"spec": {"suspend": True}})
            await shown("patch", "tj", "llama", "--type=merge", "-p", patch)
            await said(jobs, "llama", "PAUSED")
            described = await shown("describe", "tj", "llama")
            assert "Paused" in described.partition("Events:")[2]
            await shown("delete", "tj", "llama")

    asyncio.run(live())
