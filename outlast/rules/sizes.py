"""Bounds on what a spec may ask for, so that a slip of a digit is found before it costs anything.

Each is far above what has been trained, and what is below them all is planned in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, shown

if TYPE_CHECKING:
    from outlast.spec import JobSpec

LARGEST = {
    "steps": 10**12,
    "model.layers": 2**17,
    "model.hidden": 2**24,
    "model.heads": 2**20,
    "model.ffn_hidden": 2**26,
    "model.head_width": 2**20,
    "model.moe.num_experts": 2**16,
    "model.moe.ffn_hidden": 2**26,
    "model.moe.shared_ffn_hidden": 2**26,
    "model.vocab_size": 2**30,
    "model.vocab_multiple": 2**20,
    "model.seq_len": 2**30,
    "parallel.pp": 2**12,
    "parallel.virtual_stages": 2**10,
    "parallel.tp_chunks": 2**16,
    "parallel.extra_warmup": 2**20,
    "data.global_batch": 2**30,
    "data.max_bytes": 2**50,
    "data.cache_bytes": 2**50,
    "optimizer.schedule.warmup_steps": 10**12,
}


def _check_size(field: str, spec: JobSpec) -> list[FieldProblem]:
    value: int | None = attrgetter(field)(spec)
    if value is None or value <= LARGEST[field]:
        return []
    return [
        FieldProblem(field=field, message=f"is {shown(value)}; allowed: at most {LARGEST[field]}")
    ]


RULES: tuple[Callable[[JobSpec], list[FieldProblem]], ...] = tuple(
    partial(_check_size, field) for field in LARGEST
)
