"""What jobs went through and who did what, in pages: by the JSON API and by the client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from outlast.cli import trace
from outlast.client import Client
from tests.controller.fakes import Lab
from tests.web.test_api import got, run
from tests.web.test_fleet_api import all_pages


async def refusal(client: httpx.AsyncClient, path: str, **query: Any) -> tuple[str, str]:
    """The field that an answer names, and what it says."""
    answer = await client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["fields"][0]["field"], error["message"]


def test_history_comes_in_pages_of_which_the_first_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        path = f"/jobs/{job_id}/history"
        for step in range(1, 6):
            await bench.agents[0].commit(job_id, step)
        while len((whole := await got(client, path))["checkpoints"]) < 5:
            await asyncio.sleep(0.02)
        assert whole["next"] == ""
        pages = await all_pages(client, path, "checkpoints", most=2)
        steps = [[each["step"] for each in page] for page in pages]
        assert steps[:3] == [[4, 5], [2, 3], [1]]
        # There are more states than checkpoints.
        assert steps[3:] == [[]] * (len(steps) - 3)
        pages = await all_pages(client, path, "states", most=2)
        assert [span for page in reversed(pages) for span in page] == whole["states"]
        first = await got(client, path, most=2, only="checkpoints")
        assert first["states"] == []
        # A page stays what it is while newer ones come.
        older = await got(client, path, most=2, only="checkpoints", after=first["next"])
        await bench.agents[0].commit(job_id, 6)
        while (await got(client, path, most=1))["checkpoints"][0]["step"] != 6:
            await asyncio.sleep(0.02)
        again = await got(client, path, most=2, only="checkpoints", after=first["next"])
        known = [[each["step"] for each in page["checkpoints"]] for page in (older, again)]
        assert known == [[2, 3], [2, 3]]
        pages = await all_pages(client, path, "checkpoints", most=4, only="checkpoints")
        assert [[each["step"] for each in page] for page in pages] == [[3, 4, 5, 6], [1, 2]]
        field, message = await refusal(client, path, after="yesterday")
        assert (field, message) == (
            "after",
            "after: is 'yesterday'; allowed: `next` of the page before, such as 120-4000",
        )
        assert (await refusal(client, path, only="ranks"))[0] == "only"
        assert (await refusal(client, path, most=10_001))[0] == "most"
        monkeypatch.setattr(trace, "_MOST_CHECKPOINTS", 4)
        assert await asyncio.to_thread(asked, bench.running.grpc, job_id) == [*range(1, 7)]

    def asked(address: str, job_id: str) -> list[int]:
        with Client(address) as client:
            return [each.step for each in trace._checkpoints(client, job_id)]

    run(tmp_path, scenario)


def test_audit_comes_in_pages_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        for node in ("n0", "n1", "n7", "n0", "n1"):
            await client.post(f"/api/v1/nodes/{node}/cordon", json={})
        pages = await all_pages(client, "/audit", "entries", most=2)
        abouts = [[each["about"] for each in page] for page in pages]
        assert abouts == [["n1", "n0"], ["n7", "n1"], ["n0"]]
        whole = await got(client, "/audit")
        names = [each["about"] for each in whole["entries"]]
        assert names == [name for page in abouts for name in page]
        assert whole["next"] == ""
        first = await got(client, "/audit", most=2)
        await client.post("/api/v1/nodes/n1/uncordon", json={})
        older = await got(client, "/audit", most=2, after=first["next"])
        assert [each["about"] for each in older["entries"]] == ["n7", "n1"]
        since_s = older["entries"][0]["at_s"]
        few = await got(client, "/audit", most=2, after=first["next"], since_s=since_s)
        assert ([each["about"] for each in few["entries"]], few["next"]) == (["n7"], "")
        for after in ("yesterday", "1" * 16 + "-0-9999999999"):
            field, message = await refusal(client, "/audit", after=after)
            assert field == "after"
            assert message.startswith(f"after: is {after!r}")
            assert message.endswith("allowed: `next` of the page before")
        monkeypatch.setattr("outlast.client._MOST_ENTRIES", 2)
        everything, five = await asyncio.to_thread(asked, bench.running.grpc)
        assert everything == ["n1", *names]
        assert five == everything[:5]

    def asked(address: str) -> tuple[list[str], list[str]]:
        with Client(address) as client:
            everything = [each.about for each in client.audit(most=0)]
            return everything, [each.about for each in client.audit(most=5)]

    run(tmp_path, scenario)
