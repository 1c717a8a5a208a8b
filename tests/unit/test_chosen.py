"""What is given up when a person lets a job go on somewhere."""

from __future__ import annotations

from outlast.chosen import ChosenStart, is_given_up, must_start_at


def test_only_what_earlier_attempts_reached_beyond_the_step_is_given_up() -> None:
    chosen = (ChosenStart(step=40, attempt=3),)
    assert is_given_up(chosen, 41, 3)
    assert is_given_up(chosen, 60, 1)
    assert not is_given_up(chosen, 40, 3)
    assert not is_given_up(chosen, 41, 4)


def test_a_later_choice_does_not_bring_back_what_was_given_up() -> None:
    chosen = (ChosenStart(step=0, attempt=2), ChosenStart(step=40, attempt=5))
    assert is_given_up(chosen, 30, 2)
    assert not is_given_up(chosen, 30, 3)
    assert is_given_up(chosen, 50, 5)


def test_the_first_attempt_after_a_choice_loads_that_and_later_ones_the_newest() -> None:
    chosen = (ChosenStart(step=0, attempt=2), ChosenStart(step=40, attempt=5))
    assert must_start_at((), 1) is None
    assert must_start_at(chosen, 6) == 40
    assert must_start_at(chosen, 7) is None


def test_a_choice_in_words() -> None:
    assert str(ChosenStart(step=0, attempt=1)) == "from scratch"
    assert str(ChosenStart(step=40, attempt=1)) == "from checkpoint 40"
    elsewhere = ChosenStart(step=0, attempt=1, url="s3://b/j")
    assert str(elsewhere) == "from the newest checkpoint in s3://b/j"
