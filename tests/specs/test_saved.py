"""What a checkpoint says of its job is the job's own, as far as weights are of it."""

from __future__ import annotations

import json

from outlast.spec.parse import parse_spec
from outlast.spec.saved import described, saved_spec


def test_a_job_is_known_again_from_what_its_checkpoint_says() -> None:
    spec = parse_spec(
        {
            "name": "a",
            "precision": "bf16",
            "model": {"preset": "llama3-8b", "num_layers": 4, "vocab_multiple": 256},
            "data": {"tokens": {"/data/a": 0.25, "s3://bucket/b": 0.75}},
            "checkpoint": {"load": "/checkpoints/start"},
            "optimizer": {"lr": 1e-4},
        }
    )
    found = saved_spec(json.loads(json.dumps(described(spec))))
    assert found is not None
    assert (found.model, found.precision, found.data.tokens, found.checkpoint.load) == (
        spec.model,
        spec.precision,
        spec.data.tokens,
        spec.checkpoint.load,
    )


def test_an_older_checkpoint_says_nothing() -> None:
    assert saved_spec({"step": 4}) is None
    assert saved_spec({"job": "text"}) is None
    # What a later version has said is not known here.
    assert saved_spec({"job": {"model": {"unheard_of": 1}}}) is None
