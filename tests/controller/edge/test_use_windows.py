"""Windows of what ranks say of their steps, in the turns of the controller's loop."""

from __future__ import annotations

from controller.core.edge.use_windows import (
    PAUSE_S,
    RANKS_AT_ONCE,
    WINDOW_S,
    WINDOW_SAMPLES,
    Found,
    UseWindows,
)
from outlast.v1 import agents_pb2, common_pb2


def test_a_window_of_many_ranks_is_judged_between_heartbeats() -> None:
    """A hundred thousand ranks at once would hold the controller's loop for a second."""
    count = 2 * RANKS_AT_ONCE + 1
    windows = UseWindows([range(count)])
    use = agents_pb2.RankUse(split=common_pb2.StepSplit(forward_s=1.0))
    slow = agents_pb2.RankUse(split=common_pb2.StepSplit(forward_s=2.0))
    starved = agents_pb2.RankUse(split=common_pb2.StepSplit(data_s=1.0))
    odd = {3: slow, 4: starved}
    assert windows.judge(count, 0.0) is None
    found: list[Found] = []
    for number in range(1, 4):
        for _ in range(WINDOW_SAMPLES):
            for rank in range(count):
                windows.note(rank, odd.get(rank, use))
        begun_s = 1.5 * number * WINDOW_S
        told = []
        for turn in range(4):
            told.append(windows.judge(count, begun_s + 1.5 * turn * PAUSE_S))
            # Right behind it another node is heard.
            assert windows.judge(count, begun_s + (1.5 * turn + 0.5) * PAUSE_S) is None
        assert [each is not None for each in told] == [False, False, True, False]
        found += [each for each in told if each is not None]
    assert [[each.rank for each in one.slow] for one in found] == [[], [], [3]]
    assert [[rank for rank, _ in one.starved] for one in found] == [[], [], [4]]
