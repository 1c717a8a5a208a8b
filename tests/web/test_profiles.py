"""A rank's profile beside that of a healthy peer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx

from controller.web.profiles import healthy_peer
from outlast.v1 import agents_pb2, ranks_pb2
from tests.controller.fakes import Lab
from tests.web.test_api import got, run


def rank_of(number: int, forward_s: float, *, pp: int = 0, **changes: Any) -> ranks_pb2.Rank:
    rank = ranks_pb2.Rank(rank=number, pp=pp, dp=number, phase="forward", **changes)
    rank.split.forward_s = forward_s
    return rank


def test_the_peer_is_of_another_replica_and_takes_the_median_time() -> None:
    ranks = [
        rank_of(0, 9.0),
        rank_of(1, 1.2),
        rank_of(2, 1.1),
        rank_of(3, 1.0),
        rank_of(4, 1.15, pp=1),
    ]
    assert healthy_peer(ranks, 0) == 2
    assert healthy_peer(ranks, 2) == 1
    assert healthy_peer(ranks, 4) is None
    assert healthy_peer(ranks, 5) is None


def test_stopped_and_unheard_ranks_are_no_peers() -> None:
    ranks = [rank_of(0, 1.0), rank_of(1, 1.0, process_state="T"), ranks_pb2.Rank(rank=2, dp=2)]
    assert healthy_peer(ranks, 0) is None
    assert healthy_peer([*ranks, rank_of(3, 4.0)], 0) == 3


def profile_of(*weights: float) -> bytes:
    """Of a main thread that is so long in `main`, in `step`."""
    thread = {
        "name": 'Thread 1 "MainThread"',
        "samples": [[0], [0, 1]],
        "weights": weights,
    }
    frames = [{"name": "main", "file": "a.py"}, {"name": "step", "file": "b.py"}]
    document = {"shared": {"frames": frames}, "profiles": [thread]}
    found = agents_pb2.RankProfile(speedscope=gzip.compress(json.dumps(document).encode()))
    return found.SerializeToString()


def test_two_ranks_are_recorded_at_once_and_compared(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        path = f"/jobs/{job_id}/profile"
        bench.agents[0].logs, bench.agents[1].logs = profile_of(1.0, 3.0), profile_of(3.0, 1.0)
        found = await got(client, path, rank=0, seconds=1, beside=1)
        assert found["beside"] == {"rank": 1, "node": "n1", "problem": ""}
        shares = {row["name"]: (row["share"], row["beside_share"]) for row in found["functions"]}
        assert shares == {"step": (0.75, 0.25), "main": (0.25, 0.75)}
        names = [thread["name"] for thread in found["speedscope"]["profiles"]]
        assert [name.partition(":")[0] for name in names] == ["rank 0", "rank 1"]
        # What is known of the rank itself does not depend on the other one.
        problem = agents_pb2.RankProfile(problem="py-spy: no").SerializeToString()
        bench.agents[1].logs = problem
        found = await got(client, path, rank=0, seconds=1, beside=1)
        assert "py-spy: no" in found["beside"]["problem"]
        assert {row["beside_share"] for row in found["functions"]} == {None}
        for beside, status in (("0", 400), ("x", 400), ("peer", 409)):
            answer = await client.get(f"/api/v1{path}", params={"rank": 0, "beside": beside})
            assert (answer.status_code, answer.json()["error"]["fields"][0]["field"]) == (
                status,
                "beside",
            )

    run(tmp_path, scenario)
