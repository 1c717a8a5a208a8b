"""The table of lines in the kernel's log that a check of the devices counts against them."""

from __future__ import annotations

import re

from diagnostics.core.rules import xids
from diagnostics.core.rules.table import Rule, Table

DEVICE_ERRORS = Table(
    name="device errors",
    version=1,
    rules=(
        Rule(
            name="xid of a device",
            pattern=xids.line_of(xids.OF_DEVICES),
            means=None,
            matches=(
                "NVRM: Xid (PCI:0000:3b:00): 95, pid=1234, Uncontained ECC error",
                "NVRM: Xid (PCI:0000:19:00): 79, pid=1234, GPU has fallen off the bus.",
            ),
            misses=(
                "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, MMU Fault",
                "NVRM: Xid (PCI:0000:3b:00): 92, High single-bit ECC error rate",
            ),
        ),
        Rule(
            name="off the bus",
            # One with a number that can be read is known by that.
            pattern=re.compile(
                r"^(?!.*NVRM: Xid \((?:PCI:)?[0-9a-fA-F:.]+\).*?: \d+,).*GPU has fallen off the bus"
            ),
            means=None,
            matches=(
                "NVRM: GPU 0000:19:00.0: GPU has fallen off the bus.",
                "NVRM: Xid (PCI:0000:41:00 GPU-I:05): 79, GPU has fallen off the bus.",
            ),
            misses=(
                "NVRM: Xid (PCI:0000:19:00): 79, pid=1234, GPU has fallen off the bus.",
                "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
            ),
        ),
    ),
)
