"""A pipeline with a bubble that one can see: more stages than micro-batches."""

from __future__ import annotations

from typing import Any

STAGES, MICRO_BATCHES = 4, 2
# Of the time of the pipeline's ranks, in theory; Megatron-LM (2021), section 2.2.
BUBBLE = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
SPEC: dict[str, Any] = {
    "name": "piped",
    "steps": 100_000,
    "model": {"layers": STAGES, "hidden": 256, "heads": 4, "seq_len": 256},
    "parallel": {"pp": STAGES, "micro_batch": 2},
    "data": {"global_batch": 2 * MICRO_BATCHES, "max_bytes": 262144},
    "resources": {"workers_per_node": 2, "device": "cpu"},
    "recovery": {"heartbeat_period_s": 0.5, "preflight": False},
    "eval": {"interval_steps": None},
}
