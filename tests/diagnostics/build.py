"""Measurements and findings for tests, with only what a test cares about spelled out."""

from __future__ import annotations

from dataclasses import replace

from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, Localises, Measurement, ThresholdSource

KEY = "compute/cpu/512"


def measurement(value: float, **changes: object) -> Measurement:
    """A throughput of `value` GFLOP/s."""
    plain = Measurement(
        test="compute",
        metric="matmul_throughput",
        value=value,
        unit="GFLOP/s",
        localises=Localises.DEVICE,
        duration_s=0.1,
        baseline_key=KEY,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def finding(verdict: CheckVerdict, **changes: object) -> Finding:
    """A finding with `verdict`."""
    plain = Finding(
        test="compute",
        node="node-0",
        metric="matmul_throughput",
        value=80.0,
        unit="GFLOP/s",
        threshold=40.0,
        threshold_source=ThresholdSource.OWN_BASELINE,
        verdict=verdict,
        localises=Localises.DEVICE,
        detail="100% of its own median",
        duration_s=0.1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def baseline(*values: float, key: str = KEY) -> Baseline:
    """A baseline with `values` as the healthy runs under `key`."""
    return Baseline(runs={key: values})
