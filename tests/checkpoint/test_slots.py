from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.slots import (
    NUM_HELD_SLOTS,
    NUM_SLOTS,
    NUM_SLOTS_WITH_REPLICAS,
    ReplicaState,
    Slot,
    UploadState,
    choose_held,
    choose_slot,
    common_step,
    newest_replicated,
    newest_sealed,
    next_upload,
    stale_slots,
)

# The machine may be busy: the time of one example says nothing.
few = settings(max_examples=60, deadline=None)


def slot(
    index: int,
    step: int = 0,
    upload: UploadState = UploadState.NONE,
    *,
    sealed: bool = True,
    attempt: int = 1,
) -> Slot:
    return Slot(index=index, sealed=sealed, step=step, attempt=attempt, upload=upload)


slots_of_a_rank = st.tuples(
    *(
        st.builds(
            slot,
            st.just(index),
            st.integers(0, 9),
            st.sampled_from(UploadState),
            sealed=st.booleans(),
            attempt=st.integers(1, 3),
        )
        for index in range(NUM_SLOTS)
    )
)


@few
@given(
    slots=slots_of_a_rank,
    step=st.integers(0, 10),
    common_step=st.integers(-1, 9),
    upload=st.booleans(),
    locked=st.sets(st.integers(0, NUM_SLOTS - 1)),
)
def test_slot_that_is_needed_is_never_chosen(
    slots: tuple[Slot, ...], step: int, common_step: int, upload: bool, locked: set[int]
) -> None:
    index = choose_slot(slots, step=step, common_step=common_step, upload=upload, locked=locked)
    if index is None:
        for one in slots:
            is_common = one.sealed and one.step == common_step
            assert one.is_pinned or is_common or one.index in locked
        return
    chosen = slots[index]
    assert index not in locked
    assert not (chosen.sealed and chosen.step == common_step)
    if chosen.sealed:
        assert chosen.upload is not UploadState.BUSY
        if chosen.upload is UploadState.WANTED:
            assert upload
            assert chosen.step < step


@few
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=60)
)
def test_rotation_always_keeps_the_common_step(history: list[tuple[bool, bool, int]]) -> None:
    """However uploads go, a rank that obeys `choose_slot` holds the newest common step.

    All ranks behave alike here, so a step is common as soon as the next one is saved.
    """
    slots = [slot(index, sealed=False) for index in range(NUM_SLOTS)]
    common = -1
    for step, (upload, uploader_moves, torn) in enumerate(history):
        busy = any(one.is_pinned for one in slots)
        wanted = upload and not busy
        index = choose_slot(slots, step=step, common_step=common, upload=wanted)
        # One upload at a time: there is always a slot to write.
        assert index is not None
        slots[index] = slot(index, sealed=False)
        assert common == -1 or any(one.sealed and one.step == common for one in slots)
        if torn == 2 and uploader_moves:
            continue  # killed in the middle of the copy
        state = UploadState.WANTED if wanted else UploadState.NONE
        slots[index] = slot(index, step, state)
        common = newest_sealed(slots)
        if uploader_moves:
            following = next_upload(slots)
            if following is not None:
                now = slots[following].upload
                then = UploadState.BUSY if now is UploadState.WANTED else UploadState.DONE
                slots[following] = replace(slots[following], upload=then)


@few
@given(
    st.lists(
        st.tuples(*[st.sets(st.integers(0, NUM_SLOTS - 1)) for _ in range(3)]),
        min_size=1,
        max_size=40,
    )
)
def test_ranks_that_miss_steps_never_lose_the_last_common_one(
    history: list[tuple[set[int], ...]],
) -> None:
    """In every step each rank may find some of its slots locked by readers, or all of them."""
    ranks = [[slot(index, sealed=False) for index in range(NUM_SLOTS)] for _ in range(3)]
    common = -1
    for step, locked in enumerate(history):
        newest = [newest_sealed(slots) for slots in ranks]
        before = common
        common = common_step(lowest=min(newest), highest=max(newest), known=common)
        assert common >= before
        for slots, taken in zip(ranks, locked, strict=True):
            index = choose_slot(
                slots, step=step, common_step=common, upload=False, locked=sorted(taken)
            )
            if index is not None:
                slots[index] = slot(index, step)
        held = [{one.step for one in slots if one.sealed} for slots in ranks]
        assert common == -1 or common in set.intersection(*held)


def test_a_step_that_some_rank_missed_is_not_common() -> None:
    """The newest of one rank is 7, of another 6; neither need hold the other's."""
    assert common_step(lowest=6, highest=7, known=4) == 4
    assert common_step(lowest=8, highest=8, known=4) == 8


def test_torn_slot_goes_first_then_stale_then_oldest() -> None:
    torn = (slot(0, 3), slot(1, 9, sealed=False), slot(2, 4))
    assert choose_slot(torn, step=5, common_step=4, upload=False) == 1
    stale = (slot(0, 3), slot(1, 9), slot(2, 4))
    assert choose_slot(stale, step=5, common_step=4, upload=False) == 1
    plain = (slot(0, 4), slot(1, 3), slot(2, 2))
    assert choose_slot(plain, step=5, common_step=4, upload=False) == 2


def test_waiting_upload_gives_way_to_a_newer_one_only() -> None:
    slots = (slot(0, 4), slot(1, 2, UploadState.BUSY), slot(2, 3, UploadState.WANTED))
    assert choose_slot(slots, step=5, common_step=4, upload=False) is None
    assert choose_slot(slots, step=5, common_step=4, upload=True) == 2


def test_slots_beyond_the_resumed_step_are_stale() -> None:
    slots = (slot(0, 4), slot(1, 6), slot(2, 5, sealed=False))
    assert stale_slots(slots, resumed_step=4) == [1]
    assert stale_slots(slots, resumed_step=0) == [0, 1]


def test_upload_of_the_newest_attempt_and_step_comes_first() -> None:
    slots = (
        slot(0, 9, UploadState.WANTED),
        slot(1, 5, UploadState.WANTED, attempt=2),
        slot(2, 6, UploadState.BUSY, attempt=2),
    )
    assert next_upload(slots) == 2
    assert next_upload((slot(0, 9, UploadState.DONE), slot(1, 8, UploadState.FAILED))) is None


@few
@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sampled_from(["waits", "done", "failed"])),
        min_size=1,
        max_size=60,
    )
)
def test_rotation_with_copies_always_keeps_the_step_that_another_node_has(
    history: list[tuple[bool, bool, str]],
) -> None:
    """However uploads and copies go, there is a slot to write, and what is copied stays."""
    slots = [slot(index, sealed=False) for index in range(NUM_SLOTS_WITH_REPLICAS)]
    common = replicated = -1
    for step, (upload, uploader_moves, copy) in enumerate(history):
        wanted = upload and not any(one.is_pinned for one in slots)
        replicate = not any(one.is_travelling for one in slots)
        if replicate:
            replicated = max(replicated, newest_replicated(slots))
        index = choose_slot(
            slots, step=step, common_step=common, upload=wanted, replicated_step=replicated
        )
        assert index is not None
        slots[index] = slot(index, step, UploadState.WANTED if wanted else UploadState.NONE)
        if replicate:
            slots[index] = replace(slots[index], replica=ReplicaState.WANTED)
        for kept in (common, replicated):
            assert kept == -1 or any(one.sealed and one.step == kept for one in slots)
        common = step
        if uploader_moves and (following := next_upload(slots)) is not None:
            slots[following] = replace(slots[following], upload=UploadState.DONE)
        if copy != "waits":
            state = ReplicaState.DONE if copy == "done" else ReplicaState.FAILED
            slots = [replace(one, replica=state) if one.is_travelling else one for one in slots]


def test_copy_overwrites_what_not_all_ranks_have_before_what_is_older() -> None:
    assert NUM_HELD_SLOTS == 2
    abandoned = (slot(0, 40), slot(1, 44))
    assert choose_held(abandoned, needed=[(1, 40)]) == 1
    plain = (slot(0, 40), slot(1, 44))
    assert choose_held(plain, needed=[(1, 40), (1, 44)]) == 0
    torn = (slot(0, 40), slot(1, sealed=False))
    assert choose_held(torn, needed=[]) == 1
