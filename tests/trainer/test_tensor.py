"""Tensor-parallel layers: equal to dense ones, whatever overlaps, and cheap as promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outlast.blackbox import Group
from tests.trainer.jobs_tensor import (
    STEP,
    LinearCase,
    embedding_layer,
    linear_layers,
    linear_losses,
)
from tests.trainer.ranks import RankPool
from trainer.parallel.comm import Comm
from trainer.parallel.overlap import pieces
from trainer.parallel.tensor import TensorParallel

NAMES = ("out", "x", "weight", "bias")
# Rank shards have 12 (tp 2) and 6 (tp 4) rows: 4 and 5 chunks divide neither or one.
CASES = tuple(
    LinearCase(kind=kind, sequence_parallel=split, chunks=chunks)
    for kind in ("column", "row")
    for split in (True, False)
    for chunks in (1, 2, 3, 4, 5, 100)
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_equal_the_dense_one(ranks: RankPool, world_size: int) -> None:
    cases = tuple(replace(case, features=12) for case in CASES)
    for case, found in _found(ranks, world_size, cases):
        dense = _dense(case)
        for name in NAMES:
            joined = _joined(case, name, found)
            np.testing.assert_allclose(
                joined, dense[name], rtol=1e-12, atol=1e-12, err_msg=f"{name} of {case}"
            )


@pytest.mark.parametrize("world_size", [2, 4])
def test_chunks_lose_and_repeat_nothing(ranks: RankPool, world_size: int) -> None:
    """Sums of integers are exact in every order, so the bits must be those of one chunk."""
    cases = tuple(replace(case, integers=True) for case in CASES)
    first: dict[tuple[str, bool], Any] = {}
    for case, found in _found(ranks, world_size, cases):
        plain = first.setdefault((case.kind, case.sequence_parallel), found)
        for one, other in zip(plain, found, strict=True):
            for name in NAMES:
                assert one[name].tobytes() == other[name].tobytes(), f"{name} of {case}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_large_messages_in_fp32(ranks: RankPool, world_size: int) -> None:
    """Messages beyond every buffer; what differs from fp64 is rounding."""
    cases = tuple(
        replace(case, dtype="fp32", seq_len=1020, width=128, features=32)
        for case in CASES
        if case.chunks in (1, 4)
    )
    for case, found in _found(ranks, world_size, cases):
        dense = _dense(case)
        for name in NAMES:
            error = np.abs(_joined(case, name, found) - dense[name]).max()
            assert error <= 1e-4 * np.abs(dense[name]).max(), f"{name} of {case}"


def test_bf16(ranks: RankPool) -> None:
    """8 bits of mantissa: 1/128 per rounding, and at most three of them."""
    cases = tuple(replace(case, dtype="bf16") for case in CASES)
    for case, found in _found(ranks, 2, cases):
        dense = _dense(case)
        for name in NAMES:
            error = np.abs(_joined(case, name, found) - dense[name]).max()
            assert error <= 3 / 128 * np.abs(dense[name]).max(), f"{name} of {case}"


def test_same_chunks_twice_give_the_same_bits(ranks: RankPool) -> None:
    cases = tuple(
        replace(case, dtype="fp32", seq_len=120, width=32) for case in CASES if case.chunks == 3
    )
    once = _found(ranks, 4, cases)
    for (case, one), (_, other) in zip(once, _found(ranks, 4, cases), strict=True):
        for mine, again in zip(one, other, strict=True):
            for name in NAMES:
                assert mine[name].tobytes() == again[name].tobytes(), f"{name} of {case}"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_finite_differences(ranks: RankPool, world_size: int, chunks: int) -> None:
    cases = tuple(
        replace(case, seq_len=4, features=4, width=2) for case in CASES if case.chunks == chunks
    )
    losses = ranks.run(linear_losses, world_size, cases)
    for index, (case, found) in enumerate(_found(ranks, world_size, cases)):
        for name in ("x", "weight", "bias"):
            moved = np.stack([rank_losses[index][name] for rank_losses in losses])
            # Ranks that hold copies of the output all have the same loss.
            loss = moved[0] if case.shard_dims()["grad"] is None else moved.sum(axis=0)
            numeric = (loss[:, 0] - loss[:, 1]) / (2 * STEP)
            gradient = _joined(case, name, found)
            np.testing.assert_allclose(
                gradient.reshape(-1), numeric, rtol=1e-6, atol=1e-7, err_msg=f"{name} of {case}"
            )


def test_a_bias_may_be_absent(ranks: RankPool) -> None:
    cases = tuple(replace(case, has_bias=False) for case in CASES if case.chunks <= 2)
    for case, found in _found(ranks, 2, cases):
        dense = _dense(case)
        for name in ("out", "x", "weight"):
            np.testing.assert_allclose(_joined(case, name, found), dense[name], rtol=1e-12)
        assert all(result["bias"] is None for result in found)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_follow_the_formula(ranks: RankPool, world_size: int) -> None:
    """A whole sequence of N bytes costs N(n-1)/n per gather or scatter, whatever the chunks.

    Forward has one of them and backward the opposite; a column layer gathers its
    input once more. An all-reduce counts twice. Source: Korthikanti et al., 4.2.2.
    """
    cases = tuple(
        replace(case, dtype="fp32", seq_len=1200, width=512, features=8, batch=1)
        for case in CASES
        if case.chunks in (1, 4)
    )
    for case, found in _found(ranks, world_size, cases):
        one = 4 * case.seq_len * case.width * (world_size - 1) // world_size
        column = case.kind == "column"
        if case.sequence_parallel:
            expected = (one, 2 * one if column else one)
        else:
            expected = (0, 2 * one) if column else (2 * one, 0)
        for result in found:
            assert (result["forward_bytes"], result["backward_bytes"]) == expected, case


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_shard_is_saved_and_not_the_gathered_input(ranks: RankPool, chunks: int) -> None:
    case = LinearCase(kind="column", sequence_parallel=True, chunks=chunks)
    for result in _found(ranks, 2, (case,))[0][1]:
        shard = case.seq_len // 2 * case.batch * case.width
        assert result["num_saved"] == shard + case.features // 2 * case.width


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_embedding_equals_the_dense_one(ranks: RankPool, world_size: int, split: bool) -> None:
    found = ranks.run(embedding_layer, world_size, split)
    generator = torch.Generator().manual_seed(9)
    table = torch.randn(8, 3, dtype=torch.float64, generator=generator).requires_grad_()
    out = F.embedding(torch.randint(0, 8, (8, 2), generator=generator), table)
    out.backward(torch.arange(48, dtype=torch.float64).view(8, 2, 3))
    outs = [result["out"] for result in found]
    for joined in [np.concatenate(outs)] if split else outs:
        np.testing.assert_array_equal(joined, out.detach().numpy())
    gradient = np.concatenate([result["grad"] for result in found])
    np.testing.assert_array_equal(gradient, table.grad)


@pytest.mark.parametrize(
    ("num_rows", "chunks", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [2, 2, 3]), (2, 5, [1, 1]), (5, 1, [5]), (0, 4, [0])],
)
def test_pieces_cover_all_rows(num_rows: int, chunks: int, sizes: list[int]) -> None:
    found = pieces(num_rows, chunks)
    assert [piece.stop - piece.start for piece in found] == sizes
    assert found[0].start == 0
    assert found[-1].stop == num_rows


def test_messages_are_not_cut_smaller_than_they_are_worth() -> None:
    comm = Comm(group=Group.TP, ranks=(0,), index=0)
    tp = TensorParallel(comm=comm, sequence_parallel=True, chunks=4, min_piece_bytes=1024)
    for rows, expected in ((8, 1), (16, 2), (31, 3), (32, 4), (64, 4)):
        assert len(tp.pieces(torch.zeros(rows, 32))) == expected, rows


def test_fewer_than_one_chunk_is_refused() -> None:
    comm = Comm(group=Group.TP, ranks=(0,), index=0)
    with pytest.raises(ValueError, match="chunks is 0, must be at least 1"):
        TensorParallel(comm=comm, sequence_parallel=False, chunks=0)


def _found(
    ranks: RankPool, world_size: int, cases: tuple[LinearCase, ...]
) -> list[tuple[LinearCase, list[Any]]]:
    """Every case with what each rank found."""
    found = ranks.run(linear_layers, world_size, cases)
    return [(case, [result[index] for result in found]) for index, case in enumerate(cases)]


def _dense(case: LinearCase) -> dict[str, np.ndarray]:
    tensors = {name: tensor.double() for name, tensor in case.tensors().items()}
    leaves = {name: tensors[name].requires_grad_() for name in ("x", "weight", "bias")}
    out = F.linear(leaves["x"], leaves["weight"], leaves["bias"] if case.has_bias else None)
    out.backward(tensors["grad"])
    grads = {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}
    return grads | {"out": out.detach().numpy()}


def _joined(case: LinearCase, name: str, found: list[Any]) -> np.ndarray:
    """The whole layer's tensor from what the ranks hold."""
    dim = case.shard_dims()["grad" if name == "out" else name]
    shards = [result[name] for result in found]
    if dim is not None:
        return np.concatenate(shards, axis=dim)
    if name == "bias" and case.sequence_parallel:
        # Each rank saw its own part of the sequence only; the trainer adds them up.
        return np.sum(shards, axis=0)
    for shard in shards:
        np.testing.assert_array_equal(shard, shards[0])
    return np.asarray(shards[0])
