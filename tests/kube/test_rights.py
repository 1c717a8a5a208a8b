"""deploy/kubernetes/rbac.yaml against what the adapter does: no right is missing, none is idle."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controller.kube import quarantine
from tests.kube.cluster import Kube
from tests.kube.fleets import fleet
from tests.kube.jobs import Asked, TrainingJobs


def test_a_life_of_a_fleet_takes_exactly_the_rights_that_are_granted(
    kube: Kube, tmp_path: Path
) -> None:
    async def live() -> None:
        # A refused job has a status and an event, too.
        TrainingJobs(kube).apply("job", steps=1)
        async with fleet(kube, tmp_path, calls=Asked("steps: too few")) as it:
            await it.running(2)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(
                lambda: quarantine.SESSION in (it.host(lost).metadata.annotations or {}),
                "the quarantine",
            )
            it.driver.answer_all("/stop/")
            await it.until(lambda: it.driver.job().state == "PREFLIGHT", "a replacement")
            it.driver.answer_all("/suite/")
            it.driver.answer_all("/start/")
            it.cancel()
            it.driver.answer_all("/stop/")
            it.driver.answer_all("/forget/")
            it.driver.now_s += 61.0
            await it.until(lambda: not it.pods(), "the pods to be gone")
            await it.until(lambda: kube.unused_rights() == set(), "every right to be used")

    asyncio.run(live())
    assert kube.missing_rights() == set()
