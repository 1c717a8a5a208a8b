"""What each stage of a pipeline is given of a step, and that losses do not depend on who reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outlast import local_socket
from outlast.blackbox import Group
from outlast.errors import SettingError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.tokens.corpora import counted, write
from tests.trainer.jobs_numbers import losses, sent
from tests.trainer.places import place_of
from tests.trainer.ranks import RankPool
from tests.trainer.test_documents import documents, instructions, packed
from trainer.data.node import NodeLoader, SplitId
from trainer.data.serving import Server
from trainer.data.step_batch import NOTHING, Parts, Wanted
from trainer.parallel.pipeline import MicroBatch
from trainer.worker.feeding import Feeding, numbered, open_data, open_splits

SEQ_LEN, GLOBAL_BATCH, VOCAB = 16, 4, 258
FIRST, MIDDLE, LAST = range(3)
MASK = {"fraction": 0.3, "mask_token": 256}


def plain(folder: Path) -> dict[str, Any]:
    return {"tokens": str(write(folder / "a", [counted(3000)])), "validation_fraction": 0.2}


def masked(folder: Path) -> dict[str, Any]:
    return {**plain(folder), "masked": MASK}


def masked_text(folder: Path) -> dict[str, Any]:
    return {"max_bytes": 2**14, "masked": MASK}


def packed_documents(folder: Path) -> dict[str, Any]:
    return {**documents(folder), "packing": "whole"}


def masked_documents(folder: Path) -> dict[str, Any]:
    return {**documents(folder), "masked": MASK}


Make = Callable[[Path], dict[str, Any]]
ALL_ARE_ONE: tuple[Make, ...] = (plain, masked, masked_text, instructions)
APART: tuple[Make, ...] = (documents, masked_documents, packed_documents, packed)


def document_of(data: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    both_ways = {"attention": "bidirectional"} if "masked" in data else {}
    return {
        "name": "a",
        "steps": 3,
        "precision": "fp64",
        "model": {
            "layers": 3,
            "hidden": 16,
            "heads": 2,
            "ffn_hidden": 32,
            "seq_len": SEQ_LEN,
            "vocab_size": VOCAB,
            **both_ways,
        },
        "data": {"global_batch": GLOBAL_BATCH, **data},
        "parallel": parallel,
        "eval": {"interval_steps": 3, "batches": 2},
    }


def opened(spec: JobSpec, stage: int, folder: Path, node: NodeLoader | None) -> Feeding:
    mesh = place_of(is_first_stage=stage == FIRST, has_loss=stage == LAST)
    return open_data(spec, mesh, folder, node)


@contextmanager
def served(
    spec: JobSpec, data_dir: Path, folder: Path, *, steps_ahead: int = 0
) -> Iterator[tuple[Path, Server]]:
    """A node's loader; without steps ahead, what it has read was asked for."""
    path, read = folder / "data.sock", numbered(open_splits(spec, data_dir))
    last_steps = dict.fromkeys(read, spec.eval.batches) | {SplitId.TRAIN: spec.steps}
    with local_socket.listen(path) as listening:
        server = Server(listening, read, steps_ahead=steps_ahead, last_steps=last_steps)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield path, server
        finally:
            server.end()
            thread.join()
            server.close()


def taken(feeding: Feeding) -> list[list[MicroBatch]]:
    """What a stage has of a step of training, and of one of evaluation."""
    loaders = (feeding.train, feeding.evaluations[""])
    found = [loader.micro_batches(1) for loader in loaders]
    for loader in loaders:
        loader.close()
    return found


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("loader", ["rank", "node"])
@pytest.mark.parametrize("make", [*ALL_ARE_ONE, *APART])
def test_a_stage_is_given_what_it_uses(tmp_path: Path, make: Make, loader: str) -> None:
    spec = parse_spec(document_of({**make(tmp_path), "loader": loader}, pp=3))
    splits, reads = open_splits(spec, tmp_path), []
    whole = [
        split.read(1, 0, Parts.WHOLE).on_host(Wanted(), pinned=False)
        for split in (splits.train, splits.evaluations[""])
    ]
    with served(spec, tmp_path, tmp_path) as (path, server):
        for stage in (FIRST, MIDDLE, LAST):
            node = NodeLoader(path, start_s=30.0) if loader == "node" else None
            for batches, full in zip(
                taken(opened(spec, stage, tmp_path, node)), whole, strict=True
            ):
                for one, other in zip(batches, full, strict=True):
                    assert same(one.tokens, other.tokens if stage == FIRST else NOTHING)
                    assert same(one.targets, other.targets if stage == LAST else NOTHING)
                    assert same(one.starts, other.starts)
                    assert one.num_predicted == (0 if stage == MIDDLE else other.num_predicted)
            reads.append(server.num_reads)
    # Of both splits; the ends share what is read for them.
    of_middle = 2 if make in APART else 0
    assert reads == ([2, 2 + of_middle, 2 + of_middle] if loader == "node" else [0, 0, 0])
    assert all((batch.starts is None) == (make in ALL_ARE_ONE) for batch in whole[0])


@pytest.mark.parametrize("make", APART)
def test_a_stage_in_the_middle_is_sent_starts_alone(tmp_path: Path, make: Make) -> None:
    spec = parse_spec(document_of(make(tmp_path), pp=3))
    with served(spec, tmp_path, tmp_path) as (path, _):
        node = NodeLoader(path, start_s=30.0)
        sent = [node.ask(SplitId.TRAIN, 1, 0, parts) for parts in (Parts.STARTS, Parts.WHOLE)]
        node.close()
        starts, whole = (np.frombuffer(memory or b"", "<i4") for memory in sent)
    num_ids = GLOBAL_BATCH * SEQ_LEN
    # Beside the ids are 40 bytes of header and 8 for each micro-batch.
    assert [each.size - (40 + 8 * GLOBAL_BATCH) // 4 for each in (starts, whole)] == [
        num_ids,
        3 * num_ids,
    ]
    assert np.array_equal(starts[-num_ids:], whole[-num_ids:])


@pytest.mark.parametrize("loader", ["rank", "node"])
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_no_token_is_looked_at_for_a_stage_in_the_middle(
    tmp_path: Path, packing: str, loader: str
) -> None:
    """What the ends fail at does not exist for it."""
    name = write(tmp_path / "large", [[VOCAB] * length for length in (30, 9, 70, 14) * 9])
    data = {"tokens": str(name), "packing": packing, "document_mask": True, "loader": loader}
    spec = parse_spec(document_of({**data, "validation_fraction": 0.2}, pp=3))
    with served(spec, tmp_path, tmp_path) as (path, _):
        for stage in (FIRST, MIDDLE, LAST):
            node = NodeLoader(path, start_s=30.0) if loader == "node" else None
            feeding = opened(spec, stage, tmp_path, node)
            if stage == MIDDLE:
                for batch in (batch for batches in taken(feeding) for batch in batches):
                    assert batch.starts is not None
                    assert batch.starts.shape == (SEQ_LEN, 1)
                continue
            with pytest.raises(SettingError, match=f"has the id {VOCAB}"):
                feeding.train.micro_batches(1)
            feeding.train.close()


@pytest.mark.parametrize("make", [masked_text, masked, instructions, documents, packed_documents])
def test_losses_are_the_same_whoever_reads(ranks: RankPool, tmp_path: Path, make: Make) -> None:
    data = make(tmp_path)
    (dense,) = ranks.run(losses, 1, document_of(data), tmp_path / "dense")
    alone, shared = (
        document_of({**data, "loader": loader}, pp=3, dp=2) for loader in ("rank", "node")
    )
    found = ranks.run(losses, 6, alone, folder := tmp_path / "pipeline")
    spec = parse_spec(shared)
    with served(spec, folder / "data", tmp_path, steps_ahead=2) as (path, server):
        # Bit by bit, on every rank.
        assert ranks.run(losses, 6, shared, folder, path) == found
        # Three steps and two of evaluation, of two replicas; for the middle where documents begin.
        assert server.num_reads == (3 + 2) * 2 * (2 if make in APART else 1)
    assert all(result == found[0] for result in found)
    assert found[0]["loss"] == pytest.approx(dense["loss"], rel=1e-10)
    assert found[0]["held_out"] == pytest.approx(dense["held_out"], rel=1e-10)


def test_only_the_last_stage_counts_what_has_a_loss(ranks: RankPool, tmp_path: Path) -> None:
    nbytes = []
    for make in (plain, masked):
        folder = tmp_path / make.__name__
        folder.mkdir()
        document = document_of(make(folder), pp=3, dp=2)
        nbytes.append([each[Group.DP][0] for each in ranks.run(sent, 6, document, folder)])
    # One number of 64 bits, to the other replica.
    assert [with_count - of_all for of_all, with_count in zip(*nbytes, strict=True)] == [
        *[0] * 4,
        *[8] * 2,
    ]
