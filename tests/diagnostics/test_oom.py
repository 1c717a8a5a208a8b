"""Which ends a count of kills explains."""

from __future__ import annotations

from diagnostics.core.oom import EXPLAINS_FOR_S, KillCount


def test_a_rise_explains_one_end() -> None:
    count = KillCount(7)
    count.look(8, 10.0)
    assert count.explains(since_s=5.0)
    assert not count.explains(since_s=5.0)
    assert count.count == 8


def test_as_many_ends_as_it_rose_by_are_explained() -> None:
    count = KillCount(0)
    count.look(1, 10.0)
    count.look(3, 11.0)
    assert [count.explains(since_s=5.0) for _ in range(4)] == [True, True, True, False]


def test_what_was_counted_before_explains_nothing() -> None:
    count = KillCount(7)
    count.look(7, 10.0)
    assert not count.explains(since_s=0.0)


def test_a_rise_from_before_a_process_began_is_not_its_own() -> None:
    count = KillCount(0)
    count.look(1, 10.0)
    assert not count.explains(since_s=10.0)


def test_an_old_rise_explains_nothing_any_more() -> None:
    count = KillCount(0)
    count.look(1, 10.0)
    count.look(1, 10.0 + EXPLAINS_FOR_S)
    assert count.explains(since_s=5.0)
    count.look(2, 200.0)
    count.look(2, 200.1 + EXPLAINS_FOR_S)
    assert not count.explains(since_s=5.0)


def test_a_count_that_begins_anew_is_followed() -> None:
    """Somebody made the cgroup again under the same name."""
    count = KillCount(5)
    count.look(0, 10.0)
    assert not count.explains(since_s=5.0)
    count.look(1, 11.0)
    assert count.explains(since_s=5.0)
