"""Links of the node: network devices, and RDMA ports where there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from controller.families import Counter, Family, Gauge
from diagnostics.core.traffic import Window

BYTES = Counter(
    "outlast_nic_bytes_total", "Bytes that went through a network device", ("device", "direction")
)
ERRORS = Counter(
    "outlast_nic_errors_total", "Packets with errors, and dropped ones", ("device", "kind")
)
DOWN = Counter("outlast_nic_link_down_events_total", "Times that its link went down", ("device",))
RDMA_BYTES = Counter(
    "outlast_rdma_bytes_total",
    "Bytes that went through an RDMA port",
    ("device", "port", "direction"),
)
RDMA_ERRORS = Counter(
    "outlast_rdma_errors_total",
    "Link losses and symbol errors of an RDMA port",
    ("device", "port", "kind"),
)
RATE = Gauge(
    "outlast_link_window_bytes_per_second",
    "What a link carried in the last 2 seconds while ranks run, sampled every 1 to 10 ms, less "
    "often where that costs over a hundredth of a core: the least and the most of a sample, and "
    "the mean",
    ("link", "direction", "of"),
)
SILENCE = Gauge(
    "outlast_link_longest_silence_seconds",
    "The longest time up to their end or within them, in steps of 50 ms, in which it carried less "
    "than 1 MB/s; it may have begun before",
    ("link",),
)
PERIOD = Gauge(
    "outlast_link_period_seconds",
    "After which its traffic of the last 30 seconds comes again, up to 10 s; absent without a "
    "rhythm",
    ("link",),
)
FAMILIES: tuple[Family, ...] = (
    *(BYTES, ERRORS, DOWN, RDMA_BYTES, RDMA_ERRORS),
    *(RATE, SILENCE, PERIOD),
)

# The kernel counts RDMA data in words of four bytes.
_RDMA_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One line of /proc/net/dev."""

    name: str
    received_bytes: int
    sent_bytes: int
    errors: int
    dropped: int


def collect(root: Path, windows: Mapping[str, Window]) -> Iterator[Metric]:
    """The families of this subject; `root` is where /proc and /sys are, `windows` are of links."""
    devices = device_lines((root / "proc/net/dev").read_text(encoding="ascii"))
    yield BYTES.of(
        ((device.name, direction), value)
        for device in devices
        for direction, value in (("received", device.received_bytes), ("sent", device.sent_bytes))
    )
    yield ERRORS.of(
        ((device.name, kind), value)
        for device in devices
        for kind, value in (("error", device.errors), ("dropped", device.dropped))
    )
    downs = [
        (d.name, _number(root / "sys/class/net" / d.name / "carrier_down_count")) for d in devices
    ]
    yield DOWN.of(((name,), count) for name, count in downs if count is not None)
    yield from _rdma(root / "sys/class/infiniband")
    yield from _sampled(windows)


def _sampled(windows: Mapping[str, Window]) -> Iterator[Metric]:
    directions = [
        (link, direction, rates)
        for link, window in windows.items()
        for direction, rates in (("received", window.received), ("sent", window.sent))
    ]
    yield RATE.of(
        ((link, direction, of), value)
        for link, direction, rates in directions
        for of, value in (("least", rates.least), ("mean", rates.mean), ("most", rates.most))
    )
    yield SILENCE.of(((link,), window.longest_silence_s) for link, window in windows.items())
    yield PERIOD.of(
        ((link,), window.period_s)
        for link, window in windows.items()
        if window.period_s is not None
    )


def device_lines(text: str) -> list[Device]:
    """Devices that were ever used, from the text of /proc/net/dev."""
    devices = []
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        received, _, bad_in, dropped_in, *_, sent, _, bad_out, dropped_out = (
            int(value) for value in rest.split()[:12]
        )
        if received or sent:
            devices.append(
                Device(
                    name=name.strip(),
                    received_bytes=received,
                    sent_bytes=sent,
                    errors=bad_in + bad_out,
                    dropped=dropped_in + dropped_out,
                )
            )
    return devices


def _rdma(folder: Path) -> Iterator[Metric]:
    ports = [
        (port.parent.parent.name, port.name, port / "counters")
        for port in sorted(folder.glob("*/ports/*"))
    ]
    yield RDMA_BYTES.of(
        ((device, port, direction), words * _RDMA_WORD_BYTES)
        for device, port, counters in ports
        for direction, file in (("received", "port_rcv_data"), ("sent", "port_xmit_data"))
        if (words := _number(counters / file)) is not None
    )
    yield RDMA_ERRORS.of(
        ((device, port, kind), count)
        for device, port, counters in ports
        for kind, file in (("link_down", "link_downed"), ("symbol", "symbol_error"))
        if (count := _number(counters / file)) is not None
    )


def _number(path: Path) -> int | None:
    """The number in a file of /sys; None where there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
