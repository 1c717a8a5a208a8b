"""What the JSON API says of the times that ranks have noted: heat map and timeline."""

from __future__ import annotations

from pathlib import Path

import httpx

from outlast.v1 import ranks_pb2
from tests.controller.fakes import Lab
from tests.web.test_api import got, run


def test_passes_have_names_in_a_timeline(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        times = ranks_pb2.RankTimes(
            steps=[ranks_pb2.TimedStep(step=3, start_ns=1_000_000, end_ns=6_000_000)],
            operations=[
                ranks_pb2.TimedOperation(
                    op="recv", group="pp", detail=4, start_ns=2_000_000, end_ns=3_000_000
                )
            ],
            spans=[
                ranks_pb2.TimedSpan(
                    phase="forward_backward",
                    work="forward",
                    chunk=1,
                    micro_batch=4,
                    start_ns=1_000_000,
                    end_ns=5_000_000,
                    waited_ns=1_000_000,
                ),
                ranks_pb2.TimedSpan(
                    phase="optimizer", micro_batch=-1, start_ns=5_000_000, end_ns=6_000_000
                ),
            ],
            known_since_ns=1_000_000,
        )
        bench.agents[0].logs = bench.agents[1].logs = times.SerializeToString()
        found = await got(client, f"/jobs/{job_id}/timeline", first=0, most=1, step=3)
        bars = [(bar["name"], bar["detail"], bar["chunk"]) for bar in found["tracks"][0]["bars"]]
        assert bars == [("forward", 4, 1), ("recv", 4, 0), ("forward", 4, 1), ("optimizer", -1, 0)]
        # An agent sums up what its ranks took; one that sends all is of an older version.
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="forward")
        assert (found["rows"], {each["node"] for each in found["missing"]}) == ([], {"n0", "n1"})
        assert found["missing"][0]["reason"].endswith("does not sum up steps")

    run(tmp_path, scenario)


def test_heat_map_and_timeline_are_made_of_what_ranks_have_noted(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        times = ranks_pb2.RankTimes(
            operations=[
                ranks_pb2.TimedOperation(op="all_reduce", group="dp", start_ns=0, end_ns=1_000_000),
                ranks_pb2.TimedOperation(
                    op="all_reduce", group="dp", sequence=1, start_ns=4_000_000, end_ns=6_000_000
                ),
            ],
            steps=[ranks_pb2.TimedStep(step=3, start_ns=1_000_000, end_ns=6_000_000)],
        )
        work = ranks_pb2.MeasuredSteps(steps=[3], seconds=[0.003])
        bench.agents[0].logs = ranks_pb2.RankTimes(measured=work).SerializeToString()
        bench.agents[1].logs = b"\xff of an agent that does not know of times"
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="work")
        row = {
            "first": 0,
            "last": 0,
            "ranks": [0],
            "node": "n0",
            "pp": 0,
            "slowest": 0,
            "mean_ratio": 1.0,
            "outliers": [],
            "seconds": [0.003],
            "percents": [100],
        }
        assert (found["rows"], found["steps"], found["num_ranks"]) == ([row], [3], 2)
        assert (found["alike"], found["layout"]) == (
            [],
            {"tp": 1, "pp": 1, "dp": 2, "ep": 1, "cp": 1},
        )
        assert [each["node"] for each in found["missing"]] == ["n1"]
        waiting = ranks_pb2.MeasuredSteps(steps=[3], seconds=[0.002])
        bench.agents[0].logs = ranks_pb2.RankTimes(measured=waiting).SerializeToString()
        summed_up = ranks_pb2.MeasuredSteps(steps=[8, 9], seconds=[0.1, 0.25])
        bench.agents[1].logs = ranks_pb2.RankTimes(measured=summed_up).SerializeToString()
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="waiting")
        assert found["steps"] == [3, 8, 9]
        assert [row["seconds"] for row in found["rows"]] == [[0.002, None, None], [None, 0.1, 0.25]]
        assert [row["percents"] for row in found["rows"]] == [[100, None, None], [None, 100, 100]]
        summed_up.steps[:], summed_up.seconds[:] = [3], [0.003456789]
        bench.agents[1].logs = ranks_pb2.RankTimes(measured=summed_up).SerializeToString()
        for order in ("rank", "node", "position"):
            found = await got(client, f"/jobs/{job_id}/heat-map", measure="waiting", order=order)
            assert (found["order"], [row["ranks"] for row in found["rows"]]) == (order, [[0], [1]])
        assert [row["seconds"] for row in found["rows"]] == [[0.002], [0.003457]]
        assert found["rows"][1]["percents"] == [173]
        assert found["rows"][1]["outliers"] == [[0, 1]]
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="waiting", rows=1)
        assert (found["rows"][0]["ranks"], found["rows"][0]["slowest"]) == ([0, 1], 1)
        bench.agents[0].logs = times.SerializeToString()
        bench.agents[1].logs = b"\xff of an agent that does not know of times"

        found = await got(client, f"/jobs/{job_id}/timeline")
        (track,) = found["tracks"]
        assert (found["step"], found["steps"], found["length_s"]) == (3, [3], 0.005)
        assert [(bar["name"], bar["begun_s"], bar["ended_s"]) for bar in track["bars"]] == [
            ("own work", 0, 0.003),
            ("all_reduce", 0.003, 0.005),
        ]
        assert found["layout"] == {"tp": 1, "pp": 1, "dp": 2, "ep": 1, "cp": 1}
        only = await got(client, f"/jobs/{job_id}/timeline", step=3, first=0, most=1)
        assert only["tracks"] == found["tracks"]
        for wrong, says in (
            ("step=9", "step: is 9; known are 3 to 3"),
            ("first=2", "first: is 2; allowed: 0 to 1"),
        ):
            refused = await client.get(f"/api/v1/jobs/{job_id}/timeline?{wrong}")
            assert says in refused.json()["error"]["message"]

    run(tmp_path, scenario)


def test_of_a_larger_job_one_node_in_several_is_asked(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        await bench.add_agents(6)
        job_id = await bench.start_job(parallel={"dp": 8})
        measured = ranks_pb2.MeasuredSteps(steps=[3], seconds=[0.002])
        for agent in bench.agents:
            agent.logs = ranks_pb2.RankTimes(measured=measured).SerializeToString()
        # Three of equal work at least; what the others have is not missing.
        for ranks, stride in ((1, 3), (4, 2), (8, 1), (0, 1)):
            found = await got(client, f"/jobs/{job_id}/heat-map", measure="waiting", ranks=ranks)
            assert (found["node_stride"], found["num_ranks"]) == (stride, 8)
            assert [row["first"] for row in found["rows"]] == [*range(0, 8, stride)]
            assert found["missing"] == []

    run(tmp_path, scenario)


def test_an_earlier_attempt_is_shown_with_as_many_ranks_as_it_had(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        await bench.agents[1].exit(1, 1, step=1)
        await bench.started(2)
        measured = ranks_pb2.MeasuredSteps(steps=[3], seconds=[0.25])
        times = ranks_pb2.RankTimes(measured=measured, world_size=6)
        bench.agents[0].logs = bench.agents[1].logs = times.SerializeToString()
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="step", attempt=1)
        assert (found["attempt"], found["newest_attempt"], found["num_ranks"]) == (1, 2, 6)
        assert found["layout"]["dp"] == 6
        # The others' nodes are gone, and nobody knows which those were.
        (missing,) = found["missing"]
        assert "of 4 of 6 ranks no node" in missing["reason"]
        # What a rank has written may be anything.
        for size in (0, 2**31 - 1):
            times.world_size = size
            bench.agents[0].logs = bench.agents[1].logs = times.SerializeToString()
            found = await got(client, f"/jobs/{job_id}/heat-map", measure="step", attempt=1)
            assert (found["num_ranks"], found["layout"]["dp"]) == (2, 2)
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="step", attempt=2)
        assert (found["attempt"], found["num_ranks"], found["layout"]["dp"]) == (2, 2, 2)
        answer = await client.get(f"/api/v1/jobs/{job_id}/timeline", params={"attempt": 3})
        assert answer.status_code == 400
        assert "attempt: is 3; allowed: 1 to 2, or 0" in answer.text

    run(tmp_path, scenario)


def test_of_some_ranks_of_a_job_their_nodes_alone_are_asked(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        await bench.add_agents(2)
        job_id = await bench.start_job(parallel={"dp": 4})
        times = ranks_pb2.RankTimes(
            steps=[ranks_pb2.TimedStep(step=3, start_ns=1_000_000, end_ns=6_000_000)]
        )
        for agent in bench.agents:
            agent.logs = b"\xff of an agent that does not know of times"
        nodes = (await bench.job(job_id)).nodes[1:3]
        for agent in bench.agents:
            if agent.node in nodes:
                agent.logs = times.SerializeToString()
        found = await got(client, f"/jobs/{job_id}/timeline", first=1, most=2)
        assert [track["rank"] for track in found["tracks"]] == [1, 2]
        assert (found["step"], found["missing"]) == (3, [])

    run(tmp_path, scenario)
