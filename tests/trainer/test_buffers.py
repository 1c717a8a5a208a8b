"""Receive buffers of a plan beside those of a schedule that is run on paper."""

from __future__ import annotations

import pytest

from trainer.core.buffers import receive_buffers
from trainer.core.schedule import ActionKind, build, forward_only
from trainer.core.schedule.messages import num_buffers
from trainer.core.timing import steady_micro_batches


def on_paper(name: str, p: int, m: int, v: int, extra: int) -> tuple[int, ...]:
    schedules = (
        build(name, p, m, num_chunks=v, extra_warmup=extra),
        forward_only(p, m, num_chunks=v, folds=name == "zb-v"),
    )
    found = [num_buffers(each, range(p)) for each in schedules]
    return tuple(sum(sum(channels[stage].values()) for channels in found) for stage in range(p))


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 33])
@pytest.mark.parametrize(
    ("name", "extra"), [("gpipe", 0), ("zb-h1", 0), ("1f1b", 0), ("1f1b", 2), ("1f1b", 40)]
)
def test_plain_schedules_follow_the_formula(name: str, extra: int, m: int, p: int) -> None:
    assert receive_buffers(name, p, m, 1, extra) == on_paper(name, p, m, 1, extra)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 8, 9, 12, 15, 33])
def test_folded_schedules_follow_the_formula(m: int, p: int) -> None:
    assert receive_buffers("zb-v", p, m, 2, 0) == on_paper("zb-v", p, m, 2, 0)


@pytest.mark.parametrize(("p", "v"), [(10, 7), (2, 40), (33, 2)])
def test_large_interleaved_ones_are_scaled_from_small_ones(p: int, v: int) -> None:
    found, expected = (
        receive_buffers("interleaved", p, 2 * p, v, 0),
        on_paper("interleaved", p, 2 * p, v, 0),
    )
    assert found == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("p", "m", "chunks"), [(4, 61, 3), (3, 48, 2), (2, 41, 4)])
def test_what_is_kept_repeats_itself_after_some_rounds(p: int, m: int, chunks: int) -> None:
    """Chunks of different sizes, so that it matters which ones are kept."""
    few = steady_micro_batches(p, m)
    assert few < m

    def most_kept(micro_batches: int, stage: int) -> int:
        kept = most = 0
        for action in build("interleaved", p, micro_batches, num_chunks=chunks).actions[stage]:
            size = 3 + action.chunk
            kept += size if action.kind is ActionKind.FORWARD else -size
            most = max(most, kept)
        return most

    for stage in range(p):
        assert most_kept(few, stage) == most_kept(m, stage)
