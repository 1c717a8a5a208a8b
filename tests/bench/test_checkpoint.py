"""The checkpoint benchmark runs, at sizes at which its figures mean nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.checkpoint import checksums, saving
from bench.checkpoint.gpt import SIZES, SMALL
from bench.checkpoint.options import Options, ratio
from bench.checkpoint.restoring import measure_at
from bench.checkpoint.saving_claims import claims_of

pytestmark = pytest.mark.timeout(300)

TRY = Options(rounds=1, small=True, sizes=(SMALL,))


def test_every_way_of_saving_is_measured() -> None:
    rows, claims = saving.measure(TRY)
    pairs, others, beside = rows[0]["blocked_s"]
    assert {name: len(found) for name, found in pairs.items()} == {"plain": 9, "ours": 9}
    assert set(others) == {"plain", "torch_save", "dcp_thread", "dcp_process"}
    assert {name: len(found) for name, found in beside.items()} == {"plain": 9, "ours_beside": 9}
    groups = (pairs, others, beside)
    assert min(seconds for group in groups for found in group.values() for seconds in found) > 0
    assert min(rows[0]["checksum_delay_s"]) >= 0
    assert "quartiles of 9 pairs in random order" in claims[0].how
    assert {claim.claim for claim in claims} == {
        "stall_vs_memcpy",
        "stall_vs_memcpy_spare_core",
        "checksum_delay",
        "torch_save_vs_stall",
        "torch_save_vs_stall_spare_core",
        "dcp_async_vs_stall",
        "durable_vs_raw_store",
        "net_loss_vs_best_dcp",
        "net_loss_vs_best_dcp_computing",
        "step_slowdown_during_upload",
    }


def test_of_a_large_state_ours_go_before_torch_comes() -> None:
    large = replace(SMALL, name="4 GB", is_large=True)
    rows, claims = saving.measure(replace(TRY, sizes=(large,)))
    first, others, beside, second = rows[0]["blocked_s"]
    assert set(first) == {"plain", "ours"}
    assert set(others) == {"plain", "torch_save"}
    assert set(beside) == {"plain", "ours_beside"}
    assert set(second) == {"plain", "dcp_thread", "dcp_process"}
    assert set(rows[0]["lost_steps"]["launching"]) == {"ours", "dcp_thread", "dcp_process"}
    assert "net_loss_vs_best_dcp_4gb" in {claim.claim for claim in claims}


def test_all_ways_of_restoring_give_the_same_bytes(tmp_path: Path) -> None:
    """A rank that gets other bytes than were saved ends the run."""
    (row,) = measure_at(f"file://{tmp_path}", TRY, SMALL, (2,))
    assert set(row["seconds"]) == {*("ours", "ours_over_network", "every_rank_reads", "dcp_load")}


def test_checksums_are_measured() -> None:
    rows, _ = checksums.measure(TRY)
    assert min(rows[0]["gigabytes_per_s"].values()) > 0


def test_ratios_are_of_what_was_measured_in_the_same_round() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0


def test_what_was_measured_apart_is_held_against_the_copy_beside_it() -> None:
    """Twice as slow a machine while torch had its turn says nothing about torch."""
    row = {
        "nbytes": 4 * 10**9,
        "blocked_s": [
            {"plain": [1.0, 2.0], "ours": [1.0, 2.0]},
            {"plain": [1.0], "torch_save": [9.0]},
            {"plain": [1.0, 2.0], "ours_beside": [0.1, 0.2]},
            {"plain": [2.0], "dcp_thread": [3.0], "dcp_process": [4.0]},
        ],
        "checksum_delay_s": [0.4],
        "durable_s": {"ours": [2.0], "raw_1": [2.0], "raw_4": [1.8]},
        "lost_steps": {},
    }
    claims = {claim.claim: claim.value for claim in claims_of(SIZES["4"], row)}
    assert claims == {
        "stall_vs_memcpy_4gb": 1.0,
        "stall_vs_memcpy_spare_core_4gb": 0.1,
        "checksum_delay_4gb": 0.4,
        "torch_save_vs_stall_4gb": 9.0,
        "torch_save_vs_stall_spare_core_4gb": 90.0,
        "dcp_async_vs_stall_4gb": 1.5,
        "durable_vs_raw_store_4gb": 0.9,
    }
