"""A job spec for agents that may be of the previous release.

The controller keeps every spec with all defaults filled in, and a parser refuses fields that it
does not know. So of fields that came after that release, agents are given only those that are not
as they are without: a job that uses nothing new runs on both, and one that does is refused by the
older agent, which names the field.

Fields of that release are always given: a default that has changed since changes no job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from outlast.spec.models import JobSpec

# Of 0.1.0, by the section that they are in. `parallel.zero` was a number then: it is another field.
KNOWN: Mapping[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "": "apiVersion kind name steps seed precision determinism model parallel data optimizer "
        "checkpoint resources recovery eval",
        "model": "layers hidden heads ffn_hidden vocab_size seq_len tied_embeddings norm_eps "
        "init_std",
        "parallel": "tp pp dp sequence_parallel virtual_stages micro_batch schedule",
        "data": "source tokenizer global_batch max_bytes validation_fraction",
        "optimizer": "name lr beta1 beta2 eps weight_decay clip_grad_norm schedule",
        "optimizer.schedule": "name warmup_steps min_ratio",
        "checkpoint": "memory_interval_steps storage_interval_steps keep url upload_timeout_s",
        "resources": "nodes workers_per_node standby device",
        "recovery": "heartbeat_period_s heartbeat_late_s heartbeat_lost_s heartbeat_silent_s "
        "hang_timeout_s first_step_timeout_s stop_timeout_s preflight_timeout_s "
        "diagnose_timeout_s retry_budget ladder in_place_restarts controller_absence_limit_s",
        "eval": "interval_steps batches",
    }.items()
}


@lru_cache(maxsize=64)
def for_agents(spec_json: str) -> str:
    """A spec with what agents of either release need of it; it reads as the given one does."""
    document = json.loads(spec_json)
    if document.get("model", {}).get("preset") is not None:
        # Without a field, the preset's value would count.
        return spec_json
    if document.get("workload", {}).get("command") is not None:
        # That release runs no scripts, and the package in a script's image reads what is there.
        return spec_json
    return json.dumps(_needed(document, _defaults(), ""), sort_keys=True)


def _needed(section: Mapping[str, Any], defaults: Mapping[str, Any], within: str) -> dict[str, Any]:
    needed = {}
    for name, value in section.items():
        path = f"{within}.{name}" if within else name
        if path in KNOWN:
            needed[name] = _needed(value, defaults[name], path)
        elif name in KNOWN[within] or value != defaults.get(name):
            needed[name] = value
    return needed


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, Any]:
    defaults: Mapping[str, Any] = JobSpec(name="any").model_dump(mode="json")
    return defaults
