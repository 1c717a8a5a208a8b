"""The programs of Prometheus, and a reason to skip where they are not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")

needs_prometheus = pytest.mark.skipif(
    not all(shutil.which(program) for program in PROGRAMS),
    reason="Prometheus and Alertmanager are not installed; `make test-prometheus` installs them "
    "where it can",
)


def promtool(*arguments: str, text: str = "") -> None:
    """Run promtool; fails with what it says."""
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
