"""Parts of a sequence on ranks of their own: what each reads, keeps and computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outlast.blackbox import Group
from outlast.recovery import ElasticSpec
from outlast.rules.elastic import smaller_sizes
from outlast.sizing.of_spec import plan_input
from outlast.spec.parse import parse_spec
from tests.trainer.jobs_numbers import peak_bytes
from tests.trainer.ranks import RankPool
from trainer.core.estimate import plan
from trainer.core.projection import Machine, project
from trainer.data.step_batch import StepBatch, Wanted
from trainer.layouts import fastest_layouts
from trainer.model.attention import masked_sdpa
from trainer.model.documents import Documents
from trainer.parallel import flash
from trainer.parallel.comm import Comm
from trainer.parallel.pipeline import MicroBatch, Sentences
from trainer.parallel.ring import Seen, ring_attention

MACHINE = Machine(
    peak_flops_per_s=1e14,
    kernel_share=0.5,
    peer_bytes_per_s=1e11,
    link_bytes_per_s=1e10,
    ranks_per_node=2,
)
# [S, B]
SHAPE = (12, 2)


def micro_batch(number: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    tokens, targets, starts, segments = torch.randint(0, 9, (4, *SHAPE), generator=generator)
    return MicroBatch(
        tokens=tokens,
        # Some have no loss, in another number in each part.
        targets=torch.where(targets < 4, -1, targets),
        starts=starts,
        sentences=Sentences(segments=segments, swapped=torch.tensor([0, 1])),
        num_predicted=int((targets >= 4).sum()),
    )


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_rank_takes_its_part_of_tokens_and_targets_and_all_of_the_rest(num_parts: int) -> None:
    step = StepBatch.write(micro_batch, 3, step=1, replica=0, allocate=bytearray)
    parts = [
        step.on_host(Wanted(part=part, num_parts=num_parts), pinned=False)
        for part in range(num_parts)
    ]
    for number in range(3):
        whole, own = micro_batch(number), [part[number] for part in parts]
        assert torch.equal(torch.cat([each.tokens for each in own]), whole.tokens)
        assert torch.equal(torch.cat([each.targets for each in own]), whole.targets)
        counts = [int((each.targets >= 0).sum()) for each in own]
        assert [each.num_predicted for each in own] == counts
        assert sum(counts) == whole.num_predicted
        for each in own:
            assert whole.starts is not None
            assert torch.equal(
                each.starts if each.starts is not None else whole.tokens, whole.starts
            )
            assert each.sentences is not None
            assert whole.sentences is not None
            assert torch.equal(each.sentences.segments, whole.sentences.segments)


LONG = {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 256, "vocab_size": 256}


def document(**parallel: Any) -> dict[str, Any]:
    return {
        "name": "long",
        "steps": 2,
        "model": {**LONG, "positions": "rope"},
        "data": {"global_batch": 4, "max_bytes": 2**16},
        "eval": {"interval_steps": None},
        "parallel": {"micro_batch": 2, **parallel},
    }


def test_memory_of_activations_falls_with_the_number_of_parts(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Counted by torch's allocator; parameters, which every part has, are taken off."""
    kept, planned = [], []
    for cp in (1, 2, 4):
        found = plan(plan_input(parse_spec(document(cp=cp)))).ranks[0]
        state = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
        folder = tmp_path / str(cp)
        folder.mkdir()
        allocated = ranks.run(peak_bytes, cp, document(cp=cp), folder)
        kept.append(max(allocated) - state)
        planned.append(found.activations_bytes)
    assert kept[0] / kept[1] == pytest.approx(2, rel=0.15)
    assert kept[0] / kept[2] == pytest.approx(4, rel=0.25)
    # An attention's own output is kept beside the one that came back.
    assert planned[0] / planned[1] == pytest.approx(2, rel=0.15)
    assert planned[0] / planned[2] == pytest.approx(4, rel=0.15)


def test_a_smaller_size_has_as_many_ranks_for_each_replica() -> None:
    resources = {"workers_per_node": 2}
    spec = parse_spec({**document(cp=2, dp=2), "resources": resources})
    elastic = spec.recovery.model_copy(update={"elastic": ElasticSpec(min_dp=1)})
    (size,) = smaller_sizes(spec.model_copy(update={"recovery": elastic}))
    assert (size.layout.world_size, size.layout.cp, size.num_nodes) == (2, 2, 1)


def test_a_search_keeps_the_degree_that_is_held_and_fills_the_ranks() -> None:
    resources = {"nodes": 4, "workers_per_node": 2}
    data = {"global_batch": 8}
    spec = parse_spec({**document(cp=2), "data": data, "resources": resources})
    found = fastest_layouts(spec, MACHINE, 1e11, held=["cp"])
    assert found.specs
    assert {(each.layout.world_size, each.layout.cp) for each in found.specs} == {(8, 2)}


def test_exchanges_between_parts_take_time_in_a_projected_step() -> None:
    facts = plan_input(parse_spec(document(cp=2)))
    step = project(facts, MACHINE)
    sent = plan(facts).communication.cp_bytes
    # Queries, keys, values, outputs and their gradients: 2 micro-batches of 256 tokens, 4 layers.
    assert sent == 2 * 4 * 2 * 256 * 4 * 32 * 4 // 2
    assert step.tp_exposed_s == pytest.approx(sent / 1e11)
    alone = project(plan_input(parse_spec(document())), MACHINE)
    assert step.compute_s == pytest.approx(alone.compute_s / 2)
    assert np.isclose(alone.tp_exposed_s, 0.0)


@pytest.mark.parametrize(
    ("bidirectional", "window"), [(False, None), (False, 5), (True, None)], ids=str
)
def test_pieces_merge_to_attention_with_documents_apart(
    bidirectional: bool, window: int | None
) -> None:
    """All pieces on one rank, beside attention with a mask; queries share keys and values."""
    starts = torch.tensor([[0] * 3 + [3] * 13, [0] * 11 + [11] * 5])
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, heads, 16, 4, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    comm = Comm(group=Group.CP, ranks=(0,), index=0)
    pieces = (((0, 4), (4, 8), (8, 16)),)
    seen = Seen(pieces=pieces, bidirectional=bidirectional, window=window, starts_BS=starts)
    mask = Documents(starts.t(), bidirectional=bidirectional).mask(window)
    results = []
    for attention in (
        lambda *each: ring_attention(*each, comm, seen, None),
        lambda *each: masked_sdpa(*each, mask),
    ):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        out = attention(*inputs)
        out.backward(grad)
        results.append([out.detach(), *(each.grad for each in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "products"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)],
    ids=str,
)
def test_pieces_merge_to_attention_by_the_kernel_and_without_it(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Causal, queries sharing keys and values, pieces of different lengths."""
    assert flash.is_usable(torch.empty(1, 1, 1, 8, dtype=dtype))
    if not has_kernel:
        monkeypatch.setattr(flash, "is_usable", lambda _: False)
    generator = torch.Generator().manual_seed(2)
    q, k, v, grad = (
        torch.randn(2, heads, 48, 8, dtype=torch.float64, generator=generator).to(dtype)
        for heads in (4, 2, 2, 4)
    )
    comm = Comm(group=Group.CP, ranks=(0,), index=0)
    seen = Seen(pieces=(((0, 12), (12, 16), (16, 48)),))
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    wide = [each.double().requires_grad_() for each in (q, k, v)]
    out = ring_attention(*inputs, comm, seen, None)
    out.backward(grad)
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected.backward(grad.double())
    found = [out.detach(), *(each.grad for each in inputs)]
    for one, other in zip(found, [expected.detach(), *(each.grad for each in wide)], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_a_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = flash.attend

    def without_its_sums(*given: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = right(*given, **how)
        return out, sums + torch.arange(sums.shape[-1])

    monkeypatch.setattr(flash, "attend", without_its_sums)
    # Of widths that nothing else has: what was found is remembered.
    assert not flash.is_usable(torch.empty(1, 1, 1, 40))
    monkeypatch.undo()
    assert flash.is_usable(torch.empty(1, 1, 1, 48))
