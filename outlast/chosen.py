"""Where a person let a job go on: at its beginning, or from a checkpoint that they chose.

States that attempts up to then had reached beyond the chosen step are given up. They belong to a
history that is over, and what trains the same steps again is another attempt: step and attempt
tell both apart. Nothing given up is loaded, committed or counted any more; in storage its bytes
stay, set aside. Controller, agent and trainer follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStart:
    """Go on after `step` (0: begin anew), which attempt `attempt` or one before it had reached.

    With a `url` the job begins anew from the checkpoint of `url_step` there, -1 for the newest.
    """

    step: int
    attempt: int
    url: str = ""
    url_step: int = -1

    def __str__(self) -> str:
        if self.url:
            which = "the newest checkpoint" if self.url_step < 0 else f"checkpoint {self.url_step}"
            return f"from {which} in {self.url}"
        return f"from checkpoint {self.step}" if self.step else "from scratch"


def is_given_up(chosen: Sequence[ChosenStart], step: int, attempt: int) -> bool:
    """Whether the state that `attempt` reached after `step` is of a history that is over."""
    return any(attempt <= each.attempt and step > each.step for each in chosen)


def must_start_at(chosen: Sequence[ChosenStart], attempt: int) -> int | None:
    """The step that `attempt` must go on after; None when it takes the newest there is.

    The first attempt after a choice loads what was chosen or fails: another checkpoint, older
    than it, is not what the person decided on.
    """
    return chosen[-1].step if chosen and attempt == chosen[-1].attempt + 1 else None
