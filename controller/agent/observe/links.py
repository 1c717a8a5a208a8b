"""Samples what the node's links carry, many times a second, while ranks run.

A thread reads the kernel's counters of bytes: of network devices, and of RDMA ports, whose traffic
passes the devices by. It takes at most a hundredth of a core: where reading costs more, it reads
less often. What it finds is summed up and judged in `diagnostics.core.traffic`.

What does not belong here: an agent that is reached through the loopback interface has no link.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.agent.core.buffer import Weight
from controller.agent.core.reports import AttemptKey
from controller.agent.workers.worker import Worker
from diagnostics.core.host import Change
from diagnostics.core.sampling_pace import SamplingPace
from diagnostics.core.traffic import WINDOW_S, LinkWatch, Rates, Sampled, Window
from outlast.clock import node_time_s
from outlast.v1 import agents_pb2, common_pb2

MAX_LINKS = 32
# After so many windows new devices are looked for.
_WINDOWS_OF_LINKS = 5
# The thread looks with each sample whether it is to end.
_END_S = 1.0
# The kernel counts RDMA data in words of four bytes.
_RDMA_WORD_BYTES = 4
_NUMBER_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where the kernel counts what went through."""

    name: str
    received: Path
    sent: Path
    is_rdma: bool = False


def links_of(root: Path) -> list[Link]:
    """RDMA ports and network hardware that is up; `root` is where /sys is.

    Other devices are those of containers, or lie over these and count the same once more. A node
    without hardware is itself a container: its devices are links, but for loopback and bridges.
    """
    ports = [
        Link(
            name=f"{port.parent.parent.name}/{port.name}",
            received=port / "counters/port_rcv_data",
            sent=port / "counters/port_xmit_data",
            is_rdma=True,
        )
        for device in _entries(root / "sys/class/infiniband")
        for port in _entries(device / "ports")
    ]
    devices = [
        device
        for device in _entries(root / "sys/class/net")
        if device.name != "lo" and not (device / "bridge").exists() and _is_up(device)
    ]
    hardware = [device for device in devices if (device / "device").exists()]
    return [*ports, *map(_link, hardware or devices)][:MAX_LINKS]


def _link(device: Path) -> Link:
    return Link(
        name=device.name,
        received=device / "statistics/rx_bytes",
        sent=device / "statistics/tx_bytes",
    )


class _OpenLink:
    """A link whose counters are read again and again."""

    def __init__(self, link: Link) -> None:
        self.link = link
        with contextlib.ExitStack() as opened:
            received = os.open(link.received, os.O_RDONLY)
            opened.callback(os.close, received)
            sent = os.open(link.sent, os.O_RDONLY)
            opened.callback(os.close, sent)
            self.counters = (received, sent)
            """Descriptors of the files in which the kernel counts."""
            self._unit_bytes = _RDMA_WORD_BYTES if link.is_rdma else 1
            before, before_sent = self._bytes(self._read())
            self.sampled = Sampled(time.monotonic(), before, before_sent, is_rdma=link.is_rdma)
            self._files = opened.pop_all()

    def add(self, at_s: Sequence[float], received: Sequence[bytes], sent: Sequence[bytes]) -> None:
        """What its counters said at these times.

        Raises:
            OSError: the device is gone.
            ValueError: a counter is no number.
        """
        self.sampled.add(at_s, self._bytes(received), self._bytes(sent))
        # Whoever has read the samples does not know which of all devices has failed.
        self._read()

    def _read(self) -> list[bytes]:
        return [os.pread(counter, _NUMBER_BYTES, 0) for counter in self.counters]

    def _bytes(self, texts: Sequence[bytes]) -> list[int]:
        return [int(text) * self._unit_bytes for text in texts]

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the sampler has found last."""

    number: int = 0
    """How many windows there have been."""
    windows: Mapping[str, Window] = field(default_factory=dict)
    """The newest of each link."""
    cost: float = 0.0
    """Share of a core that it took."""


class Sampler:
    """Reads the counters in a thread of its own, while it is wanted."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._is_wanted = threading.Event()
        self._is_sampling = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._links: dict[str, _OpenLink] = {}
        self._pace = SamplingPace()
        self.newest = Sampling()
        """Replaced as a whole by the thread."""

    def want(self, is_wanted: bool) -> None:
        """Go on sampling, or rest.

        Raises:
            Exception: what has ended the thread; the next call begins another.
            RuntimeError: the kernel gives this process no more threads.
        """
        if self._failure is not None:
            failure, self._failure, self._thread = self._failure, None, None
            raise failure
        self._is_sampling = is_wanted and not self._is_over
        if not is_wanted:
            self._is_wanted.clear()
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="links", daemon=True)
            thread.start()
            self._thread = thread
        self._is_wanted.set()

    def close(self) -> None:
        """End the thread; one that a device's driver keeps ends with the process."""
        self._is_over, self._is_sampling = True, False
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            while not self._is_over:
                if not self._is_wanted.is_set():
                    self._let_go()
                    self._is_wanted.wait()
                    continue
                self._sample_window()
        except Exception as error:  # noqa: BLE001  # the observer's mistake, and noted there
            self._failure = error
        finally:
            self._let_go()

    def _open_new(self) -> None:
        """Devices come and go; what cannot be read is left out."""
        for link in links_of(self._root):
            if link.name not in self._links:
                with contextlib.suppress(OSError, ValueError):
                    self._links[link.name] = _OpenLink(link)

    def _sample_window(self) -> None:
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        sampling_s, num_samples = 0.0, 0
        number = self.newest.number + 1
        if not self._links or number % _WINDOWS_OF_LINKS == 0:
            self._open_new()
        end_s = time.monotonic() + WINDOW_S
        while self._is_sampling and time.monotonic() < end_s:
            cpu_s = time.thread_time()
            at_s, samples = self._samples_until(end_s)
            sampling_s += time.thread_time() - cpu_s
            num_samples += len(samples)
            self._add(at_s, samples)
            if not samples:
                # Of a device that fails now and then the next read may succeed.
                time.sleep(self._pace.interval_s)
        if not self._is_sampling:
            return
        cut = {name: link.sampled.cut() for name, link in self._links.items()}
        took_s, seconds = time.thread_time() - begun_cpu_s, time.monotonic() - begun_s
        self.newest = Sampling(
            number=number,
            windows={name: window for name, window in cut.items() if window is not None},
            cost=took_s / seconds,
        )
        self._pace.took(
            sampling_s=sampling_s,
            num_samples=num_samples,
            rest_s=took_s - sampling_s,
            seconds=seconds,
        )

    def _add(self, at_s: Sequence[float], samples: Sequence[Sequence[bytes]]) -> None:
        """Share samples out among the links; one that cannot be read is closed."""
        texts = list(zip(*samples, strict=True)) or [()] * (2 * len(self._links))
        counters = zip(texts[::2], texts[1::2], strict=True)
        for link, (received, sent) in zip(list(self._links.values()), counters, strict=True):
            try:
                link.add(at_s, received, sent)
            except (OSError, ValueError):
                self._links.pop(link.link.name).close()

    def _samples_until(self, end_s: float) -> tuple[list[float], list[list[bytes]]]:
        """When the counters were read, and what all of them said; until a device is gone.

        After a sleep the processor's caches have gone cold, and each line costs many times what it
        does in a loop that is warm: only what has to be done now is done here.
        """
        counters = [counter for link in self._links.values() for counter in link.counters]
        at_s: list[float] = []
        samples: list[list[bytes]] = []
        monotonic, pread, sleep = time.monotonic, os.pread, time.sleep
        interval = self._pace.interval_s
        with contextlib.suppress(OSError):
            while (now_s := monotonic()) < end_s and self._is_sampling:
                samples.append([pread(counter, _NUMBER_BYTES, 0) for counter in counters])
                at_s.append(now_s)
                sleep(interval)
        return at_s, samples

    def _let_go(self) -> None:
        self.newest = Sampling(number=self.newest.number)
        for link in self._links.values():
            link.close()
        self._links.clear()


class Links:
    """The links of one agent's node: sampled while ranks run, and what is odd about them."""

    def __init__(
        self,
        emit: Callable[[agents_pb2.AgentEvent, Weight], None],
        running: Callable[[], Sequence[Worker]],
        sampler: Sampler | None,
    ) -> None:
        """`running` says which ranks run; without a sampler there is no link."""
        self._emit = emit
        self._running = running
        self._sampler = sampler
        self._watch = LinkWatch()
        self._attempts: frozenset[AttemptKey] = frozenset()
        self._num_seen = 0

    @property
    def windows(self) -> Mapping[str, Window]:
        """The newest of each link; none while no rank runs."""
        return {} if self._sampler is None else self._sampler.newest.windows

    def messages(self) -> list[common_pb2.LinkWindow]:
        """The same for heartbeats, with what is wrong with each."""
        return [
            common_pb2.LinkWindow(
                link=name,
                is_rdma=window.is_rdma,
                seconds=window.seconds,
                num_samples=window.num_samples,
                received=_rates(window.received),
                sent=_rates(window.sent),
                longest_silence_s=window.longest_silence_s,
                period_s=window.period_s,
                finding=self._watch.findings.get(name, ""),
            )
            for name, window in self.windows.items()
        ]

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            if self._sampler is not None:
                self._look(self._sampler)
            await asyncio.sleep(WINDOW_S / 4)

    def close(self) -> None:
        """End the thread."""
        if self._sampler is not None:
            self._sampler.close()

    def _look(self, sampler: Sampler) -> None:
        """Take in a new window, if there is one."""
        attempts = frozenset(
            AttemptKey(worker.job_id, worker.attempt) for worker in self._running()
        )
        if attempts != self._attempts:
            # Another layout carries something else; its notes ended with the attempt.
            self._watch = LinkWatch()
            self._attempts = attempts
        sampler.want(bool(attempts))
        newest = sampler.newest
        if attempts and newest.windows and newest.number != self._num_seen:
            self._num_seen = newest.number
            for change in self._watch.take(newest.windows):
                self._emit(_event(change), Weight.LASTING)


def _rates(rates: Rates) -> common_pb2.LinkRates:
    return common_pb2.LinkRates(least=rates.least, mean=rates.mean, most=rates.most)


def _event(change: Change) -> agents_pb2.AgentEvent:
    sign = agents_pb2.HostSign(subject=change.subject, what=change.what, message=change.message)
    return agents_pb2.AgentEvent(at_s=node_time_s(), host_sign=sign)


def _is_up(device: Path) -> bool:
    try:
        # Some virtual devices do not know whether they are up.
        return (device / "operstate").read_text(encoding="ascii").strip() in ("up", "unknown")
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return
