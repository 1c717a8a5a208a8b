"""Too little host memory ends an attempt before it has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint import memory_check
from checkpoint.memory_check import check_host_memory
from checkpoint.sizing import host_memory_bytes, node_host_memory_bytes
from outlast.errors import MisfitError, OccupiedError
from outlast.spec.parse import parse_spec

SPEC: dict[str, Any] = {
    "name": "job",
    "model": {"layers": 4, "hidden": 64, "heads": 2, "seq_len": 16},
    "parallel": {"pp": 2, "dp": 2},
    "resources": {"workers_per_node": 2},
}
RANKS = [0, 1]


@pytest.fixture
def needed() -> int:
    return host_memory_bytes(parse_spec(SPEC), RANKS)


def node_with(monkeypatch: pytest.MonkeyPatch, *, total: int, free: int) -> None:
    monkeypatch.setattr(memory_check, "most_host_memory_bytes", lambda folder: total)
    monkeypatch.setattr(memory_check, "free_bytes", lambda folder: free)


def test_enough_is_enough(needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_with(monkeypatch, total=needed, free=needed)
    check_host_memory(parse_spec(SPEC), RANKS, tmp_path / "not yet" / "job-1")


def test_one_byte_too_few_in_all_is_a_misfit_with_both_numbers(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_with(monkeypatch, total=needed - 1, free=needed - 1)
    problem = f"need {needed:,} bytes and it holds {needed - 1:,} bytes in all; enlarge this tmpfs"
    with pytest.raises(MisfitError, match=problem):
        check_host_memory(parse_spec(SPEC), RANKS, tmp_path / "job-1")


def test_one_byte_too_few_now_says_who_has_the_rest(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_with(monkeypatch, total=1 << 40, free=needed - 1)
    numbers = rf"need {needed:,} bytes and {needed - 1:,} bytes of {1 << 40:,} bytes are free"
    with pytest.raises(OccupiedError, match=f"{numbers}.*by something else"):
        check_host_memory(parse_spec(SPEC), RANKS, tmp_path / "job-1")
    other = tmp_path / "job-0" / "slot-0"
    other.parent.mkdir()
    other.write_bytes(bytes(1 << 20))
    with pytest.raises(OccupiedError, match=r"used by job-0 \(1\.0 MiB\)"):
        check_host_memory(parse_spec(SPEC), RANKS, tmp_path / "job-1")


def test_slots_of_an_earlier_attempt_are_room(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_with(monkeypatch, total=1 << 40, free=needed - (1 << 20))
    slot = tmp_path / "job-1" / "rank-00001" / "slot-0"
    slot.parent.mkdir(parents=True)
    slot.write_bytes(bytes(1 << 20))
    check_host_memory(parse_spec(SPEC), RANKS, tmp_path / "job-1")


def test_a_node_of_the_largest_stage_needs_most() -> None:
    spec = parse_spec(SPEC)
    by_node = [host_memory_bytes(spec, ranks) for ranks in ([0, 1], [2, 3])]
    assert node_host_memory_bytes(spec) == max(by_node)
    assert by_node[0] != by_node[1]
