"""A request that waits is carried out or refused, soon: never hours later, when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.core.changes import StateChange
from controller.core.events import JobCancelRequested
from controller.refusals import ReadOnlyError, ServiceStoppedError
from controller.store.backend import DiskFullError
from controller.store.journal import Journal
from outlast.ids import JobId
from tests.controller.edge.bench import Bench, bench

WITHIN_S = 10.0


def _cancel(found: Bench) -> tuple[JobId, asyncio.Task[None]]:
    (job_id,) = found.service.state.jobs
    request = found.service.tell(JobCancelRequested(job_id=job_id))
    return job_id, asyncio.ensure_future(request)


async def _outcome(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WITHIN_S):
        await task


def test_request_that_fills_the_disk_is_refused_and_not_carried_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, is_full = Journal.append, True

    def full(self: Journal, changes: Sequence[StateChange]) -> None:
        if is_full:
            raise DiskFullError("no space left on device")
        append(self, changes)

    async def scenario() -> None:
        nonlocal is_full
        async with bench(tmp_path) as found:
            job_id, first = _cancel(found)
            _, second = _cancel(found)
            monkeypatch.setattr(Journal, "append", full)
            for request in (first, second):
                with pytest.raises(ReadOnlyError, match="free room there"):
                    await _outcome(request)
            assert found.service.read_only
            is_full = False
            async with asyncio.timeout(WITHIN_S):
                while found.service.read_only:
                    await asyncio.sleep(0)
                await found.service.tell()
            assert str(found.service.state.jobs[job_id].state) not in ("CANCELLED", "SUSPENDING")

    asyncio.run(scenario())


def test_request_that_waits_when_the_controller_stops_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            _, request = _cancel(found)
            task = asyncio.ensure_future(found.service.tell())
            found.loop.get_loop().call_soon(found.service.stop)
            async with asyncio.timeout(WITHIN_S):
                answers = await asyncio.gather(request, task, return_exceptions=True)
            for answer in answers:
                assert answer is None or "try again when it is back" in str(answer)
            with pytest.raises(ServiceStoppedError):
                await found.service.tell()

    asyncio.run(scenario())
