"""A node that has lost its memory gets its ranks' state from another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.core.names import memory_folder
from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS
from checkpoint.replicas.fetch import Fetched, Fetcher, Source
from checkpoint.replicas.holder import Duty, Holder
from checkpoint.replicas.wire import Copy
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage.payload import NamedTensor
from tests.checkpoint.copying import (
    JOB,
    Spoiler,
    holding,
    make_replicated_stager,
    peer_at,
    save,
    sending,
)
from tests.checkpoint.helpers import make_tensors, same_bits, wait_for

TENSORS = make_tensors(1, ranks=2)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def held(tmp_path: Path, there: Path) -> Iterator[Holder]:
    """Another node with copies of steps 8 and 9 of rank 0, in attempt 2 of the job."""
    lost = tmp_path / "lost"
    stager = make_replicated_stager(lost, TENSORS)
    with holding(there) as holder:
        with sending(lost, peer_at(holder.port)):
            for step in (8, 9):
                save(stager, step)
                wait_for(lambda step=step: stager.newest_replicated == step, f"a copy of {step}")
        holder.take_duty(JOB, Duty(attempt=2, ranks=frozenset([0]), bytes_per_s=None))
        yield holder


def fetch(memory: Path, *ports: int, own: bool = False, rank: int = 0) -> Fetched:
    fetcher = Fetcher(JOB, 2, num_slots=NUM_SLOTS_WITH_REPLICAS, pause=lambda _: True)
    sources = [Source(peer=peer_at(port), rank=rank, own=own) for port in ports]
    try:
        return fetcher.fetch(0, memory / JOB / memory_folder(0), sources)
    finally:
        fetcher.close()


def steps_in(memory: Path, tensors: list[NamedTensor] = TENSORS) -> list[SealedStep]:
    return sealed_steps(memory / JOB / memory_folder(0), tensors)


def test_node_without_memory_gets_what_the_lost_one_had_brought(
    tmp_path: Path, held: Holder
) -> None:
    memory = tmp_path / "new"
    result = fetch(memory, held.port)
    assert result.copies == (Copy(1, 8), Copy(1, 9))
    assert result.nbytes > 0
    assert steps_in(memory) == [SealedStep(9, 1), SealedStep(8, 1)]
    loaded = make_tensors(2, ranks=2)
    extra = load_memory(memory / JOB / memory_folder(0), SealedStep(9, 1), loaded)
    assert extra == {"step": 9}
    assert same_bits(loaded, TENSORS)


def test_fetched_slots_are_kept_by_the_worker_that_goes_on_from_them(
    tmp_path: Path, held: Holder
) -> None:
    memory = tmp_path / "new"
    fetch(memory, held.port)
    stager = make_replicated_stager(memory, TENSORS, attempt=2)
    stager.resumed(9)
    assert stager.newest_sealed == 9
    # Whoever kept the copies may be another node now.
    assert stager.replica_busy


def test_node_that_has_as_new_a_step_itself_fetches_nothing(tmp_path: Path, held: Holder) -> None:
    memory = tmp_path / "lost"
    before = steps_in(memory)
    assert fetch(memory, held.port) == Fetched(rank=0)
    assert steps_in(memory) == before


def test_node_that_was_away_for_a_while_gets_the_newer_steps(tmp_path: Path, held: Holder) -> None:
    memory = tmp_path / "away"
    stager = make_replicated_stager(memory, TENSORS)
    for step in range(1, 7):
        stager.save(step, {}, upload=False, common_step=step - 1)
    assert fetch(memory, held.port).copies == (Copy(1, 8), Copy(1, 9))
    assert steps_in(memory)[:2] == [SealedStep(9, 1), SealedStep(8, 1)]


def test_state_of_a_rank_that_holds_the_same_is_as_good(tmp_path: Path, there: Path) -> None:
    """Data parallelism: the other one owns other tensors, so they lie in another order."""
    values = make_tensors(3)
    ours, theirs = values[:3], values[:3]
    turned = [theirs[2], theirs[0], theirs[1]]
    twin = make_replicated_stager(there, turned, rank=1)
    for step in (4, 5):
        twin.save(step, {"step": step}, upload=False, common_step=step - 1)
    memory = tmp_path / "new"
    with holding(there, attempt=2) as holder:
        result = fetch(memory, holder.port, own=True, rank=1)
    assert result.copies == (Copy(1, 4), Copy(1, 5))
    blank = [NamedTensor(t.name, t.tensor.clone().zero_(), t.global_shape, t.offsets) for t in ours]
    assert load_memory(memory / JOB / memory_folder(0), SealedStep(5, 1), blank) == {"step": 5}
    assert same_bits(blank, ours)


def test_holder_that_is_lost_too_is_said_and_the_next_source_is_asked(
    tmp_path: Path, held: Holder
) -> None:
    memory = tmp_path / "new"
    lost = fetch(memory, 1)
    assert lost.copies == ()
    assert "node other" in lost.problem
    assert fetch(memory, 1, held.port).copies == (Copy(1, 8), Copy(1, 9))


def test_byte_that_flips_on_the_way_back_is_noticed(tmp_path: Path, held: Holder) -> None:
    memory = tmp_path / "new"
    spoiler = Spoiler(held.port)
    spoiler.flip_back_at = 9_000
    try:
        result = fetch(memory, spoiler.port)
    finally:
        spoiler.close()
    assert "checksum" in result.problem
    assert steps_in(memory) == []
