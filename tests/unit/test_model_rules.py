"""Options of the model that mean something only together."""

from __future__ import annotations

import pytest

from outlast.problems import SpecError
from outlast.sizing.of_spec import num_parameters
from outlast.spec.parse import parse_spec

ROPE = {"positions": "rope"}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_seq_len": 64}


def experts(**fields: object) -> dict[str, object]:
    return {"mlp_bias": False, "moe": {"num_experts": 4, **fields}}


WRONG = {
    "a field of experts without any": (
        {"moe": {"ffn_hidden": 8}},
        "model.moe.ffn_hidden",
        "is 8, which applies only with model.moe.num_experts > 0, not 0; leave it out",
    ),
    "experts of a parallel block": (
        {**experts(), "block": "parallel"},
        "model.moe.num_experts",
        "is 4, which applies only with model.block = serial, not parallel",
    ),
    "more choices than experts": (
        experts(experts_per_token=5),
        "model.moe.experts_per_token",
        "is 5, more than model.moe.num_experts = 4; allowed: 1 to 4",
    ),
    "layers that are all dense": (
        experts(pattern=["dense"]),
        "model.moe.pattern",
        "has no layer with experts; allowed: patterns with at least one",
    ),
    "a gate without a shared expert": (
        experts(shared_gate=True),
        "model.moe.shared_gate",
        "applies only with model.moe.shared_ffn_hidden > 0",
    ),
    "a way to balance without a factor": (
        experts(router_aux_loss_over="model"),
        "model.moe.router_aux_loss_over",
        "applies only with model.moe.router_aux_loss_coef > 0",
    ),
    "biases of experts": (
        {"moe": {"num_experts": 4}},
        "model.mlp_bias",
        "is true, and experts have no biases; allowed: false",
    ),
    "scaling without rope": (
        {"rope_scaling": LLAMA3},
        "model.rope_scaling.kind",
        "applies only with model.positions = rope, not learned",
    ),
    "a factor without scaling": (
        {**ROPE, "rope_scaling": {"factor": 2.0}},
        "model.rope_scaling.factor",
        "applies only with model.rope_scaling.kind = linear or dynamic or yarn or llama3, not none",
    ),
    "a field of another kind": (
        {**ROPE, "rope_scaling": {**LLAMA3, "beta_fast": 16.0}},
        "model.rope_scaling.beta_fast",
        "applies only with model.rope_scaling.kind = yarn, not llama3",
    ),
    "no original length": (
        {**ROPE, "rope_scaling": {"kind": "yarn", "factor": 4.0}},
        "model.rope_scaling.original_seq_len",
        "is required with model.rope_scaling.kind = yarn",
    ),
    "no room between factors": (
        {**ROPE, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "model.rope_scaling.high_freq_factor",
        "is 4; allowed: more than model.rope_scaling.low_freq_factor = 4",
    ),
    "dynamic with one pair": (
        {
            **ROPE,
            "head_width": 2,
            "rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_seq_len": 64},
        },
        "model.rope_scaling.kind",
        "needs 4 or more rotated values",
    ),
    "a kind that there is not": (
        {**ROPE, "rope_scaling": {"kind": "llama"}},
        "model.rope_scaling.kind",
        "(did you mean llama3?)",
    ),
    "an odd head that turns": (
        {**ROPE, "head_width": 5},
        "model.rope_fraction",
        "rotates 5 of a head's 5 values",
    ),
    "two biases of a serial block": (
        {"block_biases": 2},
        "model.block_biases",
        "applies only with model.block = parallel, not serial",
    ),
    "norms after branches of a parallel block": (
        {"block": "parallel", "norm_place": "both"},
        "model.norm_place",
        "applies only with model.block = serial, not parallel",
    ),
    "a base of local layers without any": (
        {**ROPE, "rope_local_theta": 1e4},
        "model.rope_local_theta",
        "applies only with model.window, not without one",
    ),
    "bounds of scores that fall with the distance": (
        {"positions": "alibi", "attention_softcap": 5.0},
        "model.attention_softcap",
        "applies only with model.positions other than alibi, not alibi",
    ),
    "a norm of all heads together that centres": (
        {"qk_norm": "all"},
        "model.qk_norm",
        "applies only with model.norm = rmsnorm, not layernorm",
    ),
    "no layer that rotates": (
        {**ROPE, "rope_pattern": ["none"]},
        "model.rope_pattern",
        "has no layer that rotates",
    ),
    "a pattern without rope": (
        {"rope_pattern": ["rope", "none"]},
        "model.rope_pattern",
        "applies only with model.positions = rope, not learned",
    ),
    "two biases of one": (
        {"block": "parallel", "block_biases": 2, "mlp_bias": False},
        "model.block_biases",
        "applies only with model.attention_bias and model.mlp_bias",
    ),
    "a bias of norms without weights": (
        {"norm_weight": "none", "norm_bias": False},
        "model.norm_bias",
        "applies only with a weight of norms",
    ),
}


@pytest.mark.parametrize(("model", "field", "message"), WRONG.values(), ids=list(WRONG))
def test_what_means_nothing_is_refused(model: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "a", "model": model})
    (problem,) = caught.value.problems
    assert problem.field == field
    assert message in problem.message


def test_a_width_of_heads_need_not_fill_the_model() -> None:
    model = {"hidden": 100, "heads": 3, "head_width": 64}
    parse_spec({"name": "a", "model": model})


def test_a_vocabulary_is_padded_for_tensor_ranks() -> None:
    document = {"name": "a", "model": {"vocab_size": 257}, "parallel": {"tp": 4}}
    with pytest.raises(SpecError, match=r"model\.vocab_size: .* or model\.vocab_multiple = 4"):
        parse_spec(document)
    padded = parse_spec({**document, "model": {"vocab_size": 257, "vocab_multiple": 8}})
    # Seven rows more, in the table that both ends share.
    plain = parse_spec({"name": "a", "model": {"vocab_size": 257}})
    assert num_parameters(padded) - num_parameters(plain) == 7 * padded.model.hidden


def test_padding_that_does_not_fit_says_what_does() -> None:
    model = {"vocab_size": 257, "vocab_multiple": 6}
    with pytest.raises(SpecError, match=r"makes 258 rows; allowed: multiples of parallel\.tp = 4"):
        parse_spec({"name": "a", "model": model, "parallel": {"tp": 4}})
