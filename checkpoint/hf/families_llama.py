"""Families whose tensors have the names of Llama's."""

from __future__ import annotations

from checkpoint.hf import options
from checkpoint.hf.family import (
    ATTENTION_BIAS,
    GRANITE_SCALES,
    HEAD_DIM,
    LAYER_EPS,
    MLP_BIAS,
    RMS,
    RMS_EPS,
    SHAPE,
    UNBIASED,
    Dropouts,
    Family,
    LocalRope,
    gate,
    plain,
    rms_eps,
    tied,
)
from checkpoint.hf.options import Config, Fields, Mixed, Option, choice
from checkpoint.hf.tensors import (
    cohere_rules,
    gemma2_rules,
    glm4_rules,
    glm_rules,
    llama_rules,
    nemotron_rules,
    olmo2_rules,
    phi3_rules,
    phi_rules,
    stablelm_rules,
    starcoder2_rules,
)
from outlast.model import ModelSpec

_LLAMA = (*SHAPE, RMS_EPS, HEAD_DIM, ATTENTION_BIAS, tied(False), gate())
_GELU_TANH = "gelu_pytorch_tanh"
# What is called gelu in its first releases is meant to be the approximation, and read as such.
_GEMMA_ACTIVATIONS = {**options.GATED_ACTIVATIONS, "gelu": "geglu_tanh"}
_GEMMA2 = (
    *(*SHAPE, RMS_EPS, ATTENTION_BIAS, tied(True)),
    gate(_GELU_TANH, "hidden_activation"),
    Option(theirs="head_dim", ours="head_width", missing=256),
    Option(
        theirs="query_pre_attn_scalar",
        ours="attention_scale",
        missing=256,
        read=lambda scalar: scalar**-0.5,
        write=lambda scale: round(scale**-2),
    ),
)
_GEMMA2_FIXED = {**RMS, "mlp_bias": False, "norm_weight": "one_plus", "norm_place": "both"}
_QWEN = (*SHAPE, RMS_EPS, tied(False), gate())
_QKV_BIAS = Option(theirs="attention_bias", ours="qkv_bias", missing=False)
_LOGIT_SCALE = Option(theirs="logit_scale", ours="logit_scale", missing=0.0625)
_COHERE = (*SHAPE, LAYER_EPS, ATTENTION_BIAS, tied(True), gate())
_COHERE_BLOCK = {
    "block": "parallel",
    "norm_bias": False,
    "mlp_bias": False,
    "rope_pairs": "neighbours",
}
_GLM = (
    *(*SHAPE, rms_eps(1.5625e-7), tied(False), gate()),
    Option(theirs="attention_bias", ours="qkv_bias", missing=True),
    Option(theirs="head_dim", ours="head_width", missing=128),
)
_OLMO_EPS = rms_eps(1e-5)
_OLMO2 = {**RMS, "mlp_bias": False, "norm_place": "after", "qk_norm": "all"}
_GLM_FIXED = {**RMS, **UNBIASED, "rope_pairs": "neighbours"}
_PARALLEL_RESIDUAL = Option(
    theirs="use_parallel_residual",
    ours="block",
    missing=False,
    read=options.BLOCKS.__getitem__,
    write=lambda block: block == "parallel",
)


def _gemma_scale(fields: Fields) -> Fields:
    return {"embedding_scale": fields["hidden"] ** 0.5}


def _phi3_scaling(fields: Fields) -> Fields:
    """`transformers` takes Phi-3's yarn for longrope, which is another."""
    kind = fields.get("rope_scaling", {}).get("kind")
    if kind is not None:
        raise options.refused("rope_type", kind, "allowed: default")
    return {}


def _cohere2_pattern(fields: Fields) -> Fields:
    """Layers that see everything know no positions."""
    width = fields["head_width"]
    if width is not None and width * fields["heads"] != fields["hidden"]:
        # `transformers` takes no notice of it.
        raise options.refused("head_dim", width, "allowed: hidden_size / num_attention_heads")
    kinds = fields.get("window_pattern", ["global"])
    return {"rope_pattern": ["rope" if kind == "local" else "none" for kind in kinds]}


def _read_no_rope(config: Config) -> Fields:
    """A list counts before the interval that it is made of."""
    layers = options.required(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    by_interval = [int((layer + 1) % interval != 0) for layer in range(layers)]
    kinds = config.get("no_rope_layers") or by_interval
    return {"rope_pattern": options.shortest([("none", "rope")[kind] for kind in kinds])}


def _write_no_rope(model: ModelSpec) -> Fields:
    kinds = model.rope_pattern
    of_layers = [kinds[layer % len(kinds)] for layer in range(model.layers)]
    return {"no_rope_layers": [int(kind == "rope") for kind in of_layers]}


_NO_ROPE_LAYERS = Mixed(
    theirs=("no_rope_layers", "no_rope_layer_interval"), read=_read_no_rope, write=_write_no_rope
)
LLAMA_FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        options=(*_LLAMA, MLP_BIAS),
        fixed=RMS,
        rules=llama_rules,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        options=(*SHAPE, RMS_EPS, HEAD_DIM, tied(False), gate()),
        fixed={**RMS, **UNBIASED},
        rules=llama_rules,
        windows="all",
        window=4096,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        options=_QWEN,
        fixed={**RMS, **UNBIASED, "qkv_bias": True},
        rules=llama_rules,
        windows="by_layer",
        window=4096,
        uses_window=False,
        first_window=28,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        options=(
            *_QWEN,
            ATTENTION_BIAS,
            Option(theirs="head_dim", ours="head_width", missing=128),
        ),
        fixed={**RMS, "mlp_bias": False, "qk_norm": "head"},
        rules=llama_rules,
        windows="by_layer",
        window=4096,
        uses_window=False,
        first_window=28,
    ),
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        options=(
            *(*SHAPE, RMS_EPS, ATTENTION_BIAS, tied(True)),
            choice("hidden_act", "activation", _GELU_TANH, _GEMMA_ACTIVATIONS),
            Option(theirs="head_dim", ours="head_width", missing=256),
        ),
        constants={"hidden_activation": _GELU_TANH},
        fixed={**RMS, "mlp_bias": False, "norm_weight": "one_plus"},
        rules=llama_rules,
        derived=_gemma_scale,
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        options=(
            *_GEMMA2,
            Option(theirs="attn_logit_softcapping", ours="attention_softcap", missing=50.0),
            Option(theirs="final_logit_softcapping", ours="logit_softcap", missing=30.0),
        ),
        ignored=("hidden_act",),
        fixed=_GEMMA2_FIXED,
        rules=gemma2_rules,
        windows="by_layer",
        window=4096,
        derived=_gemma_scale,
    ),
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        other_architectures=("Gemma3TextModel",),
        # `transformers` takes no notice of attn_logit_softcapping: it is refused.
        options=(
            *_GEMMA2,
            Option(theirs="final_logit_softcapping", ours="logit_softcap", missing=None),
        ),
        ignored=("hidden_act",),
        fixed={**_GEMMA2_FIXED, "qk_norm": "head"},
        rules=gemma2_rules,
        rope_theta=1_000_000.0,
        local_rope=LocalRope(missing=10_000.0, older="rope_local_base_freq"),
        windows="by_layer",
        window=4096,
        derived=_gemma_scale,
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        options=(*(*SHAPE, RMS_EPS, ATTENTION_BIAS, MLP_BIAS, tied(True), gate()),),
        mixed=(_NO_ROPE_LAYERS,),
        rope_theta=2_000_000.0,
        fixed=RMS,
        rules=llama_rules,
        windows="by_layer",
        uses_window=False,
    ),
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        options=(*_LLAMA, MLP_BIAS, *GRANITE_SCALES),
        fixed=RMS,
        rules=llama_rules,
    ),
    Family(
        name="olmo",
        architecture="OlmoForCausalLM",
        options=(*SHAPE, ATTENTION_BIAS, tied(False), gate()),
        # `OlmoLayerNorm` has no parameters, and its epsilon is no option.
        fixed={"norm_weight": "none", "norm_eps": 1e-5, "mlp_bias": False},
        rules=llama_rules,
    ),
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        options=(*SHAPE, _OLMO_EPS, ATTENTION_BIAS, tied(False), gate()),
        fixed=_OLMO2,
        rules=olmo2_rules,
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        options=(*SHAPE, _OLMO_EPS, ATTENTION_BIAS, tied(False), gate()),
        fixed=_OLMO2,
        rules=olmo2_rules,
        rope_theta=500_000.0,
        local_rope=LocalRope(missing=500_000.0),
        windows="by_layer",
        window=4096,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        options=(
            *(*SHAPE, rms_eps(1e-5), tied(False), gate()),
            Option(theirs="resid_pdrop", ours="dropout", missing=0.0),
        ),
        fixed={**RMS, **UNBIASED},
        dropouts=Dropouts(of_stream="resid_pdrop", of_embeddings="embd_pdrop"),
        rules=phi3_rules,
        windows="all",
        derived=_phi3_scaling,
    ),
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        options=(
            *(*SHAPE, tied(True)),
            Option(theirs="norm_epsilon", ours="norm_eps", missing=1e-5),
            Option(theirs="use_bias", ours="attention_bias", missing=True),
            Option(theirs="residual_dropout", ours="dropout", missing=0.0),
            plain("gelu_pytorch_tanh"),
        ),
        fixed={},
        dropouts=Dropouts(of_stream="residual_dropout", of_embeddings="embedding_dropout"),
        rules=starcoder2_rules,
        windows="all",
        derived=lambda fields: {"mlp_bias": fields["attention_bias"]},
    ),
    Family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        options=(
            *(*SHAPE, HEAD_DIM, ATTENTION_BIAS, MLP_BIAS, tied(False), plain("relu2")),
            Option(theirs="norm_eps", ours="norm_eps", missing=1e-5),
        ),
        fixed={"norm_weight": "one_plus"},
        rules=nemotron_rules,
        rope_fraction=0.5,
    ),
    Family(
        name="phi",
        architecture="PhiForCausalLM",
        options=(
            *(*SHAPE, LAYER_EPS, tied(False)),
            Option(theirs="resid_pdrop", ours="dropout", missing=0.0),
            plain("gelu_new"),
        ),
        dropouts=Dropouts(of_stream="resid_pdrop", of_embeddings="embd_pdrop"),
        rope_fraction=0.5,
        fixed={"block": "parallel", "block_biases": 2, "head_bias": True},
        rules=phi_rules,
    ),
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        options=(
            *(*SHAPE, LAYER_EPS, tied(False), gate()),
            Option(theirs="use_qkv_bias", ours="qkv_bias", missing=False),
            _PARALLEL_RESIDUAL,
        ),
        # Only the MLP drops anything, and norms of heads have a weight for each.
        constants={"hidden_dropout": 0.0, "qk_layernorm": False},
        fixed=UNBIASED,
        rules=stablelm_rules,
        rope_fraction=0.25,
    ),
    Family(
        name="cohere",
        architecture="CohereForCausalLM",
        options=(*_COHERE, _LOGIT_SCALE),
        constants={"use_qk_norm": False},
        fixed=_COHERE_BLOCK,
        rules=cohere_rules,
        rope_theta=500_000.0,
    ),
    Family(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        options=(*_COHERE, _LOGIT_SCALE, HEAD_DIM),
        fixed=_COHERE_BLOCK,
        rules=cohere_rules,
        windows="by_layer",
        window=4096,
        derived=_cohere2_pattern,
    ),
    Family(
        name="glm",
        architecture="GlmForCausalLM",
        options=_GLM,
        fixed=_GLM_FIXED,
        rules=glm_rules,
        rope_fraction=0.5,
    ),
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        options=_GLM,
        fixed={**_GLM_FIXED, "norm_place": "both"},
        rules=glm4_rules,
        rope_fraction=0.5,
    ),
    Family(
        name="helium",
        architecture="HeliumForCausalLM",
        options=(
            *(*SHAPE, rms_eps(1e-8), MLP_BIAS, tied(False), gate(), _QKV_BIAS),
            Option(theirs="head_dim", ours="head_width", missing=128),
        ),
        fixed={**RMS, "attention_bias": False, "rope_pairs": "neighbours"},
        rules=llama_rules,
        rope_theta=100_000.0,
    ),
)
