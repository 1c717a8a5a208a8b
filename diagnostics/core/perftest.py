"""Reads what `ib_write_bw` (perftest) prints; its JSON is broken in older releases."""

from __future__ import annotations

_NO_DEVICE = "Unable to find the Infiniband/RoCE device"
_HEADER = "BW average[Gb/sec]"


class NoDeviceError(Exception):
    """perftest sees no RDMA device."""


def average_gbit_per_s(output: str) -> float:
    """The average bandwidth of a run with `--report_gbits`, in Gbit/s.

    Raises:
        NoDeviceError: there is no RDMA device, or not the one asked for.
        ValueError: no result in it; the text is its last line.
    """
    if _NO_DEVICE in output:
        raise NoDeviceError("ib_write_bw: unable to find the Infiniband/RoCE device")
    lines = [line for line in output.splitlines() if line.strip()]
    for place, line in enumerate(lines[:-1]):
        if _HEADER in line:
            # #bytes, #iterations, peak, average, message rate
            cells = lines[place + 1].split()
            if len(cells) >= 4:
                return float(cells[3])
    last = lines[-1].strip() if lines else "nothing"
    raise ValueError(f"ib_write_bw gave no result; it printed: {last}")
