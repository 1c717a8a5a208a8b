"""BERT, which sees a whole sequence and predicts hidden tokens of it."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoint.hf.family import INIT, LAYER_EPS, SHAPE, Family, plain
from checkpoint.hf.options import Config, Fields, Mixed, Option, refused
from checkpoint.hf.rules import Rule, copied
from checkpoint.hf.tensors import norm, table
from outlast.model import ModelSpec

# Where a config does not say it: the base model as published.
_BASE = {"layers": 12, "hidden": 768, "heads": 12, "ffn_hidden": 3072, "vocab_size": 30_522}


def _read_segments(config: Config) -> Fields:
    count = config.get("type_vocab_size", 2)
    if not isinstance(count, int) or count < 1:
        raise refused("type_vocab_size", count, "allowed: 1 or more")
    return {"segments": count}


def _write_segments(model: ModelSpec) -> Fields:
    return {"type_vocab_size": model.segments}


_SEGMENTS = Mixed(theirs=("type_vocab_size",), read=_read_segments, write=_write_segments)
# Without and with the head for the order of sentences.
_CLASSES = {False: "BertForMaskedLM", True: "BertForPreTraining"}


def _read_order(config: Config) -> Fields:
    has_order = config.get("architectures") == [_CLASSES[True]]
    if has_order and config.get("type_vocab_size", 2) == 1:
        raise refused("type_vocab_size", 1, f"allowed with {_CLASSES[True]}: 2 or more")
    return {"sentence_order": has_order}


_ORDER = Mixed(
    theirs=("architectures",),
    read=_read_order,
    write=lambda model: {"architectures": [_CLASSES[model.sentence_order]]},
)
# What a base model has besides.
_POOLER = Mixed(
    theirs=(
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type"),
    ),
    read=lambda config: {},
    write=lambda model: {},
)


def bert_rules(model: ModelSpec) -> Iterator[Rule]:
    """BERT's masked language model, and its second head where the model has it."""
    embeddings, hidden = "bert.embeddings", model.hidden
    yield table(model, "tokens.weight", f"{embeddings}.word_embeddings.weight")
    for ours, theirs, rows in (
        ("positions", "position", model.seq_len),
        ("segments", "token_type", model.segments),
    ):
        yield copied(f"{ours}.weight", f"{embeddings}.{theirs}_embeddings.weight", rows)
    yield from norm(model, "embedding_norm", f"{embeddings}.LayerNorm")
    for layer in range(model.layers):
        yield from _layer_rules(model, f"blocks.{layer}", f"bert.encoder.layer.{layer}")
    transform = "cls.predictions.transform"
    for part in ("weight", "bias"):
        yield copied(f"head_transform.{part}", f"{transform}.dense.{part}", hidden)
    yield from norm(model, "head_transform.norm", f"{transform}.LayerNorm")
    yield table(model, "head_bias.weight", "cls.predictions.bias")
    if model.sentence_order:
        for part in ("weight", "bias"):
            yield copied(f"sentence_order.pooler.{part}", f"bert.pooler.dense.{part}", hidden)
            yield copied(f"sentence_order.classifier.{part}", f"cls.seq_relationship.{part}", 2)


def _layer_rules(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    hidden, attention = model.hidden, f"{theirs}.attention"
    for part in ("weight", "bias"):
        yield Rule(
            ours=f"{ours}.attention.qkv.{part}",
            theirs=tuple(f"{attention}.self.{name}.{part}" for name in ("query", "key", "value")),
            rows=(hidden, hidden, hidden),
            pieces=(hidden, hidden, hidden),
            joined="groups",
            groups=model.heads,
        )
        for name, other, rows in (
            ("attention.out", "attention.output.dense", hidden),
            ("mlp.up", "intermediate.dense", model.mlp_hidden),
            ("mlp.down", "output.dense", hidden),
        ):
            yield copied(f"{ours}.{name}.{part}", f"{theirs}.{other}.{part}", rows)
    yield from norm(model, f"{ours}.attention.out.norm", f"{attention}.output.LayerNorm")
    yield from norm(model, f"{ours}.mlp.down.norm", f"{theirs}.output.LayerNorm")


def _shape() -> Iterator[Option]:
    for option in SHAPE:
        if option.ours in _BASE:
            missing = _BASE[option.ours]
            yield Option(theirs=option.theirs, ours=option.ours, missing=missing)


BERT_FAMILIES = (
    Family(
        name="bert",
        architecture=_CLASSES[False],
        other_architectures=(_CLASSES[True],),
        options=(
            *(*_shape(), INIT, plain("gelu")),
            Option(theirs="max_position_embeddings", ours="seq_len", missing=512),
            Option(theirs=LAYER_EPS.theirs, ours=LAYER_EPS.ours, missing=1e-12),
            Option(theirs="hidden_dropout_prob", ours="dropout", missing=0.1),
            Option(theirs="attention_probs_dropout_prob", ours="attention_dropout", missing=0.1),
        ),
        constants={
            "tie_word_embeddings": True,
            "position_embedding_type": "absolute",
            "directionality": "bidi",
        },
        mixed=(_ORDER, _POOLER, _SEGMENTS),
        fixed={
            "attention": "bidirectional",
            "norm_place": "sum",
            "embedding_norm": True,
            "head_transform": True,
            "head_bias": True,
        },
        rules=bert_rules,
        prefix="bert.",
        tables=("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        # What predicts whether a sentence follows another, and a buffer.
        unused=("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids"),
        older_names={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
        rotary=False,
    ),
)
