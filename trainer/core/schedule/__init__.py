"""Pipeline schedules: what they are, how they are built, and the proof that they run.

Only pure data and arithmetic live here; `trainer.parallel.pipeline` executes it.
"""

from trainer.core.schedule.actions import Action, ActionKind, Schedule
from trainer.core.schedule.builders import (
    NAMES,
    build,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from trainer.core.schedule.proof import Timing, check
from trainer.core.schedule.replay import ScheduleError
from trainer.core.schedule.theory import (
    bubble_over_work,
    bubble_share,
    zero_bubble_share,
    zero_bubble_v_share,
)

__all__ = [
    "NAMES",
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleError",
    "Timing",
    "bubble_over_work",
    "bubble_share",
    "build",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "zero_bubble_h1",
    "zero_bubble_share",
    "zero_bubble_v",
    "zero_bubble_v_share",
]
