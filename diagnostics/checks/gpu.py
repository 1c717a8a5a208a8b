"""What the driver says of each NVIDIA device: memory errors, remapped rows, slowdowns, XIDs.

`nvidia-smi` in a process of its own, not NVML in this one: a driver that is going
bad blocks whoever calls it, and that process can be given up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import Counter

from diagnostics import children
from diagnostics.checks.base import Context, Emit, SkipCheckError
from diagnostics.core.finding import Localises, Measurement
from diagnostics.core.nvidia import GpuState, gpus_in, xids_in

_COMMAND = "nvidia-smi"
_RECORD_BYTES = 8192


def run(context: Context, emit: Emit) -> None:
    """Emit the state of every device of this node.

    Raises:
        SkipCheckError: there is no NVIDIA driver here.
        RuntimeError: the driver does not answer as it should.
    """
    command = shutil.which(_COMMAND)
    if command is None:
        raise SkipCheckError(f"{_COMMAND} is not installed, so there is no NVIDIA driver here")
    started_s = time.monotonic()
    asked = subprocess.run(
        [command, "-q", "-x"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=children.tied(),
    )
    if asked.returncode != 0:
        said = (asked.stdout + asked.stderr).strip()
        raise RuntimeError(f"{_COMMAND} ended with code {asked.returncode}: {said[:500]}")
    gpus = gpus_in(asked.stdout)
    for measurement in measurements(gpus, time.monotonic() - started_s):
        emit(measurement)
    for address, xids in _xids_by_device().items():
        emit(
            _measurement(
                f"xid.{address}",
                float(sum(xids.values())),
                "since boot: " + ", ".join(f"{xid} ({n} times)" for xid, n in xids.items()),
                time.monotonic() - started_s,
                # The log keeps it after the device was reset and is sound again.
                bad_is_fault=False,
            )
        )


def measurements(gpus: tuple[GpuState, ...], duration_s: float) -> list[Measurement]:
    """What the states of devices come to."""
    found = [_measurement("missing", 0.0 if gpus else 1.0, f"{len(gpus)} devices", duration_s)]
    for gpu in gpus:
        what = f"{gpu.name} {gpu.uuid}".strip()
        name = f"gpu{gpu.index}"
        found += [
            _measurement(
                f"{name}.uncorrectable_errors", float(gpu.uncorrectable_errors), what, duration_s
            ),
            _measurement(f"{name}.row_remap_failed", float(gpu.has_remap_failed), what, duration_s),
            _measurement(
                f"{name}.row_remap_pending",
                float(gpu.is_remap_pending),
                f"{what}; a reset completes it",
                duration_s,
                bad_is_fault=False,
            ),
            _measurement(
                f"{name}.hardware_slowdowns",
                float(len(gpu.slowdowns)),
                "; ".join((what, *gpu.slowdowns)),
                duration_s,
            ),
        ]
    return found


def _measurement(
    metric: str, value: float, detail: str, duration_s: float, *, bad_is_fault: bool = True
) -> Measurement:
    return Measurement(
        test="gpu",
        metric=metric,
        value=value,
        unit="",
        localises=Localises.DEVICE,
        duration_s=duration_s,
        detail=detail,
        at_most=0.0,
        bad_is_fault=bad_is_fault,
    )


def _xids_by_device() -> dict[str, Counter[int]]:
    """From the kernel's log, as far as this process may read it."""
    records = []
    # Not readable without privileges; overwritten records (EPIPE) and the end (EAGAIN) end it.
    with contextlib.suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.closing(os.fdopen(log, "rb", buffering=0)) as file:
            while record := file.read(_RECORD_BYTES):
                records.append(record.decode(errors="replace"))
    found: dict[str, Counter[int]] = {}
    for address, xid in xids_in("\n".join(records)):
        found.setdefault(address, Counter())[xid] += 1
    return found
