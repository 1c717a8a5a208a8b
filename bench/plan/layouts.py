"""The layouts that are measured: all that eight ranks can have of one small model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from outlast.problems import SpecError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

RANKS = 8
_DEGREES = (1, 2, 4, 8)
_MODEL = {
    "layers": 8,
    "hidden": 256,
    "heads": 8,
    "seq_len": 256,
    "vocab_size": 1024,
    "tied_embeddings": False,
}
_SMALL = {**_MODEL, "hidden": 32, "seq_len": 32, "vocab_size": 256}
_BATCH, _MICRO_BATCH = 16, 2
# GPipe waits as long as 1F1B, and the model is too small for what it keeps to matter.
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "virtual_stages": 2},
    {"schedule": "zb-h1"},
    {"schedule": "zb-v", "virtual_stages": 2},
)


def layouts(*, small: bool = False) -> list[JobSpec]:
    """Every mesh with each schedule that it can have."""
    model = _SMALL if small else _MODEL
    return [spec for parallel in _parallels() if (spec := _spec(model, parallel)) is not None]


def name_of(spec: JobSpec) -> str:
    """A layout in words, such as tp2 pp4 zb-h1."""
    degrees = ((axis, getattr(spec.parallel, axis)) for axis in ("tp", "cp", "pp", "dp"))
    words = [f"{axis}{size}" for axis, size in degrees if size > 1]
    return " ".join((*words, spec.parallel.schedule) if spec.parallel.pp > 1 else words)


def _parallels() -> Iterator[dict[str, Any]]:
    for tp, cp, pp, dp in product(_DEGREES, repeat=4):
        if tp * cp * pp * dp != RANKS:
            continue
        for schedule in _SCHEDULES if pp > 1 else _SCHEDULES[:1]:
            degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
            # Nothing hides where a rank's messages take its own processor.
            yield {**degrees, **schedule, "micro_batch": _MICRO_BATCH, "tp_chunks": 1}


def _spec(model: dict[str, Any], parallel: dict[str, Any]) -> JobSpec | None:
    """The job with that layout; None if it cannot have it."""
    try:
        return parse_spec(
            {
                "name": "bench-plan",
                "steps": 1000,
                "model": model,
                "parallel": parallel,
                "data": {"global_batch": _BATCH, "max_bytes": 2**20},
                "eval": {"interval_steps": None},
            }
        )
    except SpecError:
        return None
