"""Answers of the API are compressed for who accepts that; streams and small ones are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from controller.web.compression import LEAST_BYTES, Compressed
from tests.controller.fakes import Lab
from tests.web.test_api import run

LONG = {"numbers": [*range(100_000)]}


def test_a_large_answer_is_sent_compressed(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        plain = await client.get("/api/v1/openapi.json", headers={"Accept-Encoding": "identity"})
        small = await client.get("/api/v1/openapi.json", headers={"Accept-Encoding": "br, gzip"})
        assert "content-encoding" not in plain.headers
        assert small.headers["content-encoding"] == "gzip"
        assert small.json() == plain.json()
        sent, whole = (int(each.headers["content-length"]) for each in (small, plain))
        assert sent < whole / 4
        assert small.headers["content-security-policy"] == plain.headers["content-security-policy"]
        assert small.headers["vary"] == "Accept-Encoding"

    run(tmp_path, scenario)


def test_events_are_sent_as_they_come(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        events = f"/api/v1/jobs/{job_id}/events"
        async with client.stream("GET", events, headers={"Accept-Encoding": "gzip"}) as answer:
            assert "content-encoding" not in answer.headers
            async for line in answer.aiter_lines():
                assert line == "event: job"
                break

    run(tmp_path, scenario)


async def _piece() -> AsyncIterator[str]:
    yield json.dumps(LONG)


def _app() -> Starlette:
    def answers(response: Response) -> Route:
        path = f"/{len(routes)}"

        async def answer(request: Request) -> Response:
            return response

        return Route(path, answer)

    routes: list[Route] = []
    for each in (
        JSONResponse(LONG),
        JSONResponse({"text": "x" * (LEAST_BYTES - 20)}),
        JSONResponse(LONG, headers={"Content-Encoding": "identity"}),
        PlainTextResponse("x" * 100_000),
        StreamingResponse(_piece(), media_type="application/json"),
        JSONResponse({"error": ["x"] * 1000}, status_code=503),
        Response(status_code=204),
    ):
        routes.append(answers(each))
    return Starlette(routes=routes, middleware=[Middleware(Compressed)])


@pytest.mark.parametrize(
    ("path", "is_compressed"),
    [
        ("0", True),
        ("1", False),
        ("2", False),
        ("3", False),
        ("4", False),
        ("5", True),
        ("6", False),
    ],
    ids=["large", "small", "encoded", "text", "streamed", "refusal", "empty"],
)
def test_only_json_in_one_piece_is_compressed(path: str, is_compressed: bool) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(f"/{path}", headers={"Accept-Encoding": "gzip"})

    answer = asyncio.run(ask())
    assert (answer.headers.get("content-encoding") == "gzip") == is_compressed
    if path in ("0", "4"):
        assert answer.json() == LONG


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0, br", False),
        ("br", False),
        ("", False),
    ],
)
def test_the_client_says_whether_it_accepts_that(accepted: str, is_compressed: bool) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/0", headers={"Accept-Encoding": accepted})

    answer = asyncio.run(ask())
    assert (answer.headers.get("content-encoding") == "gzip") == is_compressed
    assert answer.json() == LONG
