"""A link that carries little is told from a stage that is late: by the timeline of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.netns.fleet import why_not
from tests.netns.slow_link import slow_link, transfers_s

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.timeout(600),
]


def test_who_waits_for_a_slow_link_waits_for_the_transfer_and_not_for_the_sender(
    tmp_path: Path,
) -> None:
    with slow_link(tmp_path) as (fleet, job_id):
        found = fleet.api(f"/jobs/{job_id}/timeline")
        first, second, third = found["tracks"]
        receives = [bar for bar in third["bars"] if bar["name"] == "recv"]
        assert {bar["peer"] for bar in receives} == {1}
        # Stages 1 and 2 are at its ends.
        assert transfers_s(third) > 0.1 * third["step_s"]
        assert min(transfers_s(second), transfers_s(third)) > 5 * transfers_s(first)
        # Stage 1 gets activations over the good link and gradients over the slow one.
        slow = [bar for bar in second["bars"] if bar["name"] == "recv" and bar["peer"] == 2]
        good = [bar for bar in second["bars"] if bar["name"] == "recv" and bar["peer"] == 0]
        assert len(slow) == len(good) == 3
        assert waited_s(slow) > 5 * waited_s(good)


def waited_s(receives: list[dict[str, Any]]) -> float:
    """For messages that had left already."""
    return transfers_s({"bars": receives})
