"""What the JSON API says of the times that ranks have noted: heat map and timeline."""

from __future__ import annotations

from pathlib import Path

import httpx

from outlast.v1 import ranks_pb2
from tests.controller.fakes import Lab
from tests.web.test_api import got, run


def test_passes_have_names_in_a_timeline_and_a_measure_in_a_heat_map(tmp_path: Path) -> None:
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
        for measure, seconds in (("forward", 0.003), ("optimizer", 0.001), ("data", None)):
            found = await got(client, f"/jobs/{job_id}/heat-map", measure=measure)
            rows = [row["seconds"] for row in found["rows"]]
            assert rows == ([[seconds]] * 2 if seconds else [[], []])

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
        bench.agents[0].logs = times.SerializeToString()
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
        assert (found["alike"], found["layout"]) == ([], {"tp": 1, "pp": 1, "dp": 2, "ep": 1})
        assert [each["node"] for each in found["missing"]] == ["n1"]
        found = await got(client, f"/jobs/{job_id}/heat-map", measure="waiting", rows=1)
        assert found["rows"][0]["seconds"] == [0.002]

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
        bench.agents[1].logs = b"\xff of an agent that does not know of times"

        found = await got(client, f"/jobs/{job_id}/timeline")
        (track,) = found["tracks"]
        assert (found["step"], found["steps"], found["length_s"]) == (3, [3], 0.005)
        assert [(bar["name"], bar["begun_s"], bar["ended_s"]) for bar in track["bars"]] == [
            ("own work", 0, 0.003),
            ("all_reduce", 0.003, 0.005),
        ]
        assert found["layout"] == {"tp": 1, "pp": 1, "dp": 2, "ep": 1}
        only = await got(client, f"/jobs/{job_id}/timeline", step=3, first=0, most=1)
        assert only["tracks"] == found["tracks"]
        for wrong, says in (
            ("step=9", "step: is 9; known are 3 to 3"),
            ("first=2", "first: is 2; allowed: 0 to 1"),
        ):
            refused = await client.get(f"/api/v1/jobs/{job_id}/timeline?{wrong}")
            assert says in refused.json()["error"]["message"]

    run(tmp_path, scenario)
