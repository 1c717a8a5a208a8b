"""Where ranks spend their time, for the JSON API: one of them, or one beside a healthy peer."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterable
from statistics import median_low
from typing import Any

from starlette.concurrency import run_in_threadpool

from controller.web.gateway import Gateway, RequestError
from controller.web.routes import method
from outlast.speedscope import merged, own_shares
from outlast.v1 import ranks_pb2

PEER = "peer"
_RATE = 100
# A node has half a minute more than the recording to answer.
_ANSWER_S = 45.0
# As many as an answer of ranks has.
_MOST_PEERS = 4096
# As ps shows a process that was stopped.
_STOPPED = "T"


async def profile(
    gateway: Gateway, job_id: str, rank: int, seconds: int, beside: int | str | None
) -> dict[str, Any]:
    """Where a rank is in the next seconds, and at the same time another one.

    `beside` is that rank, `PEER` for one that does the same and is healthy, or None.

    Raises:
        RequestError: the rank has no profile, or no such peer.
    """
    if beside == PEER:
        beside = await _peer_of(gateway, job_id, rank)
    if beside is None:
        own = await _recorded(gateway, job_id, rank, seconds)
        return await run_in_threadpool(_document, rank, own, None, None, "")
    assert isinstance(beside, int)
    if beside == rank:
        wrong = f"is {beside}, which is the rank itself"
        raise RequestError(400, f"beside: {wrong}", fields=(("beside", wrong),))
    recorded, other = await asyncio.gather(
        _recorded(gateway, job_id, rank, seconds),
        _recorded(gateway, job_id, beside, seconds),
        return_exceptions=True,
    )
    if isinstance(recorded, BaseException):
        raise recorded
    if isinstance(other, RequestError):
        # What the rank itself does is known all the same.
        return await run_in_threadpool(_document, rank, recorded, beside, None, str(other))
    if isinstance(other, BaseException):
        raise other
    return await run_in_threadpool(_document, rank, recorded, beside, other, "")


def healthy_peer(ranks: Iterable[ranks_pb2.Rank], rank: int) -> int | None:
    """The rank that does the same as this one in another replica, and takes the median time of all.

    None where there is none that was heard of and runs.
    """
    known = {each.rank: each for each in ranks}
    if rank not in known:
        return None
    place = (known[rank].pp, known[rank].tp)
    work = {
        each.rank: each.split.forward_s + each.split.backward_s + each.split.optimizer_s
        for each in known.values()
        if each.rank != rank
        and (each.pp, each.tp) == place
        and each.phase
        and each.process_state != _STOPPED
    }
    if not work:
        return None
    middle = median_low(work.values())
    return min(each for each, seconds in work.items() if seconds == middle)


async def _peer_of(gateway: Gateway, job_id: str, rank: int) -> int:
    one = await _listed(gateway, job_id, rank, 1)
    stage = one.tp * one.dp
    # Ranks of a stage are in one block; of a very large one those around the rank are enough.
    begun = rank - rank % max(1, stage)
    first = max(begun, min(rank - _MOST_PEERS // 2, begun + stage - _MOST_PEERS))
    block = await _listed(gateway, job_id, first, min(stage, _MOST_PEERS))
    found = healthy_peer(block.ranks, rank)
    if found is None:
        wrong = f"is {PEER!r}, and rank {rank} has no peer in another replica that runs"
        raise RequestError(409, f"beside: {wrong}", reason="NO_PEER", fields=(("beside", wrong),))
    return found


async def _listed(
    gateway: Gateway, job_id: str, first: int, most: int
) -> ranks_pb2.ListRanksResponse:
    asked = ranks_pb2.ListRanksRequest(job_id=job_id, first=first, most=most)
    answer = await gateway.call(method("Ranks/ListRanks"), asked)
    assert isinstance(answer, ranks_pb2.ListRanksResponse)
    return answer


async def _recorded(
    gateway: Gateway, job_id: str, rank: int, seconds: int
) -> ranks_pb2.RecordProfileResponse:
    asked = ranks_pb2.RecordProfileRequest(job_id=job_id, rank=rank, seconds=seconds, rate=_RATE)
    answer = await gateway.call(method("Ranks/RecordProfile"), asked, timeout_s=seconds + _ANSWER_S)
    assert isinstance(answer, ranks_pb2.RecordProfileResponse)
    return answer


def _document(
    rank: int,
    own: ranks_pb2.RecordProfileResponse,
    beside: int | None,
    other: ranks_pb2.RecordProfileResponse | None,
    problem: str,
) -> dict[str, Any]:
    document = json.loads(gzip.decompress(own.speedscope))
    shares, others = own_shares(document), {}
    if other is not None:
        peer = json.loads(gzip.decompress(other.speedscope))
        others = own_shares(peer)
        document = merged({f"rank {rank}": document, f"rank {beside}": peer})
    most = {
        place: max(shares.get(place, 0.0), others.get(place, 0.0)) for place in (*shares, *others)
    }
    functions = [
        {
            "name": place.name,
            "file": place.file,
            "share": shares.get(place, 0.0),
            "beside_share": None if other is None else others.get(place, 0.0),
        }
        for place in sorted(most, key=lambda each: -most[each])
    ]
    compared = {"rank": beside, "node": other.node if other else "", "problem": problem}
    return {
        "node": own.node,
        "attempt": own.attempt,
        "beside": None if beside is None else compared,
        "functions": functions,
        "speedscope": document,
    }
