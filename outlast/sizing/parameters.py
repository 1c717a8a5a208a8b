"""The numbers of a job that decide its cost, and what follows from them exactly: parameters.

Plain arithmetic on plain numbers. What the parameters cost in host memory is said in
`outlast.sizing.slots`; on the device and in messages, in `trainer.core`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from outlast.flops import ModelShape
from outlast.layout import Layout, folds
from outlast.sizing.partition import ModelPart, stage_parts

# What decides the cost of a layer besides the model: recompute, window, rotation, experts.
_Kind: TypeAlias = tuple[str, bool, int | None, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model holds besides the shape of its matrices."""

    shape: ModelShape
    tied_embeddings: bool
    parallel_block: bool = False
    norms_per_block: int = 2
    block_biases: int = 1
    """Of what a parallel block adds to the stream, at most."""
    norms_after: bool = False
    """Whether there are norms after attention and the MLP."""
    last_norm: bool = True
    norm_vectors: int = 2
    """Vectors of one norm: a weight, and maybe a bias."""
    learned_positions: bool = True
    alibi: bool = False
    embedding_norm: bool = False
    segments: int = 0
    rotary: tuple[bool, ...] = (False,)
    """Whether a layer rotates, repeated over the depth."""
    rms_norm: bool = False
    qkv_bias: bool = True
    attention_bias: bool = True
    """Of attention's output; `qkv_bias` of its inputs."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Of each head, with the same weights on all tensor ranks, or of all heads together."""
    mlp_bias: bool = True
    head_bias: bool = False
    head_transform: bool = False
    sentence_order: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    attention_softcap: bool = False
    router_terms: int = 0
    """Numbers of the router's losses, which go from chunk to chunk beside the stream."""

    def rotates(self, layer: int) -> bool:
        """Whether one layer turns its queries and keys."""
        return self.rotary[layer % len(self.rotary)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroFacts:
    """What replicas share; level 0 where there is one. `*_each`: each micro-batch, not once."""

    level: int = 0
    reshards_each: bool = False
    reduces_each: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBytes:
    """Bytes of one number, by its part in training."""

    weight: int = 4
    gradient: int = 4
    """Of the sum over micro-batches, which 16-bit precisions keep in fp32."""
    master: int = 0
    """Of the fp32 copy that the optimizer works on; 0 where weights are their own."""
    moment: int = 4
    gradient_sent: int = 4
    """Of a gradient on the wire between replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """The numbers of a job spec that decide its cost."""

    model: ModelFacts
    layout: Layout
    sequence_parallel: bool
    """False for a single tensor rank: it has no sequence to split."""
    tp_chunks: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    extra_warmup: int = 0
    layer_split: tuple[int, ...] | None = None
    zero: ZeroFacts = ZeroFacts()
    recompute: tuple[str, ...]
    """Mode of every layer; of one that offloads what it keeps, too, that it is `full`."""
    offloaded: frozenset[int] = frozenset()
    """Layers that keep their inputs in host memory."""
    micro_batch: int
    global_batch: int
    in_ring: bool = False
    """Keys and values go round the ranks that divide sequences; else these swap heads."""
    optimizer: str = "adamw"
    sizes: ValueBytes = ValueBytes()
    on_gpu: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica runs per step."""
        return self.global_batch // (self.layout.num_replicas * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that a rank computes: of its part of each sequence."""
        return self.micro_batch * self.model.shape.seq_len // self.layout.cp

    @property
    def ranks_of_kv_head(self) -> int:
        """Tensor ranks that share a head of keys and values."""
        return max(1, self.layout.tp // self.model.shape.kv_heads)

    @property
    def copies_of_kv_head(self) -> int:
        """Context ranks of a tensor rank that attend with the same head of keys and values."""
        if self.in_ring:
            return 1
        heads = max(1, self.model.shape.kv_heads // self.layout.tp)
        return max(1, self.layout.cp // heads)

    @property
    def stream_values(self) -> int:
        """Values of the residual stream that one rank holds for a micro-batch."""
        values = self.tokens * self.model.shape.hidden
        return values // self.layout.tp if self.sequence_parallel else values

    def parts(self, stage: int) -> tuple[ModelPart, ...]:
        """What a stage holds, one part a chunk."""
        return stage_parts(
            self.model.shape.layers,
            stage=stage,
            num_stages=self.layout.pp,
            num_chunks=self.virtual_stages,
            folds=self.folds,
            given=self.layer_split,
        )

    @property
    def splits_backward(self) -> bool:
        """Gradients of weights are put off."""
        return self.schedule in ("zb-h1", "zb-v")

    @property
    def folds(self) -> bool:
        """Both ends of the model are on the first stage."""
        return folds(self.schedule)

    @property
    def shares_table(self) -> bool:
        """Both chunks of the first stage use the one embedding."""
        return self.model.tied_embeddings and self.folds

    @property
    def splits_tied_table(self) -> bool:
        """Two chunks hold a copy of the embedding each."""
        has_two = self.layout.pp * self.virtual_stages > 1 and not self.folds
        return self.model.tied_embeddings and has_two


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Parameters of one rank by the unit that ZeRO gathers and reduces at once."""

    blocks: tuple[int, ...]
    divided: tuple[int, ...]
    """Experts of each block that replicas divide among them; 0 where they are the block's."""
    input_ends: int
    """Token and position tables of a first chunk, and the norm of embeddings."""
    input_norm: int
    """That norm alone."""
    output_ends: int
    """Last norm and projection of a last chunk."""

    @property
    def total(self) -> int:
        return self.common + sum(self.divided)

    @property
    def common(self) -> int:
        """What all replicas have alike."""
        return sum(self.blocks) + self.input_ends + self.output_ends

    @property
    def largest(self) -> int:
        return max(*self.blocks, *self.divided, self.input_ends, self.output_ends)

    def shard(self, layout: Layout) -> int:
        """What one of the replicas updates where these share."""
        experts = sum(self.divided)
        return -(-self.common // layout.dp) + -(-experts * layout.ep // layout.dp)


def total_parameters(facts: PlanInput) -> int:
    """Parameters of the whole model, each counted once."""
    model = facts.model
    return (
        sum(_block_parameters(model, layer, 1) for layer in range(model.shape.layers))
        + _input_parameters(model, 1)
        + _output_parameters(model, 1, has_table=not model.tied_embeddings)
    )


def stage_units(facts: PlanInput, stage: int) -> Units:
    """Parameters that one rank of `stage` holds. A tied head on a last chunk is a copy."""
    model, tp, ep = facts.model, facts.layout.tp, facts.layout.ep
    parts = facts.parts(stage)
    has_table = not model.tied_embeddings or facts.splits_tied_table
    is_first, is_last = (any(p.is_first for p in parts), any(p.is_last for p in parts))
    layers = layers_of(parts)
    # Layers differ in whether they have experts: of a deep model two are looked at.
    first = {model.shape.experts_of(layer) is not None: layer for layer in layers}
    blocks = {kind: _block_parameters(model, layer, tp) for kind, layer in first.items()}
    divided = {
        kind: (ep > 1) * _expert_parameters(model, layer, tp) for kind, layer in first.items()
    }
    kinds = [model.shape.experts_of(layer) is not None for layer in layers]
    return Units(
        blocks=tuple(blocks[kind] - divided[kind] for kind in kinds),
        divided=tuple(divided[kind] // ep for kind in kinds),
        input_ends=_input_parameters(model, tp) if is_first else 0,
        input_norm=_input_norm_parameters(model) if is_first else 0,
        output_ends=_output_parameters(model, tp, has_table=has_table) if is_last else 0,
    )


def summed_by_tensor_ranks(facts: PlanInput, stage: int) -> int:
    """Parameters that all tensor ranks hold, of what one rank of `stage` updates.

    Where replicas share, of the one with most of them: they come last in a bucket.
    """
    model, units = facts.model, stage_units(facts, stage)
    table = _table_parameters(model, facts.layout.tp) if facts.splits_tied_table else 0
    # A tied table that two chunks hold is a bucket of its own.
    layers = layers_of(facts.parts(stage))
    buckets = [
        (block, _replicated_parameters(model, layer))
        for layer, block in zip(layers, units.blocks, strict=True)
    ]
    if units.input_ends:
        norm = units.input_norm
        rows = _position_parameters(model) + _segment_parameters(model)
        buckets.append((units.input_ends - table - norm, rows))
        buckets.append((norm, norm))
    if units.output_ends:
        replicated = _last_norm_parameters(model) + _transform_parameters(model)
        buckets.append((units.output_ends - table, replicated))
    share = facts.layout.dp if facts.zero.level else 1
    return sum(min(replicated, -(-size // share)) for size, replicated in buckets)


def layer_kinds(facts: PlanInput, parts: Iterable[ModelPart]) -> dict[int, int]:
    """Of layers that are alike one, and how many there are: a deep model has few kinds."""
    first: dict[_Kind, int] = {}
    counts: dict[int, int] = {}
    for layer in layers_of(parts):
        alike = first.setdefault(_kind(facts, layer), layer)
        counts[alike] = counts.get(alike, 0) + 1
    return counts


def alike_stages(facts: PlanInput) -> dict[int, int]:
    """Of stages that hold the same the first one, and how many there are."""
    kinds = [_kind(facts, layer) for layer in range(facts.model.shape.layers)]
    first: dict[tuple[object, ...], int] = {}
    counts: dict[int, int] = {}
    for stage in range(facts.layout.pp):
        held = tuple(
            (part.is_first, part.is_last, tuple(kinds[layer] for layer in part.layers))
            for part in facts.parts(stage)
        )
        alike = first.setdefault(held, stage)
        counts[alike] = counts.get(alike, 0) + 1
    return counts


def _kind(facts: PlanInput, layer: int) -> _Kind:
    model = facts.model
    has_experts = model.shape.experts_of(layer) is not None
    return (
        facts.recompute[layer],
        layer in facts.offloaded,
        model.shape.window_of(layer),
        model.rotates(layer),
        has_experts,
    )


def layers_of(parts: Iterable[ModelPart]) -> list[int]:
    """The layers of some parts, by number."""
    return [layer for part in parts for layer in part.layers]


def _block_parameters(model: ModelFacts, layer: int, tp: int) -> int:
    shape, experts = model.shape, model.shape.experts_of(layer)
    sharded = shape.attention_weights
    if model.qkv_bias:
        sharded += shape.qkv_width
    if model.qk_norm == "all":
        sharded += shape.query_width + shape.kv_width
    if experts is None:
        sharded += shape.hidden * shape.mlp_matrices * shape.mlp_hidden
        sharded += shape.mlp_in_width if model.mlp_bias else 0
    else:
        sharded += shape.hidden * shape.mlp_matrices * experts.shared_hidden
    own = sharded // tp + _expert_parameters(model, layer, tp)
    return own + _replicated_parameters(model, layer)


def _expert_parameters(model: ModelFacts, layer: int, tp: int) -> int:
    """Of all that a router chooses among in a layer."""
    shape, experts = model.shape, model.shape.experts_of(layer)
    if experts is None:
        return 0
    return shape.hidden * shape.mlp_matrices * experts.number * experts.hidden // tp


def _replicated_parameters(model: ModelFacts, layer: int) -> int:
    """Norms of a block, biases of what goes back into the stream, and its router."""
    row_biases = model.attention_bias + model.mlp_bias
    if model.parallel_block:
        # One projection back into the stream serves both branches.
        row_biases = min(model.block_biases, row_biases)
    vectors = model.norms_per_block * model.norm_vectors + row_biases
    experts = model.shape.experts_of(layer)
    if experts is not None:
        # Experts have no biases; the router has a vector for each of them.
        vectors += experts.number + experts.shared_gate - model.mlp_bias
    return vectors * model.shape.hidden + _head_norm_parameters(model)


def _head_norm_parameters(model: ModelFacts) -> int:
    """A weight for all heads of queries, and one for those of keys."""
    return 2 * model.shape.query_width // model.shape.heads if model.qk_norm == "head" else 0


def _input_parameters(model: ModelFacts, tp: int) -> int:
    tables = _table_parameters(model, tp) + _position_parameters(model)
    tables += _segment_parameters(model)
    return tables + _input_norm_parameters(model)


def _input_norm_parameters(model: ModelFacts) -> int:
    return model.norm_vectors * model.shape.hidden if model.embedding_norm else 0


def _table_parameters(model: ModelFacts, tp: int) -> int:
    return model.shape.vocab_size * model.shape.hidden // tp


def _position_parameters(model: ModelFacts) -> int:
    return model.shape.seq_len * model.shape.hidden if model.learned_positions else 0


def _segment_parameters(model: ModelFacts) -> int:
    return model.segments * model.shape.hidden


def _transform_parameters(model: ModelFacts) -> int:
    """A linear layer with its bias, and a norm."""
    hidden = model.shape.hidden
    return (hidden + 1 + model.norm_vectors) * hidden if model.head_transform else 0


def _order_parameters(model: ModelFacts) -> int:
    """A linear layer, and another one of two outputs, with their biases."""
    hidden = model.shape.hidden
    return (hidden + 1) * (hidden + 2) if model.sentence_order else 0


def _output_parameters(model: ModelFacts, tp: int, *, has_table: bool) -> int:
    shape = model.shape
    table = _table_parameters(model, tp) if has_table else 0
    bias = shape.vocab_size // tp if model.head_bias else 0
    heads = _transform_parameters(model) + _order_parameters(model)
    return _last_norm_parameters(model) + heads + table + bias


def _last_norm_parameters(model: ModelFacts) -> int:
    return model.norm_vectors * model.shape.hidden if model.last_norm else 0
