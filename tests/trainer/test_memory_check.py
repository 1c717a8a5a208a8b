"""Too little host memory ends an attempt before it has begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import FatalError
from outlast.spec.parse import parse_spec
from tests.contracts import contract_of
from trainer.planning import host_memory_bytes, node_host_memory_bytes
from trainer.worker import memory_check
from trainer.worker.assignment import Assignment

SPEC: dict[str, Any] = {
    "name": "job",
    "model": {"layers": 4, "hidden": 64, "heads": 2, "seq_len": 16},
    "parallel": {"pp": 2, "dp": 2},
    "resources": {"workers_per_node": 2},
}


def assignment(folder: Path) -> Assignment:
    """Rank 0, which shares its node with rank 1."""
    contract = contract_of(
        folder,
        world_size=4,
        rank_nodes=("a", "a", "b", "b"),
        memory_dir=folder / "job-1" / "rank-00000",
        spec_json=json.dumps(SPEC),
    )
    return Assignment.of(contract)


@pytest.fixture
def needed() -> int:
    return host_memory_bytes(parse_spec(SPEC), [0, 1])


def test_enough_is_enough(needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda folder: needed)
    memory_check.check_memory(assignment(tmp_path))


def test_one_byte_too_few_is_refused_with_both_numbers(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda folder: needed - 1)
    problem = f"checkpoints of 2 ranks need up to {needed} bytes and there is room for {needed - 1}"
    with pytest.raises(FatalError, match=problem):
        memory_check.check_memory(assignment(tmp_path))


def test_slots_of_an_earlier_attempt_are_room(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda folder: needed - (1 << 20))
    slot = tmp_path / "job-1" / "rank-00001" / "slot-0"
    slot.parent.mkdir(parents=True)
    slot.write_bytes(bytes(1 << 20))
    memory_check.check_memory(assignment(tmp_path))


def test_a_node_of_the_largest_stage_needs_most() -> None:
    spec = parse_spec(SPEC)
    by_node = [host_memory_bytes(spec, ranks) for ranks in ([0, 1], [2, 3])]
    assert node_host_memory_bytes(spec) == max(by_node)
    assert by_node[0] != by_node[1]
