"""A job on nodes with several links, of which one stops: its job has a note that says so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.fleet import DEADLINE_S, Fleet, why_not

RAILS = 3
SPEC = """\
name: linked
steps: 1000000
model: {layers: 1, hidden: 64, heads: 2, seq_len: 32}
parallel: {dp: 2, micro_batch: 2}
data: {global_batch: 4, max_bytes: 65536}
resources: {nodes: 2, workers_per_node: 1, device: cpu}
recovery: {preflight: false}
"""

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), 2).running() as running:
        yield running


def until(condition: Callable[[], Any], what: str) -> Any:
    """What it returns once that is true."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within its time: {what}"
        time.sleep(0.2)
    return found


def test_a_rail_that_stops_is_a_note_until_it_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    def notes() -> list[dict[str, Any]]:
        listed = json.loads(fleet.outlast("incidents", "--json").stdout)["incidents"]
        return [each for each in listed if each["cause"] == "traffic"]

    spec = tmp_path / "job.yaml"
    spec.write_text(SPEC)
    # Steps wait for the slow cable, and leave the machine to others meanwhile.
    with fleet.limited_link("n0", "n1"), fleet.rails("n0", RAILS) as stopped:
        fleet.outlast("submit", str(spec))
        until(lambda: job(fleet)["state"] == "RUNNING", "the job trains")
        # It is known what each carries after ten windows of two seconds; a step tells no time.
        begun_s = time.monotonic()
        until(lambda: time.monotonic() > begun_s + 26, "the links are known")
        assert notes() == []
        (stopped / "rail1").touch()
        (note,) = until(notes, "a note of the rail")
        assert note["state"] == "OPEN"
        assert "n0: rail1 has nearly stopped" in note["reason"]
        (stopped / "rail1").unlink()
        until(lambda: notes()[0]["state"] == "CLOSED", "the note is closed")
        found = job(fleet)
    assert (found["state"], found["attempt"]) == ("RUNNING", 1)


def job(fleet: Fleet) -> dict[str, Any]:
    (found,) = json.loads(fleet.outlast("jobs", "--json").stdout)["jobs"]
    return dict(found)
