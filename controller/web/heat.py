"""The heat map of a job for the JSON API, from what its ranks have noted."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.concurrency import run_in_threadpool

from controller.web.gateway import Gateway, RequestError
from controller.web.routes import method
from outlast.layout import Layout
from outlast.trace.heat import HeatMap, Measure
from outlast.trace.ranks import traced_ranks
from outlast.v1 import ranks_pb2

# Agents of all nodes are asked, and read what their ranks have noted.
TIMEOUT_S = 60.0
_DIGITS = 4


async def heat_map(
    gateway: Gateway, job_id: str, measure: Measure, most_rows: int, most_steps: int
) -> dict[str, Any]:
    """What all ranks have noted of their newest steps.

    Raises:
        RequestError: there is no such job, or not all nodes have answered in time.
    """
    listed = await gateway.call(
        method("Ranks/ListRanks"), ranks_pb2.ListRanksRequest(job_id=job_id, most=1)
    )
    assert isinstance(listed, ranks_pb2.ListRanksResponse)
    layout = Layout(tp=listed.tp, pp=listed.pp, dp=listed.dp, ep=listed.ep)
    found = HeatMap(
        measure=measure,
        num_ranks=max(1, listed.num_ranks),
        most_rows=most_rows,
        most_steps=most_steps,
    )
    missing = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            times = ranks_pb2.ReadTimesRequest(job_id=job_id)
            async for each in gateway.stream(method("Ranks/ReadTimes"), times):
                assert isinstance(each, ranks_pb2.ReadTimesResponse)
                if each.HasField("missing"):
                    missing.append({"node": each.node, "reason": each.missing.reason})
                else:
                    # What one rank has noted takes milliseconds, and there may be thousands.
                    await run_in_threadpool(_add, found, each, layout)
    except TimeoutError as error:
        wrong = f"not all nodes have answered within {TIMEOUT_S:g} s"
        raise RequestError(504, wrong, reason="DEADLINE_EXCEEDED") from error
    return {
        "attempt": listed.attempt,
        "measure": str(measure),
        "num_ranks": listed.num_ranks,
        "steps": found.steps(),
        "rows": [
            {
                "first": row.first,
                "last": row.last,
                "node": row.node,
                "pp": row.pp,
                "seconds": [_rounded(each) for each in row.seconds],
            }
            for row in found.rows()
        ],
        "missing": missing,
    }


def _add(found: HeatMap, times: ranks_pb2.ReadTimesResponse, layout: Layout) -> None:
    for rank in traced_ranks([times], layout):
        found.add(rank)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.{_DIGITS}g}")
