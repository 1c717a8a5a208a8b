"""Windows of what ranks say of their steps, in the turns of the controller's loop."""

from __future__ import annotations

from controller.core.edge.use_windows import RANKS_AT_ONCE, WINDOW_S, WINDOW_SAMPLES, UseWindows
from outlast.v1 import agents_pb2, common_pb2


def test_a_window_of_many_ranks_is_judged_between_heartbeats() -> None:
    """A hundred thousand ranks at once would hold the controller's loop for a second."""
    count = 2 * RANKS_AT_ONCE + 1
    windows = UseWindows([range(count)])
    use = agents_pb2.RankUse(split=common_pb2.StepSplit(forward_s=1.0))
    slow = agents_pb2.RankUse(split=common_pb2.StepSplit(forward_s=2.0))
    starved = agents_pb2.RankUse(split=common_pb2.StepSplit(data_s=1.0))
    odd = {3: slow, count - 1: starved}
    assert windows.judge(count, 0.0) is None
    found = []
    for number in range(1, 4):
        for _ in range(WINDOW_SAMPLES):
            for rank in range(count):
                windows.note(rank, odd.get(rank, use))
        now_s = 1.5 * number * WINDOW_S
        parts = [windows.judge(count, now_s) for _ in range(4)]
        assert [part is not None for part in parts] == [True, True, True, False]
        found += [part for part in parts if part is not None]
    assert [slow.rank for part in found for slow in part.slow] == [3]
    assert [rank for part in found for rank, _ in part.starved] == [count - 1]
