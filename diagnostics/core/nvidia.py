"""What NVIDIA's driver says of its devices: `nvidia-smi -q -x` and the kernel's log.

Elements that a driver does not have are no news: old drivers call the clock
reasons otherwise, consumer cards count no ECC errors.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

from diagnostics.core.rules import xids
from diagnostics.core.rules.device_errors import DEVICE_ERRORS

_SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One device as its driver describes it."""

    index: int
    name: str
    uuid: str
    # Memory errors since the driver was loaded that could not be corrected.
    uncorrectable_errors: int
    # A row of memory is bad, and its replacement waits for a reset.
    is_remap_pending: bool
    # There was no spare row left.
    has_remap_failed: bool
    # Why the hardware itself holds the clocks down now.
    slowdowns: tuple[str, ...]


def gpus_in(document: str) -> tuple[GpuState, ...]:
    """The devices that `nvidia-smi -q -x` lists.

    Raises:
        ValueError: not such a document.
    """
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi did not print XML: {error}") from error
    return tuple(_gpu(index, found) for index, found in enumerate(root.findall("gpu")))


def xids_in(kernel_log: str) -> Iterator[tuple[str, int]]:
    """(PCI address, XID) of each error in a kernel log that speaks against a device."""
    for line in kernel_log.splitlines():
        if DEVICE_ERRORS.first(line) is None:
            continue
        found = xids.PARTS.search(line)
        if found is None:
            yield "unknown", xids.OFF_THE_BUS
        elif int(found[2]) in xids.OF_DEVICES:
            yield found[1], int(found[2])


def _gpu(index: int, found: ElementTree.Element) -> GpuState:
    volatile = found.find("ecc_errors/volatile")
    reasons = found.find("clocks_event_reasons")
    if reasons is None:
        reasons = found.find("clocks_throttle_reasons")
    return GpuState(
        index=index,
        name=_text(found, "product_name"),
        uuid=_text(found, "uuid"),
        uncorrectable_errors=_sum_of(volatile, "uncorrectable"),
        is_remap_pending=_text(found, "remapped_rows/remapped_row_pending") == "Yes",
        has_remap_failed=_text(found, "remapped_rows/remapped_row_failure") == "Yes",
        slowdowns=tuple(
            name
            for name in _SLOWDOWNS
            for reason in (reasons if reasons is not None else ())
            if reason.tag.endswith(f"_reason_{name}") and (reason.text or "").strip() == "Active"
        ),
    )


def _sum_of(volatile: ElementTree.Element | None, word: str) -> int:
    """Of every counter with this word in its name; those that are `N/A` count nothing."""
    if volatile is None:
        return 0
    texts = [(counter.text or "").strip() for counter in volatile.iter() if word in counter.tag]
    return sum(int(text) for text in texts if text.isdigit())


def _text(found: ElementTree.Element, path: str) -> str:
    return (found.findtext(path) or "").strip()
