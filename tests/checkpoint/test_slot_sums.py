"""No bit of host memory changes unnoticed: not on its way to tensors, storage or other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.checksums import CHECKSUM, block_checksums
from checkpoint.core.blocks import blocks_of, num_blocks
from checkpoint.core.manifest import BLOCK_BYTES
from checkpoint.core.names import memory_folder, replica_folder
from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS, newest_without
from checkpoint.errors import CorruptCheckpointError
from checkpoint.replicas.fetch import Fetcher, Source
from checkpoint.replicas.wire import Copy
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage import guarding, slotfile
from checkpoint.stage.damage import Damage, take_notes
from checkpoint.stage.guarding import Guard
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.slot_sums import ensure_sums, has_sums, owned_sums, stored_sums, verify
from checkpoint.stage.slotfile import SlotFile
from checkpoint.storage.storage import Storage
from tests.checkpoint.copying import (
    JOB,
    holding,
    make_replicated_stager,
    peer_at,
    save,
    sending,
)
from tests.checkpoint.helpers import (
    DEADLINE_S,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)


def sealed_slots(folder: Path) -> dict[int, SlotFile]:
    return {slot.read().step: slot for slot in slotfile.open_existing(folder) if slot.read().sealed}


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file, as a bad memory cell does: no time stamp or lock tells of it."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def save_steps(memory: Path, tensors: list[NamedTensor], *steps: int) -> None:
    stager = make_stager(memory, tensors)
    for step in steps:
        tensors[0].tensor.fill_(step)
        assert stager.save(step, {"step": step}, upload=False, common_step=step - 1)
    stager.close()


def summed(folder: Path) -> dict[int, SlotFile]:
    slots = sealed_slots(folder)
    for slot in slots.values():
        assert ensure_sums(slot) is not None
    return slots


def restored(folder: Path) -> tuple[int, list[NamedTensor]] | None:
    """What a rank comes back with: the newest step that can be loaded."""
    tensors = make_tensors(9)
    for sealed in sealed_steps(folder, tensors):
        try:
            extra = load_memory(folder, sealed, tensors)
        except CorruptCheckpointError:
            continue
        assert extra == {"step": sealed.step}
        return sealed.step, tensors
    return None


@given(
    payload=st.integers(0, 5 * BLOCK_BYTES), owned=st.integers(0, 5 * BLOCK_BYTES).map(lambda n: n)
)
def test_blocks_cover_every_byte_once_and_begin_as_the_parts_in_storage_do(
    payload: int, owned: int
) -> None:
    owned = min(owned, payload)
    blocks = blocks_of(payload, owned)
    assert len(blocks) == num_blocks(payload, owned)
    ends = [0, *(end for _, end in blocks)]
    assert [start for start, _ in blocks] == ends[:-1]
    assert ends[-1] == payload
    in_storage = [start for start, _ in blocks if start < owned]
    assert in_storage == list(range(0, owned, BLOCK_BYTES))


def test_sums_are_those_of_what_is_owned_and_then_of_the_rest(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    save_steps(tmp_path, [*tensors[:2], *(t._replace(owned=False) for t in tensors[2:])], 1)
    (slot,) = summed(tmp_path / memory_folder(0)).values()
    sums = stored_sums(slot)
    assert sums is not None
    with slot.owned as owned:
        of_owned = tuple(block_checksums(CHECKSUM, owned, BLOCK_BYTES))
    assert owned_sums(slot, sums) == of_owned
    assert 0 < len(of_owned) < len(sums)


def test_a_flipped_bit_anywhere_in_a_slot_is_never_restored(tmp_path: Path) -> None:
    """In every word of the header, in `extra`, all over the payload and in the checksums.

    Of two steps the older one is restored instead, or this one when the bit says nothing of it.
    """
    folder = tmp_path / memory_folder(0)
    tensors = make_tensors(1)
    save_steps(tmp_path, tensors, 1, 2)
    slots = summed(folder)
    newest, older = slots[2].path, slots[1].path
    whole = newest.read_bytes()
    payload_end = slotfile.sums_at(slots[2].payload_bytes)
    used = [*range(0, 34 * 8, 3), *range(slotfile.HEADER_BYTES, slotfile.HEADER_BYTES + 12)]
    used += [*range(slotfile.PAYLOAD_AT, payload_end, 19), *range(payload_end, len(whole))]
    wanted = {2: make_tensors(1), 1: make_tensors(1)}
    for step, each in wanted.items():
        each[0].tensor.fill_(step)
    found: dict[int, int] = {1: 0, 2: 0}
    for at in used:
        flip(newest, at, at % 8)
        result = restored(folder)
        assert result is not None, f"byte {at}: not even the older step"
        step, loaded = result
        assert same_bits(loaded, wanted[step]), f"byte {at}: other bits as step {step}"
        in_payload = slotfile.PAYLOAD_AT <= at < slotfile.PAYLOAD_AT + slots[2].payload_bytes
        assert not in_payload or step == 1, f"byte {at} of the payload was not found"
        notes = take_notes(tmp_path)
        assert [note.rank for note in notes] == [0] * len(notes)
        assert not in_payload or len(notes) == 1
        found[step] += 1
        newest.write_bytes(whole)
    assert found[1] > (payload_end - slotfile.PAYLOAD_AT) / 19 - 8
    # What a bit says nothing of: where uploads stand, when checksums were made, unused words.
    assert found[2] > 0
    assert restored(folder) is not None
    assert older.exists()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_flipped_bit_in_the_shard_table_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    memory = tmp_path_factory.mktemp("memory")
    folder = memory / memory_folder(0)
    save_steps(memory, make_tensors(1), 1)
    summed(folder)
    table = folder / slotfile.TABLE_FILE
    at = data.draw(st.integers(0, table.stat().st_size - 1))
    flip(table, at, data.draw(st.integers(0, 7)))
    assert restored(folder) is None
    (damage,) = take_notes(memory)
    assert (damage.rank, damage.slot, damage.step) == (0, -1, 1)
    assert restored(folder) is None
    assert take_notes(memory) == []


def test_what_is_overwritten_while_it_is_summed_gets_no_checksums(tmp_path: Path) -> None:
    """Nobody waits for anybody: the stager takes the slot in the middle of the sums."""
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    folder = tmp_path / memory_folder(0)
    for step in (1, 2, 3):
        assert stager.save(step, {}, upload=False, common_step=-1)
    slot = sealed_slots(folder)[1]

    def overwrite() -> bool:
        assert stager.save(4, {}, upload=False, common_step=-1)
        assert slot.read().step == 4
        return False

    assert ensure_sums(slot, overwrite) is None
    assert not has_sums(slot)
    assert stored_sums(slot) is None
    assert ensure_sums(slot) is not None


def test_checksums_of_an_older_seal_are_not_taken_for_those_of_a_newer_one(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    assert stager.save(1, {}, upload=False, common_step=-1)
    (slot,) = summed(tmp_path / memory_folder(0)).values()
    assert has_sums(slot)
    for step in (2, 3, 4):
        assert stager.save(step, {}, upload=False, common_step=-1)
    assert slot.read().step == 4
    assert not has_sums(slot)
    assert stored_sums(slot) is None


def test_of_unsummed_slots_the_newest_comes_first(tmp_path: Path) -> None:
    save_steps(tmp_path, make_tensors(1), 1, 2, 3)
    slots = sealed_slots(tmp_path / memory_folder(0))
    facts = [slot.read() for slot in slots.values()]
    assert newest_without((), facts) == slots[3].index
    assert newest_without({slots[3].index}, facts) == slots[2].index
    assert newest_without({slot.index for slot in slots.values()}, facts) is None


@pytest.fixture
def damages() -> list[Damage]:
    return []


@pytest.fixture
def guard(tmp_path: Path, damages: list[Damage]) -> Iterator[Guard]:
    guard = Guard("job-1", tmp_path, [0], damages.append)
    guard.start()
    yield guard
    guard.stop()


def test_every_sealed_slot_gets_checksums_and_the_window_is_counted(
    tmp_path: Path, guard: Guard
) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    for step in (1, 2, 3):
        assert stager.save(step, {}, upload=False, common_step=step - 1)
        slot = sealed_slots(tmp_path / memory_folder(0))[step]
        wait_for(lambda slot=slot: has_sums(slot), f"checksums of step {step}")
        sums = stored_sums(slot)
        assert sums is not None
        verify(slot, sums)
    wait_for(lambda: guard.counts().summed == 3, "three slots")
    counts = guard.counts()
    assert counts.nbytes == 3 * slot.payload_bytes
    assert 0 < counts.delay_s < DEADLINE_S
    assert (counts.damaged, counts.overwritten) == (0, 0)


def test_what_a_rank_refuses_is_reported_by_its_agent_once(
    tmp_path: Path, guard: Guard, damages: list[Damage]
) -> None:
    folder = tmp_path / memory_folder(0)
    save_steps(tmp_path, make_tensors(1), 1, 2)
    slots = sealed_slots(folder)
    wait_for(lambda: all(has_sums(slot) for slot in slots.values()), "checksums")
    flip(slots[2].path, slotfile.PAYLOAD_AT + 9, 6)
    result = restored(folder)
    assert result is not None
    assert result[0] == 1
    wait_for(lambda: damages != [], "the report")
    (damage,) = damages
    assert (damage.rank, damage.slot, damage.step) == (0, slots[2].index, 2)
    assert "host memory, slot 1 of rank 0: bytes 0 to " in damage.what
    assert restored(folder) is not None
    guard.stop()
    assert len(damages) == 1
    assert guard.counts().damaged == 1


@pytest.mark.parametrize("word", [4, 9], ids=["payload", "owned"])
@pytest.mark.parametrize(("byte", "bit"), [(0, 0), (2, 3), (7, 7)])
def test_a_mapped_slot_whose_sizes_are_damaged_is_refused_and_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: int, byte: int, bit: int
) -> None:
    folder = tmp_path / memory_folder(0)
    stager = make_stager(tmp_path, make_tensors(1))
    for step in (1, 2):
        assert stager.save(step, {}, upload=False, common_step=step - 1)
    damages: list[Damage] = []
    flipped: list[Path] = []

    def flip_first(slot: SlotFile) -> bool:
        if slot.read().step == 2 and not flipped:
            flipped.append(slot.path)
            flip(slot.path, 8 * word + byte, bit)
        return has_sums(slot)

    monkeypatch.setattr(guarding, "has_sums", flip_first)
    guard = Guard("job-1", tmp_path, [0], damages.append)
    guard.start()
    wait_for(lambda: guard.counts().summed == 1, "checksums of step 1")
    wait_for(lambda: damages != [], "the report")
    guard.stop()
    assert [damage.step for damage in damages] == [2]
    assert "its header is not what was sealed" in damages[0].what
    assert list(sealed_slots(folder)) == [1]
    # Whoever fills it next makes it whole again.
    assert stager.save(3, {}, upload=False, common_step=1)
    assert stager.save(4, {}, upload=False, common_step=3)
    assert flipped[0] in {slot.path for slot in sealed_slots(folder).values()}


def test_a_slot_that_has_no_checksums_yet_is_taken_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path, make_tensors(1), 1)
    result = restored(tmp_path / memory_folder(0))
    assert result is not None
    assert "step 1 was sealed, but had no checksums yet" in capsys.readouterr().err


def test_damaged_memory_does_not_reach_storage(tmp_path: Path) -> None:
    url, memory = f"file://{tmp_path}/store/job-1", tmp_path / "memory"
    tensors = make_tensors(1)
    stager = make_stager(memory, tensors)
    assert stager.save(1, {}, upload=True, common_step=-1)
    (slot,) = summed(memory / memory_folder(0)).values()
    flip(slot.path, slotfile.PAYLOAD_AT + slot.owned_bytes - 1)
    with uploading(url, memory) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
        assert (news.committed, news.trouble) == ([], [])
        (damage,) = take_notes(memory)
        assert (damage.rank, damage.step) == (0, 1)
        assert stager.newest_sealed == -1
        assert list((tmp_path / "store").glob("**/step-*")) == []
        # The next one is stored as if nothing had been.
        assert stager.save(2, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [2]
    assert Storage(url).committed_steps() == [2]


def test_damaged_memory_does_not_reach_another_node(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    stager = make_replicated_stager(here, make_tensors(1, ranks=2))
    save(stager, 7)
    (slot,) = summed(here / JOB / memory_folder(0)).values()
    flip(slot.path, slotfile.PAYLOAD_AT + slot.payload_bytes - 1, 3)
    with holding(there) as holder, sending(here, peer_at(holder.port)) as it:
        wait_for(lambda: not stager.replica_busy, "the copy to be refused")
        assert stager.newest_sealed == -1
        save(stager, 8)
        wait_for(lambda: stager.newest_replicated == 8, "a copy of step 8")
        assert it.troubles == []
    (damage,) = take_notes(here / JOB)
    assert damage.step == 7
    (copy,) = sealed_slots(there / JOB / replica_folder(0)).values()
    assert copy.read().step == 8
    assert has_sums(copy)


def test_a_rank_whose_memory_is_damaged_gets_its_copy_back(tmp_path: Path) -> None:
    """Every slot of it; the copy on the other node is whole."""
    here, there = tmp_path / "here", tmp_path / "there"
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    folder = here / JOB / memory_folder(0)
    with holding(there) as holder, sending(here, peer_at(holder.port)):
        for step in (8, 9):
            save(stager, step)
            wait_for(lambda step=step: stager.newest_replicated == step, f"a copy of {step}")
    for slot in summed(folder).values():
        flip(slot.path, slotfile.PAYLOAD_AT + 5)
    with holding(there, attempt=2) as holder:
        source = Source(peer=peer_at(holder.port), rank=0, own=False)
        fetcher = Fetcher(JOB, 2, num_slots=NUM_SLOTS_WITH_REPLICAS, pause=lambda _: True)
        fetched = fetcher.fetch(0, folder, [source])
        fetcher.close()
    assert fetched.copies == (Copy(1, 8), Copy(1, 9))
    assert len(take_notes(here / JOB)) == 2
    loaded = make_tensors(2, ranks=2)
    load_memory(folder, SealedStep(9, 1), loaded)
    assert same_bits(loaded, tensors)


def test_a_damaged_copy_is_refused_by_the_node_that_keeps_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    stager = make_replicated_stager(here, make_tensors(1, ranks=2))
    with holding(there) as holder, sending(here, peer_at(holder.port)):
        for step in (8, 9):
            save(stager, step)
            wait_for(lambda step=step: stager.newest_replicated == step, f"a copy of {step}")
    newest = sealed_slots(there / JOB / replica_folder(0))[9]
    flip(newest.path, slotfile.PAYLOAD_AT + 5)
    with holding(there, attempt=2) as holder:
        source = Source(peer=peer_at(holder.port), rank=0, own=False)
        fetcher = Fetcher(JOB, 2, num_slots=NUM_SLOTS_WITH_REPLICAS, pause=lambda _: True)
        fetched = fetcher.fetch(0, tmp_path / "new" / JOB / memory_folder(0), [source])
        fetcher.close()
    # The older one came before.
    assert fetched.problem == ""
    folder = tmp_path / "new" / JOB / memory_folder(0)
    assert sealed_steps(folder, make_tensors(1, ranks=2)) == [SealedStep(8, 1)]
    (damage,) = take_notes(there / JOB)
    assert "the copy of rank 0" in damage.what
