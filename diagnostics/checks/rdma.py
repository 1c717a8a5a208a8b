"""Each RDMA device to itself with `ib_write_bw`: the card, its slot and its port's loopback.

Both ends run on this node, so what is slow here is no cable and no switch.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from diagnostics import children
from diagnostics.checks.base import Context, Emit, SkipCheckError
from diagnostics.core.finding import Localises, Measurement
from diagnostics.core.perftest import average_gbit_per_s
from outlast.ports import free_port

_COMMAND = "ib_write_bw"
# Large messages reach the line rate; a second of them is steady.
_MESSAGE_BYTES = 8 * 2**20
_ITERATIONS = 2_000
_DEVICES = Path("/sys/class/infiniband")


def run(context: Context, emit: Emit) -> None:
    """Measure every RDMA device of this node.

    Raises:
        SkipCheckError: there is none, or perftest is not installed.
        NoDeviceError, ValueError: perftest could not use one.
    """
    devices = sorted(path.name for path in _DEVICES.glob("*"))
    if not devices:
        raise SkipCheckError(f"no RDMA device under {_DEVICES}")
    command = shutil.which(_COMMAND)
    if command is None:
        raise SkipCheckError(f"{_COMMAND} is not installed; it comes with the package perftest")
    for device in devices:
        started_s = time.monotonic()
        gbit_per_s = average_gbit_per_s(_to_itself(command, device))
        emit(
            Measurement(
                test="rdma",
                metric=f"{device}.write_bandwidth",
                value=gbit_per_s,
                unit="Gbit/s",
                localises=Localises.DEVICE,
                duration_s=time.monotonic() - started_s,
                detail=f"{_MESSAGE_BYTES >> 20} MiB writes of {device} to itself",
                baseline_key=f"rdma/{device}/{_MESSAGE_BYTES}",
            )
        )


def _to_itself(command: str, device: str) -> str:
    """What the client printed; server and client die with the check's deadline at the latest."""
    arguments = [command, "-d", device, "-s", str(_MESSAGE_BYTES), "-n", str(_ITERATIONS)]
    arguments += ["-F", "--report_gbits", "-p", str(free_port())]
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A check that is killed at its deadline takes nothing along by itself.
        preexec_fn=children.tied(),
    ) as server:
        try:
            # It says that it waits before it listens; the client tries again until it does.
            assert server.stdout is not None
            server.stdout.readline()
            return _client([*arguments, "127.0.0.1"])
        finally:
            server.kill()


def _client(arguments: list[str]) -> str:
    for _ in range(50):
        asked = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=children.tied(),
        )
        output = asked.stdout + asked.stderr
        if "Couldn't connect" not in output:
            return output
        time.sleep(0.1)
    return "the server never listened"
