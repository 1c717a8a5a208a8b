"""Which links an agent samples, and what it finds on real ones."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.agent.core.buffer import Weight
from controller.agent.observe import links
from controller.agent.observe.links import Link, Links, Sampler, links_of
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


def a_port(root: Path, *, words: int = 0) -> Path:
    counters = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    for file in ("port_rcv_data", "port_xmit_data"):
        (counters / file).write_text(f"{words}\n")
    return counters


def test_links_are_ports_and_hardware_that_is_up(tmp_path: Path) -> None:
    a_device(tmp_path, "lo", state="unknown")
    a_device(tmp_path, "br0", below="bridge")
    a_device(tmp_path, "bond0")
    a_device(tmp_path, "cali17")
    a_device(tmp_path, "eth1", state="down", below="device")
    a_device(tmp_path, "eth0", below="device")
    a_port(tmp_path)
    found = links_of(tmp_path)
    assert [link.name for link in found] == ["mlx5_0/1", "eth0"]
    assert [link.is_rdma for link in found] == [True, False]
    assert links_of(tmp_path / "nothing") == []


def test_a_node_without_hardware_is_a_container_with_devices_of_its_own(tmp_path: Path) -> None:
    a_device(tmp_path, "lo", state="unknown")
    a_device(tmp_path, "eth0")
    assert [link.name for link in links_of(tmp_path)] == ["eth0"]


def test_rdma_is_counted_in_words_of_four_bytes(tmp_path: Path) -> None:
    counters = a_port(tmp_path, words=1_000_000)
    with sampling(tmp_path) as sampler:
        wait_for(lambda: sampler.newest.number >= 1)
        (counters / "port_xmit_data").write_text("3000000\n")
        wait_for(lambda: sampler.newest.windows["mlx5_0/1"].sent.mean > 0)
        window = sampler.newest.windows["mlx5_0/1"]
        assert window.sent.mean * window.seconds == pytest.approx(4 * 2_000_000)
        assert window.received.most == 0
        assert window.is_rdma
        # It cannot be read any more, and later it can again.
        (counters / "port_rcv_data").write_text("\n")
        wait_for(lambda: not sampler.newest.windows)
        (counters / "port_rcv_data").write_text("1000000\n")
        wait_for(lambda: "mlx5_0/1" in sampler.newest.windows)
    assert sampler.newest.windows == {}


def test_a_device_that_goes_while_it_is_sampled_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("eth0", "eth1"):
        a_device(tmp_path, name)
    gone = threading.Event()
    read = os.pread

    def pread(file: int, length: int, offset: int) -> bytes:
        if gone.is_set() and "eth1" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENODEV, "no such device")
        return read(file, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    with sampling(tmp_path) as sampler:
        wait_for(lambda: set(sampler.newest.windows) == {"eth0", "eth1"})
        gone.set()
        wait_for(lambda: set(sampler.newest.windows) == {"eth0"})
        # In the window in which it went, what the other one carried before counts, too.
        assert sampler.newest.windows["eth0"].num_samples > 1
        gone.clear()
        wait_for(lambda: set(sampler.newest.windows) == {"eth0", "eth1"})


def test_what_ends_the_thread_is_raised_once_and_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_port(tmp_path)
    with monkeypatch.context() as patch, sampling(tmp_path / "none") as sampler:
        wait_for(lambda: sampler.newest.number >= 1)

        def broken(root: Path) -> list[Link]:
            raise LookupError("a device like no other")

        patch.setattr(links, "links_of", broken)
        wait_for(lambda: raised_by(sampler) == "a device like no other")
        patch.undo()
        number = sampler.newest.number
        wait_for(lambda: raised_by(sampler) == "" and sampler.newest.number > number)


def raised_by(sampler: Sampler) -> str:
    """What the observer would see now; "" for nothing."""
    try:
        sampler.want(True)
    except LookupError as error:
        return str(error)
    return ""


def test_the_thread_ends_at_once_though_its_window_is_not_over(tmp_path: Path) -> None:
    a_port(tmp_path)
    with sampling(tmp_path) as sampler:
        wait_for(lambda: sampler.newest.number >= 1)
        number = sampler.newest.number
        begun_s = time.monotonic()
    # Much less than a window, also where the machine is busy.
    assert sampler.newest.number <= number + 1
    assert time.monotonic() - begun_s < 1.5


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

    def __init__(self, folder: Path, count: int) -> None:
        self._space = f"ol{os.getpid()}"
        self.names = [f"ol{os.getpid()}x{number}" for number in range(count)]
        self.rates = [0.0] * count
        self.root = folder
        """Where these devices are all that /sys has."""
        self._is_over = False
        self._undo = ExitStack()
        # Other tests that run here have other ones.
        self._network = f"10.{64 + os.getpid() // 64 % 64}.{os.getpid() % 64 * 4}"

    def __enter__(self) -> Cables:
        with ExitStack() as undo:
            ip("netns", "add", self._space)
            undo.callback(ip, "netns", "del", self._space)
            shown = self.root / "sys/class/net"
            shown.mkdir(parents=True)
            for number, name in enumerate(self.names):
                far = ("peer", "name", f"far{number}", "netns", self._space)
                ip("link", "add", name, "type", "veth", *far)
                undo.callback(ip, "link", "del", name)
                ip("-n", self._space, "link", "set", f"far{number}", "up")
                ip("addr", "add", f"{self._address(number)}.1/30", "dev", name)
                ip("link", "set", name, "up")
                to = (f"{self._address(number)}.2", "lladdr", "02:00:00:00:00:01")
                ip("neigh", "add", *to, "dev", name)
                (shown / name).symlink_to(Path("/sys/class/net", name).resolve())
            thread = threading.Thread(target=self._send)
            thread.start()
            undo.callback(thread.join)
            undo.callback(self._end)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _address(self, number: int) -> str:
        first, second, third = self._network.split(".")
        return f"{first}.{second}.{int(third) + number}"

    def _end(self) -> None:
        self._is_over = True

    def _send(self) -> None:
        """A burst on each four times a second, of so many bytes per second on average."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            due_s = time.monotonic()
            while not self._is_over:
                for number, rate in enumerate(self.rates):
                    for _ in range(round(rate * 0.25 / 8192)):
                        sender.sendto(bytes(8192), (f"{self._address(number)}.2", 9))
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
@pytest.mark.timeout(180)
def test_the_rhythm_of_real_traffic_is_found(tmp_path: Path) -> None:
    with Cables(tmp_path, 1) as cables, sampling(cables.root) as sampler:
        (name,) = cables.names
        cables.rates = [8 * MB]

        def is_that_of_the_bursts() -> bool:
            window = sampler.newest.windows.get(name)
            # Headers come on top. One window may be disturbed by what else the machine does.
            return (
                window is not None
                and window.sent.mean == pytest.approx(8 * MB, rel=0.2)
                and window.sent.most > 2 * window.sent.mean
                and window.sent.least == 0
                and window.period_s == pytest.approx(0.25, abs=0.03)
                and 0.1 < window.longest_silence_s < 0.4
            )

        wait_for(is_that_of_the_bursts, within_s=120)
    assert sampler.newest.windows == {}


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.timeout(180)
def test_a_real_link_that_stops_while_others_go_on_is_told(tmp_path: Path) -> None:
    events: list[agents_pb2.AgentEvent] = []

    def emit(event: agents_pb2.AgentEvent, weight: Weight) -> None:
        assert weight is Weight.LASTING
        events.append(event)

    async def until(condition: Any) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.05)

    async def scenario(cables: Cables) -> None:
        ranks = [cast(Any, SimpleNamespace(job_id="a", attempt=1))]
        sampler = Sampler(cables.root)
        observer = Links(emit, lambda: ranks, sampler)
        task = asyncio.create_task(observer.run())
        try:
            cables.rates = [8 * MB] * 4
            # By then it knows what they usually carry.
            await until(lambda: sampler.newest.number >= 12)
            assert events == []
            cables.rates[2] = 0.0
            await until(lambda: events)
            (stopped,) = events
            assert stopped.host_sign.subject == "traffic"
            assert stopped.host_sign.what == cables.names[2]
            # On a busy machine one of them may not have kept time.
            pattern = r"and [23] links that kept time with it go on"
            assert re.search(pattern, stopped.host_sign.message)
            # The next heartbeat has it too, with what each carries.
            await until(lambda: len(observer.messages()) == 4)
            sent = {each.link: each for each in observer.messages()}
            assert sent[cables.names[2]].finding == stopped.host_sign.message
            assert sent[cables.names[1]].finding == ""
            assert sent[cables.names[1]].sent.most > sent[cables.names[1]].sent.mean > 0
            assert stopped.at_s > 0
            cables.rates[2] = 8 * MB
            await until(lambda: len(events) == 2)
            assert events[1].host_sign.message == ""
            # The job has ended: nobody samples.
            ranks.clear()
            await until(lambda: not observer.windows)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            observer.close()

    with Cables(tmp_path, 4) as cables:
        asyncio.run(scenario(cables))


def test_an_agent_on_loopback_has_no_links() -> None:
    observer = Links(lambda event, weight: None, list, None)
    assert dict(observer.windows) == {}
    observer.close()
