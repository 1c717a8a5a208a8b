"""A checkpoint saved on one layout is the same model on any other, and trains on alike."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.storage import Storage
from outlast.blackbox import StepRecord
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import train
from tests.trainer.jobs_restore import (
    abandon_amid_messages,
    messages_of_hosts,
    restore_with_trouble,
    resumed_state,
)
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import (
    curve,
    dense_of,
    log_of,
    make_text,
    spec_of,
    steps_of,
    train_and_upload,
)

SAVED_AT, STEPS = 4, 8
PLAIN = {"layers": 4, "hidden": 16, "heads": 4, "seq_len": 16}
# Planes of gates, grouped queries, a head of its own, fused projections.
FANCY = PLAIN | {
    "block": "parallel",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "kv_heads": 2,
    "tied_embeddings": False,
}
INTERLEAVED = {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "micro_batch": 1}
FOLDED = {"pp": 2, "virtual_stages": 2, "schedule": "zb-v", "micro_batch": 1}
MODELS = {"plain": PLAIN, "fancy": FANCY}
CASES = {
    "tp2-pp2 to dp2-zero1": ({"tp": 2, "pp": 2}, {"dp": 2, "zero": {"level": 1}}, "plain"),
    "dp2-zero3 to tp4": ({"dp": 2, "zero": {"level": 3}}, {"tp": 4}, "plain"),
    "interleaved to tp2-dp2": (INTERLEAVED, {"tp": 2, "dp": 2}, "plain"),
    "dense to tp2-pp2-dp2-zero2": (
        {},
        {"tp": 2, "pp": 2, "dp": 2, "zero": {"level": 2}},
        "plain",
    ),
    "folded to tp2-pp2-zero1": (FOLDED, {"tp": 2, "pp": 2, "zero": {"level": 1}}, "plain"),
    "dp2-zero3 to folded-dp2-zero3": (
        {"dp": 2, "zero": {"level": 3}},
        {**FOLDED, "dp": 2, "zero": {"level": 3}},
        "plain",
    ),
    "folded to interleaved": (FOLDED, INTERLEAVED, "fancy"),
    "tp2-dp2-zero1 to dense": ({"tp": 2, "dp": 2, "zero": {"level": 1}}, {}, "fancy"),
    "uneven pp2 to uneven pp3": (
        {"pp": 2, "layer_split": [1, 3]},
        {"pp": 3, "layer_split": [2, 1, 1]},
        "fancy",
    ),
    "cp2 to dp2-zero1": ({"cp": 2}, {"dp": 2, "zero": {"level": 1}}, "plain"),
    "cp2-dp2-zero3 to dense": ({"cp": 2, "dp": 2, "zero": {"level": 3}}, {}, "fancy"),
    "tp2-pp2 to cp4": ({"tp": 2, "pp": 2}, {"cp": 4}, "fancy"),
    "cp2-tp2 to cp2-pp2-zero1": (
        {"cp": 2, "tp": 2},
        {"cp": 2, "pp": 2, "zero": {"level": 1}},
        "fancy",
    ),
    "dp4 to tp2-pp2-dp2": ({"dp": 4}, {"tp": 2, "pp": 2, "dp": 2}, "fancy"),
    "tp2-dp2-zero2 to dp4-zero3": (
        {"tp": 2, "dp": 2, "zero": {"level": 2}},
        {"dp": 4, "zero": {"level": 3}},
        "plain",
    ),
}


def spec_for(folder: Path, parallel: dict[str, Any], model: dict[str, Any], **more: Any) -> Any:
    return spec_of(
        folder,
        steps=STEPS,
        model=model,
        parallel=parallel,
        **({"precision": "fp64", "eval": {"interval_steps": None}} | more),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_text(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def dense_steps(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[StepRecord]]:
    """Steps after `SAVED_AT` of one process that trains a model without interruption."""

    @cache
    def steps(model: str, precision: str = "fp64") -> list[StepRecord]:
        folder = tmp_path_factory.mktemp("dense")
        make_text(folder)
        spec = spec_for(folder, {}, MODELS[model], precision=precision)
        ranks.run(train, 1, folder, spec, 1)
        return steps_of(folder, 1, 0)[SAVED_AT:]

    return steps


@pytest.fixture(scope="module")
def saved_by_two(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two ranks left in storage, and nothing in host memory."""
    folder = tmp_path_factory.mktemp("saved")
    make_text(folder)
    spec = spec_for(folder, {"tp": 2}, PLAIN)
    train_and_upload(ranks, folder, spec, attempt=1, stop_after=SAVED_AT)
    shutil.rmtree(folder / "memory")
    return folder


@pytest.fixture
def stored(saved_by_two: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(saved_by_two, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("case", CASES)
def test_state_is_bitwise_that_of_the_other_layout_and_trains_on_like_a_dense_model(
    ranks: RankPool, folder: Path, dense_steps: Callable[..., list[StepRecord]], case: str
) -> None:
    saved, loaded, name_of_model = CASES[case]
    model = MODELS[name_of_model]
    before, after = spec_for(folder, saved, model), spec_for(folder, loaded, model)
    train_and_upload(ranks, folder, before, attempt=1, stop_after=SAVED_AT)
    expected = ranks.run(resumed_state, parse_spec(before).layout.world_size, folder, before)
    assert {(rank["step"], rank["source"]) for rank in expected} == {(SAVED_AT, "host memory")}
    shutil.rmtree(folder / "memory")

    world_size = parse_spec(after).layout.world_size
    found = ranks.run(resumed_state, world_size, folder, after)
    assert {(rank["step"], rank["source"]) for rank in found} == {(SAVED_AT, "storage")}
    whole, back = dense_of(expected), dense_of(found)
    assert whole.keys() == back.keys()
    assert any(name.endswith(".exp_avg_sq") for name in whole)
    for name, values in whole.items():
        assert values.tobytes() == back[name].tobytes(), name
    check_that_every_byte_left_the_store_once(folder, found)

    ranks.run(train, world_size, folder, after, 2)
    dense = dense_steps(name_of_model)
    for one, two in zip(dense, steps_of(folder, 2, 0), strict=True):
        assert (two.step, two.loss) == (one.step, pytest.approx(one.loss, rel=1e-9))
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-9)


def check_that_every_byte_left_the_store_once(folder: Path, found: list[dict[str, Any]]) -> None:
    """Of each file all ranks together have read as many bytes as it has."""
    read: Counter[str] = Counter()
    for rank in found:
        read.update(rank["read_bytes"])
    storage = Storage(str(folder / "store" / "job-1"))
    _, manifest = storage.read_commit(SAVED_AT)
    storage.close()
    assert read == {f"step-{SAVED_AT:08d}.1/{part.file}": part.nbytes for part in manifest.parts}


def test_single_precision_trains_on_within_its_own_tolerance(
    ranks: RankPool, folder: Path, dense_steps: Callable[..., list[StepRecord]]
) -> None:
    """bf16 weights with fp32 masters: what is saved and loaded is the master."""
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 3e-2)):
        place = folder / precision
        place.mkdir()
        before = spec_for(folder, {"tp": 2, "dp": 2}, PLAIN, precision=precision)
        after = spec_for(folder, {"pp": 2}, PLAIN, precision=precision)
        train_and_upload(ranks, place, before, attempt=1, stop_after=SAVED_AT)
        shutil.rmtree(place / "memory")
        ranks.run(train, 2, place, after, 2)
        dense = dense_steps("plain", precision)
        for one, two in zip(dense, steps_of(place, 2, 0), strict=True):
            assert two.loss == pytest.approx(one.loss, rel=tolerance)


def test_ranks_of_all_hosts_exchange_messages(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(messages_of_hosts, 4)):
        assert found == {
            "largest": 3,
            "gathered": [b"", b"\x01", b"\x02\x02", b"\x03\x03\x03"],
            "from_rank_0": b"hello",
            "nothing": b"",
            "received": [10 * ((rank - 1) % 4), 10 * ((rank - 1) % 4) + 1],
        }


def test_a_rank_that_gives_up_leaves_though_others_still_send(ranks: RankPool) -> None:
    """Gloo's thread would read for ever at messages for which there is no place."""
    assert ranks.run(abandon_amid_messages, 3, timeout_s=20.0) == ["left", "told", "told"]


def test_a_corrupt_block_that_one_rank_reads_sends_all_back_together(
    ranks: RankPool, folder: Path
) -> None:
    """Two checkpoints of two ranks; the newer has a flipped bit, and four other ranks load."""
    before = spec_for(folder, {"tp": 2}, PLAIN, checkpoint={"storage_interval_steps": 2})
    after = spec_for(folder, {"pp": 2, "dp": 2}, PLAIN)
    train_and_upload(ranks, folder, before, attempt=1, stop_after=2)
    train_and_upload(ranks, folder, before, attempt=2, stop_after=2)
    shutil.rmtree(folder / "memory")
    storage = Storage(str(folder / "store" / "job-1"))
    _, manifest = storage.read_commit(SAVED_AT)
    storage.close()
    (payload,) = (folder / "store").glob(f"**/step-{SAVED_AT:08d}.2/{manifest.parts[-1].file}")
    raw = bytearray(payload.read_bytes())
    raw[len(raw) // 2] ^= 4
    payload.write_bytes(raw)

    ranks.run(train, 4, folder, after, 3)
    curves = [curve(steps_of(folder, 3, rank)) for rank in range(4)]
    assert curves[0][0][0] == 3
    assert all(other == curves[0] for other in curves)
    reasons = {
        line.split(": ", 1)[1]
        for rank in range(4)
        for line in log_of(folder, 3, rank).splitlines()
        if line.startswith(f"checkpoint step {SAVED_AT}")
    }
    assert len(reasons) == 1
    assert f"{payload.name}: bytes " in reasons.pop()
    note = json.loads((folder / "a3-rank-0.environment.json").read_text())
    ((step, reason),) = note["skipped"]
    assert (step, f"{payload.name}: bytes " in reason) == (SAVED_AT, True)
    # It is out of the way, and its bytes are kept.
    assert [path.name for path in (folder / "store").glob("**/quarantine/*")] == [
        f"{SAVED_AT:08d}.2.json"
    ]
    assert payload.exists()


@pytest.mark.parametrize("trouble", ["leaves", "hangs"])
def test_a_reader_that_is_gone_or_silent_ends_the_restore_of_all(
    ranks: RankPool, stored: Path, trouble: str
) -> None:
    """The others wait for it until their deadline, or until its connections break."""
    after = spec_for(stored, {"dp": 4}, PLAIN)
    found = ranks.run(restore_with_trouble, 4, stored, after, trouble, 1)
    assert found.pop(1).startswith("KeyboardInterrupt")
    for told in found:
        assert re.match(r"PeerLostError: (restore waited for rank \d: )?world .* failed: ", told)
    assert any("restore waited for rank 1: world recv" in told for told in found)


def test_a_store_that_is_silent_for_one_rank_is_the_same_error_on_all(
    ranks: RankPool, stored: Path
) -> None:
    after = spec_for(stored, {"dp": 4}, PLAIN)
    told = set(ranks.run(restore_with_trouble, 4, stored, after, "silent", 1))
    assert len(told) == 1
    assert re.match(r"StorageUnavailableError: .*cannot read .*: no answer in 1 s", told.pop())


def test_a_store_that_does_not_answer_is_waited_for(ranks: RankPool, stored: Path) -> None:
    after = spec_for(stored, {"dp": 4}, PLAIN)
    undisturbed = ranks.run(restore_with_trouble, 4, stored, after, "", 1)
    assert all(told.startswith(f"step {SAVED_AT}: ") for told in undisturbed)
    assert ranks.run(restore_with_trouble, 4, stored, after, "away", 1, 60.0) == undisturbed


@pytest.mark.parametrize(
    ("trouble", "patience_s", "reason"),
    [("gone", 1.0, "nobody is there"), ("forbidden", 600.0, "not yours")],
)
def test_a_store_that_stays_away_or_refuses_is_not_waited_for_any_longer(
    ranks: RankPool, stored: Path, trouble: str, patience_s: float, reason: str
) -> None:
    after = spec_for(stored, {"dp": 4}, PLAIN)
    told = set(ranks.run(restore_with_trouble, 4, stored, after, trouble, 1, patience_s))
    assert len(told) == 1
    assert re.match(rf"StorageUnavailableError: .*cannot read .*: .*{reason}", told.pop())
