"""A job that waits in its first attempt, just after a checkpoint, for whatever is done to it.

It needs no more steps than the test, however slow the machine is: it cannot end before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chaos.orders import Desk, Order

UPLOADED, STEPS = 20, 40
# Of a spec: held, the job is neither hung nor late.
HELD: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"storage_interval_steps": UPLOADED},
    "recovery": {"hang_timeout_s": 300},
    "detectors": {"hang": "off"},
}


@contextmanager
def obeyed(desk: Desk) -> Iterator[None]:
    """All processes that are started meanwhile take the orders of this desk; none so far."""
    desk.give(())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in desk.environment.items():
            patch.setenv(name, value)
        yield


def held_in_first_attempt(desk: Desk) -> None:
    """Hold rank 0 of jobs that start from here on in a step that is not uploaded."""
    step = UPLOADED + 6
    desk.give((Order(name="held", at="step", act="hold", rank=0, attempt=1, step=step),))
