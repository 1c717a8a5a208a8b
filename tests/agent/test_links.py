"""Which links an agent samples, and what it finds on real ones."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from controller.agent.core.buffer import Weight
from controller.agent.observe.links import Links, Sampler, links_of
from outlast.v1 import agents_pb2
from tests.netns.fleet import why_not

MB = 1_000_000


def a_device(root: Path, name: str, *, state: str = "up", below: str = "") -> None:
    device = root / "sys/class/net" / name
    (device / "statistics").mkdir(parents=True)
    for file in ("rx_bytes", "tx_bytes"):
        (device / "statistics" / file).write_text("0\n")
    (device / "operstate").write_text(f"{state}\n")
    if below:
        (device / below).mkdir()


def test_links_are_those_that_are_up_and_lead_elsewhere(tmp_path: Path) -> None:
    a_device(tmp_path, "lo", state="unknown")
    a_device(tmp_path, "br0", below="bridge")
    a_device(tmp_path, "eth1", state="down", below="device")
    a_device(tmp_path, "eth0", below="device")
    a_device(tmp_path, "cali17")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    found = links_of(tmp_path)
    # Hardware first.
    assert [link.name for link in found] == ["mlx5_0/1", "eth0", "cali17"]
    assert [link.unit_bytes for link in found] == [4, 1, 1]
    assert links_of(tmp_path / "nothing") == []


def test_rdma_is_counted_in_words_of_four_bytes(tmp_path: Path) -> None:
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    for file in ("port_rcv_data", "port_xmit_data"):
        (counters / file).write_text("1000000\n")
    with sampling(tmp_path) as sampler:
        wait_for(lambda: sampler.num_windows >= 1)
        (counters / "port_xmit_data").write_text("2000000\n")
        number = sampler.num_windows
        wait_for(lambda: sampler.num_windows >= number + 2)
        # The device goes, and comes back.
        (counters / "port_rcv_data").write_text("\n")
        wait_for(lambda: not sampler.windows)
    assert sampler.windows == {}


@contextmanager
def sampling(root: Path = Path("/")) -> Iterator[Sampler]:
    sampler = Sampler(root)
    sampler.want(True)
    try:
        yield sampler
    finally:
        sampler.close()


def wait_for(condition: Any, within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "not within its time"
        time.sleep(0.02)


class Cables:
    """Pairs of virtual devices, one end of each in a network namespace of their own."""

    def __init__(self, count: int) -> None:
        self._space = f"ol{os.getpid()}"
        self.names = [f"ol{os.getpid()}x{number}" for number in range(count)]
        self.rates = [0.0] * count
        self._is_over = False

    def __enter__(self) -> Cables:
        ip("netns", "add", self._space)
        for number, name in enumerate(self.names):
            ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", self._space)
            ip("-n", self._space, "link", "set", "far", "name", f"far{number}", "up")
            ip("addr", "add", f"10.231.{100 + number}.1/24", "dev", name)
            ip("link", "set", name, "up")
            far = f"10.231.{100 + number}.2"
            ip("neigh", "add", far, "lladdr", "02:00:00:00:00:01", "dev", name)
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        for name in self.names:
            ip("link", "del", name)
        ip("netns", "del", self._space)

    def _send(self) -> None:
        """A burst on each four times a second, of so many bytes per second on average."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            due_s = time.monotonic()
            while not self._is_over:
                for number, rate in enumerate(self.rates):
                    for _ in range(round(rate * 0.25 / 8192)):
                        sender.sendto(bytes(8192), (f"10.231.{100 + number}.2", 9))
                due_s += 0.25
                time.sleep(max(0.0, due_s - time.monotonic()))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def needs_namespaces() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_namespaces")
def test_the_rhythm_of_real_traffic_is_found() -> None:
    with Cables(1) as cables, sampling() as sampler:
        (name,) = cables.names
        cables.rates = [8 * MB]
        wait_for(lambda: sampler.num_windows >= 1)
        wait_for(lambda: name in sampler.windows and sampler.windows[name].period_s is not None)
        number = sampler.num_windows
        wait_for(lambda: sampler.num_windows >= number + 3)
        window = sampler.windows[name]
    # Headers come on top.
    assert window.sent.mean == pytest.approx(8 * MB, rel=0.3)
    assert window.sent.most > 2 * window.sent.mean
    assert window.sent.least == 0
    assert window.period_s == pytest.approx(0.25, abs=0.03)
    # Of a quarter of a second, but for the burst; more where the sender was not run.
    assert 0.1 < window.longest_silence_s < 1.0
    assert sampler.windows == {} or sampler.cost < 0.05


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.timeout(120)
def test_a_real_link_that_stops_while_others_go_on_is_told() -> None:
    events: list[agents_pb2.AgentEvent] = []

    def emit(event: agents_pb2.AgentEvent, weight: Weight) -> None:
        assert weight is Weight.LASTING
        events.append(event)

    async def scenario() -> None:
        ranks = [cast(Any, object())]
        sampler = Sampler()
        links = Links(emit, lambda: ranks, sampler)
        task = asyncio.create_task(links.run())
        with Cables(4) as cables:
            cables.rates = [8 * MB] * 4
            # By now it knows what they usually carry.
            while sampler.num_windows < 7:
                await asyncio.sleep(0.05)
            assert events == []
            cables.rates[2] = 0.0
            while not events:
                await asyncio.sleep(0.05)
            (stopped,) = events
            assert stopped.host_sign.subject == "traffic"
            assert stopped.host_sign.what == cables.names[2]
            assert "while 3 links that carried as much go on" in stopped.host_sign.message
            assert stopped.at_s > 0
            # The job has ended: nothing is said of a link that nobody uses.
            ranks.clear()
            while len(events) < 2:
                await asyncio.sleep(0.05)
        assert (events[1].host_sign.what, events[1].host_sign.message) == (cables.names[2], "")
        assert dict(links.windows) == {}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        links.close()

    asyncio.run(scenario())


def test_an_agent_on_loopback_has_no_links() -> None:
    links = Links(lambda event, weight: None, list, None)
    assert dict(links.windows) == {}
    links.close()
