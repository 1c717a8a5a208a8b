"""What the links of a node carry: from a heartbeat to the JSON API and the node's page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from controller.web.messages import as_json
from outlast.v1 import common_pb2, nodes_pb2
from tests.controller.fakes import DEADLINE_S, Lab
from tests.controller.processes import controller
from tests.e2e.cluster import Cluster
from tests.web.browser import Visit, browser
from tests.web.test_api import got, run

MB = 1_000_000
FINDING = "rail1 has nearly stopped (0.2 MB/s): it usually carries 400.0 MB/s"


def windows() -> list[common_pb2.LinkWindow]:
    """A port in the rhythm of its steps, and a device that has nearly stopped."""
    return [
        common_pb2.LinkWindow(
            link="mlx5_0/1",
            is_rdma=True,
            seconds=2.0,
            num_samples=400,
            received=common_pb2.LinkRates(least=0, mean=200 * MB, most=900 * MB),
            sent=common_pb2.LinkRates(least=1 * MB, mean=210 * MB, most=950 * MB),
            longest_silence_s=0.35,
            period_s=0.5,
        ),
        common_pb2.LinkWindow(
            link="rail1",
            seconds=2.0,
            num_samples=400,
            received=common_pb2.LinkRates(least=0, mean=0.1 * MB, most=0.3 * MB),
            sent=common_pb2.LinkRates(least=0, mean=0.1 * MB, most=0.3 * MB),
            longest_silence_s=12.5,
            finding=FINDING,
        ),
    ]


def test_the_api_has_what_the_newest_heartbeat_says(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        (first,) = await bench.add_agents(1)
        assert (await got(client, f"/nodes/{first.node}"))["links"] == []

        async def told(*links: common_pb2.LinkWindow) -> list[dict[str, Any]]:
            first.links = list(links)
            await first.heartbeat()
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    found = (await got(client, f"/nodes/{first.node}"))["links"]
                    if [each["link"] for each in found] == [each.link for each in links]:
                        return list(found)

        port, rail = await told(*windows())
        assert port == {
            "link": "mlx5_0/1",
            "is_rdma": True,
            "seconds": 2.0,
            "num_samples": 400,
            "received": {"least": 0.0, "mean": 200.0 * MB, "most": 900.0 * MB},
            "sent": {"least": 1.0 * MB, "mean": 210.0 * MB, "most": 950.0 * MB},
            "longest_silence_s": 0.35,
            "period_s": 0.5,
            "finding": "",
        }
        assert (rail["period_s"], rail["finding"]) == (None, FINDING)
        # A number that is none has a plausible one in its place.
        strange = common_pb2.LinkWindow(link="eth0", longest_silence_s=float("nan"))
        (found,) = await told(strange)
        assert found["longest_silence_s"] == 0.0
        # No rank runs any more.
        assert await told() == []

    run(tmp_path, scenario)


def test_the_page_of_a_node_shows_each_link(tmp_path: Path) -> None:
    options = ("--local-nodes", "1", "--workers-per-node", "1")
    with browser() as chromium, controller(tmp_path / "state", *options) as running:
        Cluster(running.state_dir, lambda: running.grpc).wait_nodes(1)
        visit = Visit(chromium, f"http://{running.http}", viewport={"width": 390, "height": 844})
        visit.open("/nodes/node-0")
        # This one is reached through loopback.
        visit.shows("Nothing is known: links are sampled while ranks run")
        links = as_json(nodes_pb2.GetNodeResponse(links=windows()))["links"]

        def with_links(route: Any) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, body=json.dumps(answer.json() | {"links": links}))

        visit.page.route("**/api/v1/nodes/node-0", with_links)
        table = visit.page.get_by_role("region", name="What its links carry")
        port = table.get_by_role("row").filter(has_text="mlx5_0/1")
        port.wait_for()
        assert port.get_by_role("cell").all_inner_texts() == [
            "mlx5_0/1 RDMA port",
            "0.00 / 200 M / 900 M",
            "1.00 M / 210 M / 950 M",
            "350 ms",
            "500 ms",
            "nothing",
        ]
        rail = table.get_by_role("row").filter(has_text="rail1 network device")
        assert FINDING in rail.inner_text()
        assert "12.5 s" in rail.inner_text()
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390
        visit.is_fit_for_all()
