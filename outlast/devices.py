"""What devices can do at best: the denominators of utilization.

Peaks are dense, without sparsity, in FLOP/s, from the vendors' data sheets. What a
fp32 job reaches is bounded by the fp32 figure: the trainer does not switch TF32 on.
A CPU has no entry: what it can do is measured (the matmul check), or given as a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_T = 10**12
_GB = 10**9

# What stands for the name of a device without a data sheet: its speed is what checks of its nodes
# have measured.
MEASURED = "matmul check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by the name that `outlast plan --device` takes."""

    name: str
    source: str
    peak_flops_per_s: Mapping[str, float]
    """By the precision of a job spec; one that is missing is not supported."""
    memory_bytes: int | None = None
    peer_bytes_per_s: float | None = None
    """One direction to the other devices of its node."""
    reported_as: str = ""
    """The name that CUDA has for it, without the vendor's; others differ in clocks and memory."""


def _gpu(
    name: str,
    *,
    half: float,
    single: float,
    double: float,
    memory_gb: int,
    peer_gb_per_s: float,
    reported_as: str,
    source: str,
) -> Device:
    """Peaks in TFLOP/s; bf16 and fp16 are alike on all of these."""
    peaks = {"bf16": half * _T, "fp16": half * _T, "fp32": single * _T, "fp64": double * _T}
    return Device(
        name=name,
        source=source,
        peak_flops_per_s=MappingProxyType(peaks),
        memory_bytes=memory_gb * _GB,
        peer_bytes_per_s=peer_gb_per_s * _GB,
        reported_as=reported_as,
    )


# NVLink is quoted for both directions together: half of it is one direction.
DEVICES: tuple[Device, ...] = (
    _gpu(
        "a100-40gb",
        half=312,
        single=19.5,
        double=19.5,
        memory_gb=40,
        peer_gb_per_s=300,
        reported_as="A100-SXM4-40GB",
        source="NVIDIA A100 data sheet, SXM 40 GB",
    ),
    _gpu(
        "a100-80gb",
        half=312,
        single=19.5,
        double=19.5,
        memory_gb=80,
        peer_gb_per_s=300,
        reported_as="A100-SXM4-80GB",
        source="NVIDIA A100 data sheet, SXM 80 GB",
    ),
    _gpu(
        "h100",
        half=989.4,
        single=66.9,
        double=66.9,
        memory_gb=80,
        peer_gb_per_s=450,
        reported_as="H100 80GB HBM3",
        source="NVIDIA H100 white paper, SXM5 80 GB",
    ),
    _gpu(
        "h200",
        half=989.4,
        single=66.9,
        double=66.9,
        memory_gb=141,
        peer_gb_per_s=450,
        reported_as="H200",
        source="NVIDIA H200 data sheet, SXM 141 GB",
    ),
)


def find_device(text: str) -> Device:
    """The device called `text`, or one of no name that reaches `text` FLOP/s, such as `90G`.

    Raises:
        ValueError: it is neither.
    """
    for device in DEVICES:
        if device.name == text.lower():
            return device
    try:
        peak = parse_quantity(text, "FLOP/s")
    except ValueError:
        names = ", ".join(device.name for device in DEVICES)
        raise ValueError(
            f"device {text!r} is not known; allowed: {names}, or its peak in FLOP/s, such as 312T"
        ) from None
    peaks = dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), peak)
    return Device(
        name=f"a device of {text} FLOP/s", source="given", peak_flops_per_s=MappingProxyType(peaks)
    )


def reported_device(cuda_name: str) -> Device | None:
    """The device that CUDA calls `cuda_name`; None if its peak is not known here."""
    for device in DEVICES:
        if device.reported_as and cuda_name in (device.reported_as, f"NVIDIA {device.reported_as}"):
            return device
    return None


_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kMGTP]?)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def parse_quantity(text: str, unit: str) -> float:
    """A positive number with a decimal prefix, such as `25G`; the unit may follow it.

    Raises:
        ValueError: it is something else.
    """
    found = _QUANTITY.fullmatch(text.strip().removesuffix(unit).strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not a number of {unit}, such as 25G")
    return float(found[1]) * _FACTORS[found[2]]
