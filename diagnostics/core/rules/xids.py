"""Numbers of the errors that NVIDIA's driver writes to the kernel's log.

Source: NVIDIA's XID catalogue (2025-10) for which errors speak against the device
itself rather than the program on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What a program did wrong.
OF_PROGRAMS = frozenset({8, 13, 31, 32, 39, 68, 69, 80})
# The driver cleans up after another error, or tells of one that was corrected.
FOLLOWING = frozenset({37, 38, 43, 44, 45, 66, 92, 121, 137})
OF_MEMORY = frozenset({48, 63, 64, 94, 95, 140, 156, 171, 172})
OF_NVLINK = frozenset({74, *range(144, 151)})
OFF_THE_BUS = 79
# Errors after which NVIDIA wants the device reset, drained or looked at.
OF_DEVICES = (
    OF_MEMORY | OF_NVLINK | {46, 54, 62, OFF_THE_BUS, 109, 110, 119, 120, 136, 143, 151, 155, 158}
)
# PCI address and number.
PARTS = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\).*?: (\d+),")


def line_of(numbers: Iterable[int]) -> re.Pattern[str]:
    """Lines of the driver with one of these numbers."""
    listed = "|".join(map(str, sorted(numbers)))
    return re.compile(rf"NVRM: Xid \((?:PCI:)?[0-9a-fA-F:.]+\).*?: (?:{listed}),")
