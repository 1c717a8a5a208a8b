"""Each step reaches a tracker once, unless its numbers have changed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.tracking.points import Curve, News
from outlast.v1.common_pb2 import StepReport


def report(step: int, loss: float = 1.0, **facts: float) -> StepReport:
    whole = {"tokens": 100, "duration_s": 0.5, "grad_norm": 2.0, "learning_rate": 0.1, **facts}
    return StepReport(step=step, loss=loss, at_s=1000.0 + step, **whole)


def steps(news: News) -> list[int]:
    return [point.step for point in news.points]


def test_a_point_has_what_is_known_of_a_step() -> None:
    (point,) = Curve().take([report(1, 2.0, eval_loss=0.0)]).points
    assert (point.step, point.at_s) == (1, 1001.0)
    assert point.values == {
        "train/loss": 2.0,
        "train/grad_norm": 2.0,
        "train/learning_rate": 0.1,
        "train/tokens_per_s": 200.0,
        "train/step_s": 0.5,
        "eval/loss": 0.0,
        "eval/perplexity": 1.0,
    }


def test_held_out_sets_have_names_of_their_own() -> None:
    whole = report(1, eval_loss=1.0)
    whole.eval_losses.update({"web": 0.0, "code": 2.0})
    (point,) = Curve().take([whole]).points
    found = {name: value for name, value in point.values.items() if name.startswith("eval/")}
    assert found == {
        "eval/loss": 1.0,
        "eval/perplexity": pytest.approx(math.e),
        "eval/web/loss": 0.0,
        "eval/web/perplexity": 1.0,
        "eval/code/loss": 2.0,
        "eval/code/perplexity": pytest.approx(math.e**2),
    }


def test_a_batch_that_was_left_out_has_no_loss_and_nan_is_no_point() -> None:
    left_out, not_finite = Curve().take([report(1, tokens=0), report(2, float("nan"))]).points
    assert set(left_out.values) == {"train/step_s"}
    assert "train/loss" not in not_finite.values


def test_steps_that_are_redone_alike_are_no_news() -> None:
    curve = Curve()
    assert steps(curve.take([report(1), report(2), report(3)])) == [1, 2, 3]
    assert curve.take([report(2), report(3)]) == News()
    assert steps(curve.take([report(4)])) == [4]


def test_other_numbers_take_the_place_of_what_came_after() -> None:
    curve = Curve()
    curve.take([report(1), report(2), report(3)])
    news = curve.take([report(2, 5.0), report(3, 6.0)])
    assert (steps(news), news.invalid_from) == ([2, 3], 2)


def test_what_an_earlier_tracker_has_written_is_not_written_again() -> None:
    curve = Curve(last_step=5)
    assert steps(curve.take([report(4), report(5), report(6)])) == [6]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 1)), max_size=30))
def test_a_tracker_ends_up_with_the_newest_numbers_of_each_step(
    done: list[tuple[int, int]],
) -> None:
    curve, written, expected = Curve(), dict[int, float](), dict[int, float]()
    for step, loss in done:
        if expected.get(step, loss) != loss:
            expected = {each: value for each, value in expected.items() if each < step}
        expected[step] = loss
        news = curve.take([report(step, loss)])
        if news.invalid_from is not None:
            written = {each: old for each, old in written.items() if each < news.invalid_from}
        for point in news.points:
            assert point.step not in written
            written[point.step] = point.values["train/loss"]
    assert written == expected
