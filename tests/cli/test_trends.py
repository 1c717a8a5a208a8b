"""`outlast trends`: weeks of a job in a table, and a job that is too young for them."""

from __future__ import annotations

from outlast.cli.trends import trend_rows
from outlast.v1.trends_pb2 import JobTrends, Trend


def trend(**changes: object) -> Trend:
    base = Trend(
        per_week=-60.0,
        low=-70.0,
        high=-50.0,
        p_value=1e-9,
        is_significant=True,
        level=1000.0,
        ratio_per_week=-0.06,
        lost_ratio=0.057,
    )
    base.MergeFrom(Trend(**changes))  # type: ignore[arg-type]  # fields of Trend
    return base


def test_mfu_is_a_share_of_the_peak_where_that_is_known() -> None:
    found = JobTrends(speed=trend(), model_flops_per_token=2.0, peak_flops_per_s=4000.0)
    (row,) = trend_rows(found)
    assert row == ("MFU", "50.0%", "-6.0%", "-7.0% to -5.0%", "5.7%", "p 1e-09")


def test_without_a_peak_it_is_tokens_per_second() -> None:
    (row,) = trend_rows(JobTrends(speed=trend()))
    assert row[:2] == ("MFU", "1,000 tokens/s")


def test_what_may_be_chance_has_no_cost() -> None:
    chance = trend(p_value=0.4)
    chance.is_significant = False
    (row,) = trend_rows(JobTrends(speed=chance))
    assert row[-2:] == ("", "no (p 0.40)")


def test_lateness_is_a_share_of_a_step() -> None:
    late = trend(level=0.03)
    late.per_week, late.low, late.high, late.level = 0.01, 0.009, 0.011, 0.03
    (row,) = trend_rows(JobTrends(late_launches=late))
    assert row == ("late launches", "3.00% of a step", "+1.00%", "+0.90% to +1.10%", "", "p 1e-09")
