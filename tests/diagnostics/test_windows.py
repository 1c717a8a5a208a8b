"""Stragglers, spikes and slow decline, from recorded and made-up figures."""

from __future__ import annotations

import math
import random
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.curves import (
    ENOUGH_HISTORY,
    SPEED_WINDOW_S,
    SpeedWatch,
    SpikeWatch,
    Step,
    not_a_number,
)
from diagnostics.core.stragglers import (
    FEW_PEERS,
    LEAST_EXCESS_S,
    LEAST_Z,
    RATIO,
    RATIO_OF_FEW,
    StragglerTable,
    judge,
)
from diagnostics.core.windows import Lasting, robust_z

EIGHT = [list(range(8))]


def noisy(seed: int, *, slow: dict[int, float] | None = None, num: int = 8) -> dict[int, float]:
    """Work of equals in seconds, with 1% of noise."""
    source = random.Random(seed)
    return {r: source.gauss(1.0, 0.01) * (slow or {}).get(r, 1.0) for r in range(num)}


def test_one_slow_rank_of_eight_is_named_after_three_windows() -> None:
    table = StragglerTable(EIGHT)
    told = [table.take(noisy(seed, slow={5: 1.25}))[0] for seed in range(5)]
    assert [[slow.rank for slow in begun] for begun in told] == [[], [], [5], [], []]
    assert "rank 5" in told[2][0].message
    assert "limit 1.1" in told[2][0].message


def test_a_straggler_that_has_recovered_for_five_windows_is_none_any_more() -> None:
    table = StragglerTable(EIGHT)
    for seed in range(3):
        table.take(noisy(seed, slow={5: 1.25}))
    ended = [table.take(noisy(seed))[1] for seed in range(10, 15)]
    assert ended == [(), (), (), (), (5,)]


@given(st.integers(0, 10_000))
def test_noise_alone_names_nobody(seed: int) -> None:
    table = StragglerTable([list(range(64))])
    source = random.Random(seed)
    for _ in range(5):
        begun, _ = table.take({r: max(0.1, source.gauss(1.0, 0.05)) for r in range(64)})
        assert begun == ()


def test_other_stages_of_the_pipeline_are_no_yardstick() -> None:
    works = noisy(0, slow=dict.fromkeys(range(4, 8), 2.0))
    assert judge(works, [list(range(4)), list(range(4, 8))]) == ()


@given(
    works=st.lists(
        st.one_of(st.sampled_from([1.0, 1.2, 2.0]), st.floats(0.5, 3.0)), min_size=1, max_size=40
    )
)
def test_each_rank_is_held_against_all_others_of_its_group(works: list[float]) -> None:
    found = {slow.rank: slow for slow in judge(dict(enumerate(works)), [range(len(works))])}
    for rank, own_s in enumerate(works):
        others = [work for other, work in enumerate(works) if other != rank]
        if not others:
            continue
        is_few = len(others) < FEW_PEERS
        limit = RATIO_OF_FEW if is_few else RATIO
        stands_out = own_s > limit * median(others) and own_s - median(others) > LEAST_EXCESS_S
        z = robust_z(own_s, others)
        assert (rank in found) == (stands_out and (is_few or z > LEAST_Z))
        if rank in found:
            assert (found[rank].peers_s, found[rank].z) == (median(others), z)


def test_a_hundred_thousand_equals_are_judged_at_once() -> None:
    """In the controller's loop: pairs of ranks would take hours."""
    works = noisy(0, num=100_000, slow=dict.fromkeys(range(0, 100_000, 3), 1.5))
    assert len(judge(works, [range(100_000)])) == 33_334


def test_one_peer_is_enough_only_for_a_large_difference() -> None:
    assert judge({0: 1.0, 1: 1.3}, [[0, 1]]) == ()
    assert [slow.rank for slow in judge({0: 1.0, 1: 2.0}, [[0, 1]])] == [1]


def test_a_scheduler_s_time_slice_is_no_straggler() -> None:
    assert judge({0: 0.005, 1: 0.02}, [[0, 1]]) == ()


def test_identical_peers_still_have_a_spread() -> None:
    assert robust_z(1.02, [1.0, 1.0, 1.0]) < 6 < robust_z(1.11, [1.0, 1.0, 1.0])


def test_two_bad_windows_of_five_are_nothing() -> None:
    lasting = Lasting()
    assert [lasting.take(bad=bad) for bad in (True, False, True, False, False)] == [None] * 5


def a_step(step: int, *, loss: float = 2.0, norm: float = 1.0, duration_s: float = 1.0) -> Step:
    return Step(step=step, loss=loss, grad_norm=norm, duration_s=duration_s)


def test_a_spike_of_the_gradient_norm_is_told_with_its_limit() -> None:
    watch = SpikeWatch()
    source = random.Random(0)
    for step in range(ENOUGH_HISTORY):
        assert not watch.take(a_step(step, norm=source.gauss(1.0, 0.1)))
    message = watch.take(a_step(99, norm=9.0))
    assert message.startswith("step 99: gradient norm 9, ")
    assert "limit 4" in message


@given(st.integers(0, 1000))
def test_norms_whose_size_varies_much_are_no_spikes(seed: int) -> None:
    """Some are several times the median; that is how gradient norms are."""
    watch = SpikeWatch()
    source = random.Random(seed)
    norms = [source.lognormvariate(0, 0.3) for _ in range(300)]
    norms[100], norms[200] = 5.0, 5.0
    assert [watch.take(a_step(step, norm=norm)) for step, norm in enumerate(norms)] == [""] * 300


def test_a_norm_after_none_is_told() -> None:
    watch = SpikeWatch()
    for step in range(ENOUGH_HISTORY):
        assert not watch.take(a_step(step, norm=0.0))
    assert "gradient norm 3, above the median 0" in watch.take(a_step(99, norm=3.0))


@given(st.integers(0, 1000))
def test_a_loss_that_falls_with_noise_is_no_spike(seed: int) -> None:
    watch = SpikeWatch()
    source = random.Random(seed)
    for step in range(200):
        loss = 2.0 + 6.0 * math.exp(-step / 40) + source.gauss(0, 0.05)
        assert not watch.take(a_step(step, loss=loss, norm=source.lognormvariate(0, 0.2)))


def test_what_is_no_number_is_said() -> None:
    assert "loss nan" in not_a_number(a_step(7, loss=math.nan))
    assert not_a_number(a_step(7)) == ""


def test_steps_that_become_slow_for_good_are_told_and_the_end_of_it() -> None:
    watch = SpeedWatch()
    per_window = int(SPEED_WINDOW_S)

    def windows(count: int, duration_s: float) -> list[bool]:
        number = count * math.ceil(per_window / duration_s)
        changes = [watch.take(a_step(step, duration_s=duration_s)) for step in range(number)]
        return [change for change in changes if change is not None]

    assert windows(5, 1.0) == []
    assert windows(4, 1.5) == [True]
    assert "1.50 times" in watch.message
    assert windows(6, 1.0) == [False]


def test_an_evaluation_now_and_then_is_no_decline() -> None:
    watch = SpeedWatch()
    for step in range(2000):
        assert watch.take(a_step(step, duration_s=30.0 if step % 50 == 0 else 1.0)) is None
