"""Documents apart in one row: as if each were computed by itself, on every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from outlast.layout import Layout
from outlast.sizing.partition import ModelPart
from outlast.spec.parse import parse_spec
from outlast.tokens.files import open_source
from outlast.tokens.index import read_index
from tests.tokens.corpora import counted, write
from tests.trainer.alone import lone_mesh
from tests.trainer.jobs import Case, loss_and_gradients
from tests.trainer.jobs_numbers import losses
from tests.trainer.ranks import RankPool
from trainer.data.corpus.run import Order, prepare
from trainer.data.corpus.units import find_units
from trainer.model.config import GptConfig, RopeConfig
from trainer.model.documents import Documents
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters
from trainer.model.window import masked_flex_attention
from trainer.worker.feeding import open_data

LENGTHS = ((30, 1, 19, 14), (64,), (5, 59))
SEQ_LEN = 64
ROPE = RopeConfig(theta=100.0, fraction=0.5, pairs="neighbours")
OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rope": {"learned_positions": False, "rope": ROPE, "kv_heads": 2},
    "window": {"learned_positions": False, "rope": ROPE, "window": 9},
    "alibi": {"learned_positions": False, "alibi": True, "kv_heads": 2, "embedding_norm": True},
    "alibi-window": {"learned_positions": False, "alibi": True, "window": 9},
    "sum": {"norm_place": "sum", "recompute": "full"},
    "softcap": {"attention_softcap": 5.0, "window": 9},
    "parallel": {"block": "parallel", "learned_positions": False, "rope": ROPE},
    "bidirectional": {"bidirectional": True, "kv_heads": 2},
    "bidirectional-softcap": {"bidirectional": True, "attention_softcap": 5.0},
    "recomputed": {"recompute": "selective", "learned_positions": False, "rope": ROPE},
    "recomputed-whole": {"recompute": "full"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_each_document_apart(name: str) -> None:
    chunk, flat = model_of(OPTIONS[name])
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 32, (2, SEQ_LEN, len(LENGTHS)), generator=generator)
    starts = torch.empty_like(tokens)
    apart = torch.zeros((), dtype=torch.float64)
    for column, lengths in enumerate(LENGTHS):
        first = 0
        for length in lengths:
            own = slice(first, first + length), slice(column, column + 1)
            # The last token of each has no successor.
            targets[first + length - 1, column] = -1
            starts[own] = first
            apart = apart + chunk(tokens[own], None, targets[own])
            first += length
    apart.backward()  # type: ignore[no-untyped-call]
    expected = flat.grads.clone()
    flat.grads.zero_()
    found = chunk(tokens, None, targets, starts)
    found.backward()
    assert found.item() == pytest.approx(apart.item(), rel=1e-13)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(flat.grads, expected, rtol=0, atol=1e-12 * expected.abs().max())


def model_of(options: dict[str, Any]) -> tuple[GptChunk, FlatParameters]:
    config = GptConfig(
        **{
            "layers": 2,
            "hidden": 16,
            "heads": 4,
            "mlp_hidden": 24,
            "vocab_size": 32,
            "seq_len": SEQ_LEN,
            "tied_embeddings": False,
            "norm_eps": 1e-5,
            "init_std": 0.3,
            "sequence_parallel": False,
            "dtype": torch.float64,
            **options,
        }
    )
    chunk = GptChunk(config, lone_mesh(), ModelPart(layers=range(2), is_first=True, is_last=True))
    flat = FlatParameters([chunk], tp_size=1)
    flat.initialise(7)
    return chunk, flat


LAYOUTS = {
    "tp2-sp": Case(layout=Layout(tp=2)),
    "pp2-v2": Case(layout=Layout(pp=2), schedule="interleaved", virtual_stages=2),
    "tp2-pp2-dp2-sp": Case(layout=Layout(tp=2, pp=2, dp=2)),
    "cp2": Case(layout=Layout(dp=2, cp=2)),
    "cp2-ring-tp2": Case(layout=Layout(tp=2, dp=2, cp=2), context="ring"),
    "cp2-tp2-pp2-sp": Case(layout=Layout(tp=2, pp=2, dp=2, cp=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_keeps_documents_apart(ranks: RankPool, name: str) -> None:
    case = replace(LAYOUTS[name], documents=True)
    found = ranks.run_once(loss_and_gradients, case.layout.world_size, case)
    (dense,) = ranks.run_once(loss_and_gradients, 1, Case(layout=Layout(), documents=True))
    (joined,) = ranks.run_once(loss_and_gradients, 1, Case(layout=Layout()))
    assert found[0]["loss"] == pytest.approx(dense["loss"], rel=1e-10)
    assert found[0]["norm"] == pytest.approx(dense["norm"], rel=1e-10)
    assert dense["norm"] != pytest.approx(joined["norm"], rel=1e-3)


@pytest.mark.parametrize(("window", "bidirectional"), [(None, False), (100, False), (None, True)])
def test_flex_attention_sees_the_same_documents(window: int | None, bidirectional: bool) -> None:
    """Uncompiled and forward only: that is what it can do on CPU."""
    starts = torch.tensor([[0] * 130 + [130] * 170, [0] * 300, [0] * 128 + [128, *[129] * 171]])
    documents, other = (Documents(starts.t(), bidirectional=bidirectional) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 3, 2, 300, 8, generator=generator)
    mask = other.block_mask(window)
    found = masked_flex_attention(q, k, v, mask, compiled=False)
    allowed = documents.mask(window)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    every = create_block_mask(mask.mask_mod, 3, None, 300, 300, device="cpu")
    assert torch.equal(_blocks(mask), _blocks(every))


def _blocks(mask: Any) -> Tensor:
    """How much of each pair of blocks is computed: 0 nothing, 1 some, 2 all."""
    found: Tensor = mask.to_dense().int()
    full = torch.zeros_like(found)
    for batch, row in np.ndindex(*found.shape[::2]):
        count = int(mask.full_kv_num_blocks[batch, 0, row])
        full[batch, 0, row, mask.full_kv_indices[batch, 0, row, :count].long()] = 1
    return torch.maximum(found, 2 * full)


SPEC = {
    "name": "a",
    "steps": 3,
    "precision": "fp64",
    "model": {"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 32, "seq_len": 16},
    "eval": {"interval_steps": 3, "batches": 2},
}


def instructions(folder: Path) -> dict[str, Any]:
    """Prompts and completions, one of each four without a prompt."""
    generator = np.random.default_rng(5)
    texts = ["".join(map(chr, generator.integers(97, 122, 200))) for _ in range(60)]
    cuts = [0 if number % 4 == 0 else int(generator.integers(1, 199)) for number in range(60)]
    path = folder / "a.jsonl"
    lines = [
        {"q": text[:cut], "a": text[cut : cut + 50]} for text, cut in zip(texts, cuts, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    fields = {"--prompt-field": "q", "--completion-field": "a"}
    corpus = Order(
        units=find_units([path]).units, tokenizer="byte", fields=fields, validation_fraction=0.1
    )
    prepare(folder / "prepared", corpus, num_processes=1, done=lambda *_: None)
    return {"tokens": str(folder / "prepared")}


def documents(folder: Path) -> dict[str, Any]:
    generator = np.random.default_rng(5)
    found = [generator.integers(0, 256, length) for length in (1, 2, 3, 40, 5, 1, 1, 90) * 9]
    return {
        "tokens": str(write(folder / "a", found)),
        "document_mask": True,
        "validation_fraction": 0.2,
    }


def packed(folder: Path) -> dict[str, Any]:
    return {**instructions(folder), "packing": "whole"}


def test_only_completions_have_a_loss(tmp_path: Path) -> None:
    data = instructions(tmp_path)
    tokens, is_prompt, targets = [], [], []
    spec = parse_spec({**SPEC, "data": data})
    feeding = open_data(spec, lone_mesh(), tmp_path)
    assert feeding.has_unpredicted
    file = open_source(data["tokens"]).train
    row, prompts = file.tokens(), file.index().prompts(0, file.num_tokens)
    places = {row[at : at + 16].tobytes(): at for at in range(0, len(row) - 16, 16)}
    for batch in feeding.train.micro_batches(1):
        at = places[batch.tokens.numpy().astype("uint16").tobytes()]
        tokens += row[at + 1 : at + 17].tolist()
        is_prompt += prompts[at + 1 : at + 17].tolist()
        targets += batch.targets.flatten().tolist()
    wanted = [-1 if hidden else each for each, hidden in zip(tokens, is_prompt, strict=True)]
    assert targets == wanted
    assert 10 < targets.count(-1) < len(targets) - 10


def test_a_loss_without_some_targets_is_that_of_torch() -> None:
    chunk, flat = model_of({})
    tokens, targets = torch.randint(0, 32, (2, SEQ_LEN, 3), generator=torch.Generator())
    targets[torch.rand(targets.shape, generator=torch.Generator()) < 0.4] = -1
    kept: list[Tensor] = []
    handle = chunk.norm.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    found = chunk(tokens, None, targets)
    found.backward()
    gradients = flat.grads.clone()
    flat.grads.zero_()
    handle.remove()
    assert chunk.head is not None
    chunk.norm.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    chunk(tokens, None, targets)
    logits = kept[1] @ chunk.head.weight.t()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    expected.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradients, flat.grads, rtol=0, atol=1e-12 * gradients.abs().max())


@pytest.mark.parametrize("make", [documents, instructions, packed])
def test_the_mean_is_over_all_predicted_tokens_of_the_global_batch(
    ranks: RankPool, tmp_path: Path, make: Callable[[Path], dict[str, Any]]
) -> None:
    data = make(tmp_path)
    parallel = {
        "dense": {},
        "of two": {"micro_batch": 2},
        "dp": {"dp": 4},
        "tp pp dp": {"tp": 2, "pp": 2, "dp": 2, "zero": {"level": 1}},
        "cp": {"cp": 2, "dp": 2, "zero": {"level": 2}},
        "cp pp": {"cp": 2, "pp": 2, "micro_batch": 2},
    }
    found = {}
    for name, layout in parallel.items():
        spec = {**SPEC, "data": data, "parallel": layout}
        size = parse_spec(spec).layout.world_size
        results = ranks.run(losses, size, spec, folder := tmp_path / name)
        assert folder.exists()
        assert all(result["loss"] == results[0]["loss"] for result in results)
        found[name] = results[0]
    dense = found.pop("dense")
    assert dense["loss"][0] == pytest.approx(dense["expected"], rel=1e-12)
    for result in found.values():
        assert result["loss"] == pytest.approx(dense["loss"], rel=1e-10)
        assert result["held_out"] == pytest.approx(dense["held_out"], rel=1e-10)


def test_documents_of_an_index_are_found_from_any_token_on(tmp_path: Path) -> None:
    name = write(tmp_path / "a", [counted(5), counted(3), counted(9)])
    index = read_index(name.with_suffix(".idx"))
    begin = [0, 5, 8]
    for first in range(17):
        for count in range(1, 18 - first):
            expected = [each - first for each in begin if first <= each < first + count]
            assert index.starts(first, count).tolist() == expected


def test_sequences_bring_their_documents_and_leave_out_what_does_not_follow(
    tmp_path: Path,
) -> None:
    lengths = [7, 1, 20, 3, 9, 16, 16, 30, 40]
    # The first token of a document is its own, and then they count.
    documents = [[100 + number, *range(1, length)] for number, length in enumerate(lengths)]
    name = write(tmp_path / "a", documents)
    spec = parse_spec(
        {
            "name": "a",
            "model": {"seq_len": 16},
            "data": {"tokens": str(name), "document_mask": True, "validation_fraction": 0.2},
        }
    )
    data = open_data(spec, lone_mesh(), tmp_path)
    assert data.has_unpredicted
    seen = 0
    for batch in data.train.micro_batches(1):
        assert batch.starts is not None
        begins = batch.tokens >= 100
        begins[0] = True
        index = torch.arange(16)[:, None]
        assert torch.equal(batch.starts == index, begins)
        assert (batch.starts[1:] >= batch.starts[:-1]).all()
        assert (batch.targets < 100).all()
        assert torch.equal(batch.targets[:-1] == -1, begins[1:])
        seen += int(begins[1:].sum())
    assert seen > 3
