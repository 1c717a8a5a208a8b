"""What the machine is, and what its own counters say: memory errors, links, ports.

Reads `/proc` and `/sys` only, so it takes milliseconds and disturbs nobody. That
a counter rose is a warning: it points at a part that may fail next, and proves
nothing about the fault at hand. A memory error that could not be corrected is a
fault, and so is a port that is down and was up at an earlier check; one that never
was may have no cable.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from diagnostics.checks.base import Context, Emit
from diagnostics.core.counters import Snapshot, risen
from diagnostics.core.finding import Localises, Measurement

# Errors an hour that a healthy InfiniBand port may show (NVSentinel's limit).
MAX_SYMBOL_ERRORS_PER_H = 120.0
_ACTIVE_PORT = "ACTIVE"
_NET_COUNTERS = ("statistics/rx_errors", "statistics/tx_errors", "carrier_down_count")
_PORT_COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors")


def run(context: Context, emit: Emit, *, root: Path = Path("/")) -> None:
    """Emit facts and counters found under `root`."""
    started_s = time.monotonic()
    for name, value, unit, detail in _facts(root):
        emit(_measurement(name, value, unit, detail, started_s))
    before = _load(context.counters_file)
    used = () if before is None else before.used_ports
    ports = dict(_ports(root))
    for port, state in ports.items():
        emit(
            _measurement(
                f"{port}.down",
                0.0 if _ACTIVE_PORT in state else 1.0,
                "",
                f"the port says {state}" + ("" if port in used else ", and was never seen active"),
                started_s,
                at_most=0.0,
                bad_is_fault=port in used,
                localises=Localises.LINK,
            )
        )
    active = [port for port, state in ports.items() if _ACTIVE_PORT in state]
    now = Snapshot(
        boot_id=_read(root / "proc/sys/kernel/random/boot_id"),
        at_s=time.time(),
        counters=dict(_counters(root)),
        used_ports=tuple(dict.fromkeys((*used, *active))),
    )
    for measurement in _movements(before, now, started_s):
        emit(measurement)
    _save(context.counters_file, now)


def _facts(root: Path) -> Iterator[tuple[str, float, str, str]]:
    cpus = len(os.sched_getaffinity(0))
    kernel = _read(root / "proc/sys/kernel/osrelease")
    yield "cpus", float(cpus), "", f"usable here, of {os.cpu_count()}; kernel {kernel}"
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            yield "memory", int(line.split()[1]) / 2**20, "GiB", ""


def _ports(root: Path) -> Iterator[tuple[str, str]]:
    """Ports of RDMA devices with their state, such as `4: ACTIVE`."""
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        yield f"{port.parent.parent.name}.{port.name}", _read(port / "state") or "nothing"


def _counters(root: Path) -> Iterator[tuple[str, int]]:
    for folder in sorted(root.glob("sys/devices/system/edac/mc/mc*")):
        for name in ("ce_count", "ue_count"):
            yield from _one_counter(f"edac.{folder.name}.{name}", folder / name)
    for folder in sorted(root.glob("sys/class/net/*")):
        if folder.name == "lo":
            continue
        for name in _NET_COUNTERS:
            short = name.rpartition("/")[2]
            yield from _one_counter(f"net.{folder.name}.{short}", folder / name)
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        for name in _PORT_COUNTERS:
            device = folder.parent.parent.name
            path = folder / "counters" / name
            yield from _one_counter(f"rdma.{device}.{folder.name}.{name}", path)


def _one_counter(name: str, path: Path) -> Iterator[tuple[str, int]]:
    text = _read(path)
    # A driver that does not count says so with an empty or odd file.
    if text.isdigit():
        yield name, int(text)


def _movements(before: Snapshot | None, now: Snapshot, started_s: float) -> Iterator[Measurement]:
    """Each counter that rose since the last check, and one line for all that did not."""
    hours = 0.0 if before is None else max(now.at_s - before.at_s, 1.0) / 3600
    num_still = 0
    for name, total in now.counters.items():
        localises = Localises.NODE if name.startswith("edac.") else Localises.LINK
        rise = risen(before, now, name)
        if name.endswith(".ue_count") and total:
            # One since boot is one too many.
            yield _measurement(name, float(total), "errors", "since boot", started_s, at_most=0.0)
        elif rise:
            allowed = MAX_SYMBOL_ERRORS_PER_H * max(hours, 1.0)
            yield _measurement(
                f"{name}.rise",
                float(rise),
                "",
                f"{total} since boot, last check {hours:.2g} h ago",
                started_s,
                at_most=allowed if name.endswith(".symbol_error") else 0.0,
                bad_is_fault=False,
                localises=localises,
            )
        else:
            num_still += 1
    since = f"since the last check {hours:.2g} h ago" if hours else "this is the first check"
    yield _measurement(
        "counters_at_rest", float(num_still), "", f"of {len(now.counters)}; {since}", started_s
    )


def _measurement(
    metric: str,
    value: float,
    unit: str,
    detail: str,
    started_s: float,
    *,
    at_most: float | None = None,
    bad_is_fault: bool = True,
    localises: Localises = Localises.NODE,
) -> Measurement:
    return Measurement(
        test="inventory",
        metric=metric,
        value=value,
        unit=unit,
        localises=localises,
        duration_s=time.monotonic() - started_s,
        detail=detail,
        at_most=at_most,
        bad_is_fault=bad_is_fault,
    )


def _read(path: Path) -> str:
    """A small file of the kernel's; "" where there is none or it refuses to be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _load(path: Path) -> Snapshot | None:
    try:
        return Snapshot.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        print(f"counters file {path} cannot be used: {error}; starting anew", file=sys.stderr)
        return None


def _save(path: Path, snapshot: Snapshot) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(snapshot.to_json(), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        print(f"counters file {path} cannot be written: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
