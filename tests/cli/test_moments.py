"""Moments as people write them."""

from __future__ import annotations

from datetime import datetime

import pytest

from outlast.cli.moments import moment_s

NOW_S = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("90s", 90.0), ("10m", 600.0), ("1.5h", 5_400.0), ("2d", 172_800.0), ("0s", 0.0)],
)
def test_so_long_ago(text: str, ago_s: float) -> None:
    assert moment_s(text, NOW_S, "--since") == NOW_S - ago_s


def test_a_date_with_a_time_is_local_unless_it_says_otherwise() -> None:
    assert moment_s("2026-03-31T18:30+00:00", NOW_S, "--since") == 1_774_981_800.0
    local = datetime(2026, 3, 31, 18, 30).timestamp()
    assert moment_s("2026-03-31 18:30", NOW_S, "--since") == local


@pytest.mark.parametrize("text", ["", "10", "m", "10 minutes", "tomorrow", "-3m", "2026-02-30"])
def test_what_is_no_moment_is_said_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"--since is .*; allowed: .*10m.*2026-03-31T18:30"):
        moment_s(text, NOW_S, "--since")


def test_what_lies_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="which lies ahead"):
        moment_s("2030-01-01", NOW_S, "--since")
