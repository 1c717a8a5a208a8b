"""What every benchmark writes: machine, versions, date, all rows, and claims.

A claim can be read by a program and rerun by a person: it names its baseline
and how it was measured. Absolute times mean little on shared machines; claims
are ratios and medians from one interleaved run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One measured sentence. `goal` is what it is held against, such as ">= 5"."""

    claim: str
    value: float
    unit: str
    goal: str
    baseline: str
    how: str


def write(name: str, rows: list[dict[str, Any]], claims: list[Claim]) -> Path:
    """Write bench/results/NAME.json and print the claims."""
    document = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
        },
        "versions": {
            "python": sys.version.split()[0],
            **{package: metadata.version(package) for package in ("torch", "grpcio", "outlast")},
        },
        "claims": [asdict(claim) for claim in claims],
        "rows": rows,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    for claim in claims:
        print(f"{claim.claim}: {claim.value:.3g} {claim.unit} (goal {claim.goal})")
    print(f"all rows: {path}")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
