"""The part of a job's spec that says what is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from outlast.flops import ExpertShape, ModelShape
from outlast.moe import MoeSpec
from outlast.presets import PRESETS, PresetName
from outlast.section import Section

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh")


class RopeScalingSpec(Section):
    """How rotary frequencies are changed for sequences longer than a model was first trained on."""

    kind: Literal["none", "linear", "dynamic", "yarn", "llama3"] = Field(
        "none",
        description="linear: all of them divided. dynamic: a larger base once a sequence is longer "
        "than original_seq_len. yarn (arXiv 2309.00071) and llama3 (Llama 3.1): low ones divided, "
        "high ones kept.",
    )
    factor: float = Field(1.0, ge=1, description="How much longer sequences may be.")
    original_seq_len: int | None = Field(
        None, ge=1, description="Tokens that the model was first trained on; all but linear."
    )
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: of wavelengths that are divided, in original lengths."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: of wavelengths that are kept, in original lengths."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="yarn: turns in the original length above which all is kept."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: turns in the original length below which all is divided."
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="yarn: factor on queries and keys; 0.1 ln(factor) + 1 unless given.",
    )


class ModelSpec(Section):
    """A transformer of one stack; the defaults are a GPT with learned positions."""

    preset: PresetName | None = Field(
        None,
        description="A published model, which all other fields are those of unless given; "
        "`outlast models` lists them.",
    )
    layers: int = Field(
        4, ge=1, description="Transformer blocks; `num_layers` is another name of it."
    )
    hidden: int = Field(128, ge=1, description="Width of the residual stream.")
    heads: int = Field(
        4, ge=1, description="Attention heads; must divide hidden, unless head_width is given."
    )
    head_width: int | None = Field(
        None, ge=1, description="Values of one head; hidden / heads unless given."
    )
    kv_heads: int | None = Field(
        None,
        ge=1,
        description="Heads of keys and values (grouped queries); heads unless given. Where tensor "
        "ranks are more, some share a head.",
    )
    ffn_hidden: int | None = Field(
        None, ge=1, description="Width of the MLP; 4 x hidden unless given."
    )
    vocab_size: int = Field(256, ge=2, description="Token ids; 256 for the byte tokenizer.")
    vocab_multiple: int = Field(
        1,
        ge=1,
        description="Tables of the vocabulary get rows until their number is a multiple of this, "
        "such as parallel.tp. What is beyond vocab_size is never predicted.",
    )
    seq_len: int = Field(128, ge=1, description="Tokens in one sequence.")
    tied_embeddings: bool = Field(
        True, description="Use the token embedding as the output projection too."
    )
    attention: Literal["causal", "bidirectional"] = Field(
        "causal",
        description="causal: a token attends to those before it. bidirectional: to all of its "
        "sequence, or of its document with data.document_mask (BERT); needs data.masked.",
    )
    block: Literal["serial", "parallel"] = Field(
        "serial",
        description="serial: the MLP reads what attention wrote. parallel: both read the same "
        "norm, y = x + attention(norm(x)) + mlp(norm(x)), and share one input projection and one "
        "reduction.",
    )
    block_norms: Literal[1, 2] = Field(
        1, description="Norms of a parallel block: one shared, or one for each branch."
    )
    block_biases: Literal[1, 2] = Field(
        1,
        description="Biases of a parallel block's output: one of the sum, or one of each branch "
        "(Phi, GPT-NeoX), which move apart from each other in training.",
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Kind of every norm.")
    norm_place: Literal["before", "after", "both", "sum"] = Field(
        "before",
        description="Where a serial block has its norms: before attention and MLP, after them and "
        "before the residual is added, or both (Gemma 2). sum: of each sum with the residual, as "
        "in the original transformer, and no last norm (GPT).",
    )
    norm_bias: bool = Field(True, description="A LayerNorm adds a bias too.")
    norm_weight: Literal["plain", "one_plus", "none"] = Field(
        "plain",
        description="What a norm multiplies with: its weight, 1 + its weight (Gemma), or nothing, "
        "and it has no bias either (OLMo).",
    )
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of every norm.")
    qk_norm: Literal["none", "head", "all"] = Field(
        "none",
        description="Norms of queries and keys before they are rotated. head: of each head, with "
        "one weight for all query heads and one for all key heads (Qwen 3). all: of all heads "
        "together (OLMo 2).",
    )
    activation: Activation = Field(
        "gelu_tanh",
        description="Non-linearity of the MLP; relu2 is the square of relu. swiglu, geglu and "
        "geglu_tanh have a gate beside the input, which silu, gelu or gelu_tanh is taken of.",
    )
    moe: MoeSpec = MoeSpec()
    positions: Literal["learned", "rope", "alibi", "none"] = Field(
        "learned",
        description="How a token knows its place. alibi (arXiv 2108.12409): scores are lower the "
        "further back a key is, by a slope of each head (BLOOM, MPT); on CPUs there is a number "
        "for each head, query and key in memory.",
    )
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_local_theta: float | None = Field(
        None,
        gt=0,
        description="Base in local layers (model.window), which have no scaling then; rope_theta, "
        "with its scaling, unless given (Gemma 3, OLMo 3).",
    )
    rope_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of a head's width that is rotated."
    )
    rope_pairs: Literal["halves", "neighbours"] = Field(
        "halves",
        description="Which values of a head turn together: i and i + width/2 (Llama), "
        "or 2i and 2i + 1 (GPT-J).",
    )
    rope_pattern: tuple[Literal["rope", "none"], ...] = Field(
        ("rope",),
        min_length=1,
        description="Which layers rotate, repeated over the depth; the others know no positions.",
    )
    rope_scaling: RopeScalingSpec = RopeScalingSpec()
    window: int | None = Field(
        None,
        ge=1,
        description="Local layers attend to this many tokens, the own one included; one "
        "as long as the sequence hides nothing, and is exported as it is.",
    )
    window_pattern: tuple[Literal["local", "global"], ...] = Field(
        ("local",),
        min_length=1,
        description="Kinds of layers with a window, repeated over the depth. Global layers attend "
        "to everything before them.",
    )
    attention_bias: bool = Field(True, description="Biases in the attention's linear layers.")
    qkv_bias: bool | None = Field(
        None, description="Biases of queries, keys and values; attention_bias unless given."
    )
    mlp_bias: bool = Field(True, description="Biases in the MLP's linear layers.")
    head_bias: bool = Field(False, description="A bias in the output projection.")
    head_transform: bool = Field(
        False,
        description="A linear layer, the activation and a norm before the output projection "
        "(BERT).",
    )
    segments: int = Field(
        0,
        ge=0,
        description="Rows of a table of segments, added to the embeddings (BERT has 2); without "
        "sentence_order all tokens are of the first.",
    )
    sentence_order: bool = Field(
        False,
        description="Also predicts whether the two parts of a sequence are swapped (BERT's pooler "
        "and a classifier); needs data.sentence_order.",
    )
    embedding_scale: float = Field(
        1.0, gt=0, description="Factor on the token embeddings (Gemma: the root of hidden)."
    )
    embedding_norm: bool = Field(
        False, description="A norm of the embeddings, positions included (BLOOM)."
    )
    attention_scale: float | None = Field(
        None, gt=0, description="Factor on attention's scores; 1 / sqrt(head_width) unless given."
    )
    attention_softcap: float | None = Field(
        None,
        gt=0,
        description="Bound c of attention's scores, as c tanh(score / c) (Gemma 2). Scores of a "
        "micro-batch are then all in memory.",
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="The same for the logits, after logit_scale."
    )
    residual_scale: float = Field(
        1.0, gt=0, description="Factor on what each branch adds to the residual (Granite)."
    )
    logit_scale: float = Field(1.0, gt=0, description="Factor on the logits.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Of embeddings and of what a branch adds to the residual."
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Of attention weights.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        preset = PRESETS.get(name) if isinstance(name, str) else None
        return given if preset is None else {**preset.fields, **given}

    @property
    def mlp_hidden(self) -> int:
        return self.ffn_hidden if self.ffn_hidden is not None else 4 * self.hidden

    @property
    def expert_hidden(self) -> int:
        """Width of an expert."""
        return self.mlp_hidden if self.moe.ffn_hidden is None else self.moe.ffn_hidden

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def width_of_head(self) -> int:
        return self.head_width if self.head_width is not None else self.hidden // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def norm_vectors(self) -> int:
        """Vectors of one norm: a weight, and maybe a bias."""
        if self.norm_weight == "none":
            return 0
        return 2 if self.norm == "layernorm" and self.norm_bias else 1

    @property
    def vocab_rows(self) -> int:
        """Rows of a table of the vocabulary."""
        return (
            (self.vocab_size + self.vocab_multiple - 1) // self.vocab_multiple * self.vocab_multiple
        )

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its input."""
        return self.activation in GATED

    @property
    def shape(self) -> ModelShape:
        """What decides the model's FLOPs."""
        kinds: tuple[int | None, ...] = (None,)
        # One that is as long as the sequence hides nothing.
        if self.window is not None and self.window < self.seq_len:
            kinds = tuple(self.window if k == "local" else None for k in self.window_pattern)
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            head_width=self.head_width,
            kv_heads=self.num_kv_heads,
            mlp_hidden=self.mlp_hidden,
            vocab_size=self.vocab_rows,
            seq_len=self.seq_len,
            gated=self.is_gated,
            windows=kinds,
            causal=self.attention == "causal",
            head_transform=self.head_transform,
            experts=self._experts,
        )

    @property
    def _experts(self) -> ExpertShape | None:
        moe = self.moe
        if moe.num_experts == 0:
            return None
        return ExpertShape(
            number=moe.num_experts,
            per_token=moe.experts_per_token,
            hidden=self.expert_hidden,
            shared_hidden=moe.shared_ffn_hidden,
            shared_gate=moe.shared_gate,
            layers=tuple(kind == "experts" for kind in moe.pattern),
        )
