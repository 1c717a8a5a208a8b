"""When the progress of attempts on this node is reported.

The controller needs to know at once that all ranks here have completed their first
step, again in each new session, for a restarted controller knows nothing of it, and at
the end how far the slowest came. In between, heartbeats say how far each rank is. Steps
with their figures follow soon after they are completed. Both are read from what ranks
write, so it is also said here how often to look.

What does not belong here: reading what ranks write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

STEP_REPORT_PERIOD_S = 0.2
# A restart is over when the first step is: look often while one is awaited, but not
# for the half hour that a large model may take.
START_LOOK_PERIOD_S = 0.01
START_LOOK_S = 30.0

# When rank 0's node is lost, the steps that it had completed and not yet reported are known
# to the others: each reports the last few when its own workers end without being done, and
# all since the controller went away.
LAST_STEPS_S = 5.0


class AttemptKey(NamedTuple):
    """An attempt of a job, as far as it runs here."""

    job_id: str
    attempt: int


@dataclass(slots=True, kw_only=True)
class _Reported:
    """What was reported of an attempt, and when."""

    requested_s: float
    steps_s: float = -math.inf
    # Of the slowest rank; -1 before its first step.
    completed_step: int = -1
    # Whether its progress was reported since the last welcome.
    is_known: bool = False


class Reports:
    """What is reported when, of every attempt with workers here."""

    def __init__(self) -> None:
        self._attempts: dict[AttemptKey, _Reported] = {}

    def begin(self, key: AttemptKey, now_s: float) -> None:
        """Workers of an attempt were requested; for the first time or again."""
        self._attempts.setdefault(key, _Reported(requested_s=now_s))

    def welcomed(self) -> None:
        """A session has begun: what was reported in an earlier one may be forgotten."""
        for reported in self._attempts.values():
            reported.is_known = False

    def end(self, key: AttemptKey) -> None:
        """Nothing more will be reported of an attempt."""
        self._attempts.pop(key, None)

    def are_steps_due(self, key: AttemptKey, now_s: float) -> bool:
        """Whether steps completed since the last report are to be reported now."""
        reported = self._attempts[key]
        if now_s - reported.steps_s < STEP_REPORT_PERIOD_S:
            return False
        reported.steps_s = now_s
        return True

    def is_progress_due(
        self, key: AttemptKey, completed_step: int, *, is_last: bool = False
    ) -> bool:
        """Whether to report now that the slowest rank here has completed this step.

        Once in each session, and at the end unless that step was reported: heartbeats say the rest.
        """
        reported = self._attempts.get(key)
        if reported is None:
            return False
        is_last_news = is_last and completed_step > reported.completed_step
        # A script is at step 0 until it has said something of its steps.
        is_first_step = reported.completed_step < 1 <= completed_step
        if reported.is_known and not (is_last_news or is_first_step):
            return False
        reported.completed_step, reported.is_known = completed_step, True
        return True

    def is_first_progress(self, key: AttemptKey) -> bool:
        """Whether no progress of an attempt has been reported yet."""
        return self._attempts[key].completed_step < 0

    def look_period_s(self, now_s: float) -> float:
        """How long to wait until ranks are looked at again."""
        awaits_start = any(
            reported.completed_step < 0 and now_s - reported.requested_s < START_LOOK_S
            for reported in self._attempts.values()
        )
        return START_LOOK_PERIOD_S if awaits_start else STEP_REPORT_PERIOD_S
