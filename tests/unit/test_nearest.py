"""Layouts that a message offers satisfy every rule, whatever else the spec says."""

from __future__ import annotations

import copy
import random
from typing import Any

from outlast.problems import SpecError
from outlast.spec.parse import parse_spec

NUM_SPECS = 400
SEED = 20


def random_document(rng: random.Random) -> dict[str, Any]:
    """A spec that is often wrong in its layout, and sometimes in the model or elsewhere."""
    heads = rng.choice((1, 2, 3, 4, 6, 8, 12))
    model: dict[str, Any] = {
        "layers": rng.randint(1, 12),
        "heads": heads,
        "hidden": heads * rng.choice((4, 8, 16, 5)),
        "seq_len": rng.choice((16, 24, 32, 64)),
        "vocab_size": rng.choice((256, 264, 300, 512)),
    }
    if rng.random() < 0.4:
        model["kv_heads"] = rng.choice((1, 2, 3, 4))
    if rng.random() < 0.3:
        model |= {"block": "parallel", "ffn_hidden": rng.choice((64, 96, 100, 128))}
    if rng.random() < 0.2:
        model |= {"window": rng.choice((8, 32, 48))}
    if rng.random() < 0.2:
        model |= {"positions": "rope", "rope_fraction": rng.choice((1.0, 0.5, 0.3))}
    parallel: dict[str, Any] = {
        "tp": rng.choice((1, 1, 2, 3, 4, 5, 8)),
        "pp": rng.choice((1, 1, 2, 3, 4, 7)),
        "dp": rng.choice((1, 2, 3, 4, 6)),
        "micro_batch": rng.choice((1, 1, 2, 3)),
    }
    if rng.random() < 0.3:
        parallel |= {"schedule": "interleaved", "virtual_stages": rng.choice((1, 2, 3))}
    if rng.random() < 0.15:
        parallel["layer_split"] = [rng.randint(1, 4) for _ in range(parallel["pp"])]
    if rng.random() < 0.2:
        parallel["extra_warmup"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        zero = {"level": rng.randint(0, 3), "communication": rng.choice((None, "bf16"))}
        parallel["zero"] = zero
    if rng.random() < 0.1:
        parallel["recompute"] = ["full"] * rng.randint(1, 12)
    document: dict[str, Any] = {
        "name": "a",
        "model": model,
        "parallel": parallel,
        "data": {"global_batch": rng.choice((4, 6, 8, 12, 16, 30))},
    }
    if rng.random() < 0.3:
        document["resources"] = {"workers_per_node": rng.choice((1, 2, 3, 4, 8))}
    if rng.random() < 0.15:
        document.setdefault("resources", {})["nodes"] = rng.choice((1, 2, 4))
    if rng.random() < 0.2:
        document["checkpoint"] = {"replicas": 1}
    if rng.random() < 0.2:
        document["recovery"] = {"elastic": {"min_dp": rng.choice((1, 2, 3))}}
    if rng.random() < 0.1:
        document["optimizer"] = {"schedule": {"warmup_steps": 1000}}
    return document


def problems_of(document: dict[str, Any]) -> dict[str, str]:
    try:
        parse_spec(document)
    except SpecError as error:
        return {problem.field: problem.message for problem in error.problems}
    return {}


def offered(problems: dict[str, str]) -> list[str]:
    words = problems.get("parallel", "")
    return words.partition(": ")[2].split("; ") if words else []


def with_layout(document: dict[str, Any], words: str) -> dict[str, Any]:
    """The spec with what a message offers put into it, as a user would."""
    changed = copy.deepcopy(document)
    parallel = changed["parallel"]
    for part in words.split(", "):
        if part == "no layer_split":
            del parallel["layer_split"]
            continue
        name, value = part.rsplit(" ", 1)
        parallel[name] = int(value) if value.isdigit() else value
    return changed


def test_every_layout_that_is_offered_satisfies_every_rule() -> None:
    rng = random.Random(SEED)
    num_offered = 0
    for _ in range(NUM_SPECS):
        document = random_document(rng)
        before = problems_of(document)
        for words in offered(before):
            num_offered += 1
            after = problems_of(with_layout(document, words))
            # What has nothing to do with the layout is still to be put right.
            elsewhere = {field for field in after if field.startswith("optimizer.")}
            assert set(after) == elsewhere, (document, words, after)
    assert num_offered > NUM_SPECS / 2


def test_with_a_model_that_cannot_work_no_layout_is_offered() -> None:
    document = {
        "name": "a",
        "model": {"heads": 4, "kv_heads": 3, "hidden": 64},
        "parallel": {"tp": 2, "dp": 3},
    }
    found = problems_of(document)
    assert "model.heads" in found
    assert offered(found) == []
