"""Connections that end wake whoever waits at them, and take in what peers still send."""

from __future__ import annotations

from tests.trainer.jobs_connections import end_and_drain, end_but_some
from tests.trainer.ranks import RankPool


def test_what_waits_is_woken_and_peers_can_still_send(ranks: RankPool) -> None:
    # In a process of its own: it ends all connections that there are.
    (result,) = ranks.run(end_and_drain, 1)
    assert result["woken"] == b""
    assert result["sent"] >= 64 << 20
    assert result["accepts"]


def test_connections_that_are_spared_go_on(ranks: RankPool) -> None:
    (result,) = ranks.run(end_but_some, 1)
    assert result["heard"] == [b"x", b""]
