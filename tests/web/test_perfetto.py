"""A trace as Perfetto's own trace processor understands it, whatever its format."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.layout import Layout
from outlast.trace.events import events
from outlast.trace.pftrace import parts
from outlast.trace.ranks import TracedOperation, TracedRank
from outlast.trace.tracks import Mark
from tests.trace.large import LAYOUT as LARGE
from tests.trace.large import MICRO_BATCHES, STEPS
from tests.trace.test_trace import MS, a_pass, a_phase, operation, rank_of, step
from tests.web.trace_processor import TraceProcessor, page_of_perfetto

LAYOUT = Layout(tp=2, pp=2)
# Of the epoch, as all times of ranks are.
BEGUN_MS = 1_700_000_000_000


def a_rank(number: int) -> TracedRank:
    """Two steps, in each a micro-batch that goes through both stages and comes back."""
    first_stage = number < 2
    operations, steps, spans = [], [], []
    for each in (1, 2):
        at = BEGUN_MS + 100 * each
        # The second of a tensor group begins its part of a collective 2 ms later.
        begun = at + 10 + 2 * (number % 2)
        operations += [
            operation(begun, at + 13, group="tp", sequence=10 * each),
            # One that is in flight while the next one begins and ends.
            operation(at + 60, at + 80, group="tp", name="all_gather", sequence=10 * each + 1),
            operation(at + 70, at + 90, group="tp", name="all_gather", sequence=10 * each + 2),
        ]
        steps.append(step(each, at, at + 100))
        operations.append(a_message(first_stage, at, sequence=each))
        forward_ms, backward_ms = (at, at + 40) if first_stage else (at + 15, at + 25)
        spans += [
            a_pass("forward", forward_ms, forward_ms + 9, micro_batch=3, waited_ms=1),
            a_pass("backward", backward_ms, backward_ms + 10, micro_batch=3),
            a_phase("forward_backward", at, at + 55),
        ]
    rank = rank_of(number, tuple(operations), tuple(steps), node=f"n{number}", layout=LAYOUT)
    return replace(rank, spans=tuple(spans), known_ns=BEGUN_MS * MS)


def a_message(is_sender: bool, at_ms: float, *, sequence: int) -> TracedOperation:
    """An activation that leaves 10 ms into the step, when it has been waited for for 6 ms."""
    name, start_ms, end_ms = ("send", 57, 58) if is_sender else ("recv", 4, 14)
    found = operation(at_ms + start_ms, at_ms + end_ms, name=name, group="pp", sequence=sequence)
    departed_ns = round((at_ms + 10) * MS) if is_sender else 0
    return replace(found, peer=int(is_sender), message=0, departed_ns=departed_ns)


RANKS = [a_rank(number) for number in range(4)]
MARKS = [Mark(name="incident a.i1", at_ns=(BEGUN_MS + 150) * MS, facts={"action": "restart"})]


@pytest.fixture(scope="module", params=["json", "pftrace"])
def trace(request: pytest.FixtureRequest, chromium: Any) -> Iterator[TraceProcessor]:
    if request.param == "json":
        whole = json.dumps({"traceEvents": list(events(RANKS, LAYOUT, MARKS))}).encode()
    else:
        whole = b"".join(parts(RANKS, LAYOUT, MARKS))
    with page_of_perfetto() as address:
        loaded = TraceProcessor(chromium, address, whole)
        yield loaded
        loaded.close()


# Tracks of a rank are threads of a process in the one format, and children of a group in the other.
ON_TRACKS = """
create or replace perfetto view shown as
select
  slice.id, slice.name, slice.ts, slice.dur, slice.depth, slice.arg_set_id,
  coalesce(thread.name, track.name) as track_name,
  coalesce(process.name, parent.name) as rank_name
from slice
join track on slice.track_id = track.id
left join track as parent on track.parent_id = parent.id
left join thread_track on slice.track_id = thread_track.id
left join thread using (utid)
left join process using (upid)
"""


def test_nothing_of_it_is_lost(trace: TraceProcessor) -> None:
    complaints = trace.query(
        "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    )
    assert complaints == []


def test_each_rank_has_its_tracks(trace: TraceProcessor) -> None:
    trace.query(ON_TRACKS)
    found = trace.query(
        "select track_name, count(1) as slices, max(depth) as depth, sum(dur) as dur from shown "
        "where rank_name = 'rank 3 (pp 1, dp 0, tp 1) on n3' and track_name <> 'pp' "
        "group by 1 order by 1"
    )
    # Own work: all of a step but its operations, of which some overlap with others.
    work_ms = 2 * (100 - 10 - 30)
    assert found == [
        {"track_name": name, "slices": slices, "depth": 0, "dur": dur_ms * MS}
        for name, slices, dur_ms in (
            ("own work", 6, work_ms),
            ("passes", 4, 2 * (9 + 10)),
            ("phases", 2, 2 * 55),
            ("steps", 2, 2 * 100),
            ("tp", 4, 2 * (1 + 20)),
            ("tp (2)", 2, 2 * 20),
        )
    ]
    begun = trace.query(
        "select min(ts) as first, count(distinct rank_name) as ranks from shown "
        "where rank_name like 'rank %'"
    )
    assert begun == [{"first": 0, "ranks": 4}]


def test_a_collective_says_who_began_it_last(trace: TraceProcessor) -> None:
    trace.query(ON_TRACKS)
    found = trace.query(
        "select display_value as value from shown join args using (arg_set_id) "
        "where rank_name like 'rank 2 %' and name = 'all_reduce' "
        "and flat_key like '%.last to begin'"
    )
    assert [each["value"] for each in found] == ["rank 3", "rank 3"]


def test_arrows_join_the_parts_of_collectives_and_the_passes_of_a_micro_batch(
    trace: TraceProcessor,
) -> None:
    trace.query(ON_TRACKS)
    found = trace.query(
        "select one.name as first, one.rank_name as first_rank, other.name as next, "
        "other.rank_name as next_rank from flow "
        "join shown as one on one.id = slice_out join shown as other on other.id = slice_in "
        "where one.track_name <> 'pp under way' order by one.ts, one.rank_name"
    )
    arrows = [
        (each["first"], each["first_rank"][:6], each["next"], each["next_rank"][:6])
        for each in found
    ]
    # In each of two steps: three collectives of two pairs, and the way of a micro-batch through two
    # stages and back, for each of two tensor ranks.
    assert len(arrows) == 2 * (3 * 2 + 3 * 2)
    first_step = [arrow for arrow in arrows if arrow[0] in ("forward", "backward")][:6]
    assert first_step == [
        ("forward", "rank 0", "forward", "rank 2"),
        ("forward", "rank 1", "forward", "rank 3"),
        ("forward", "rank 2", "backward", "rank 2"),
        ("forward", "rank 3", "backward", "rank 3"),
        ("backward", "rank 2", "backward", "rank 0"),
        ("backward", "rank 3", "backward", "rank 1"),
    ]
    assert arrows.count(("all_reduce", "rank 0", "all_reduce", "rank 1")) == 2


def test_an_arrow_leads_from_each_send_to_its_receive(trace: TraceProcessor) -> None:
    trace.query(ON_TRACKS)
    found = trace.query(
        "select one.name as first, one.track_name as first_track, one.rank_name as sender, "
        "other.name as next, other.rank_name as receiver, other.ts - one.ts as behind from flow "
        "join shown as one on one.id = slice_out join shown as other on other.id = slice_in "
        "where one.track_name = 'pp under way' order by one.ts, one.rank_name"
    )
    arrows = [
        (each["first"], each["sender"][:6], each["next"], each["receiver"][:6]) for each in found
    ]
    # In each of two steps, by each of two tensor ranks.
    assert (
        arrows
        == [
            ("send", "rank 0", "transfer", "rank 2"),
            ("send", "rank 1", "transfer", "rank 3"),
        ]
        * 2
    )
    # The receiver was waiting when it left, to the microsecond that the one format has.
    assert all(0 < each["behind"] <= 1000 for each in found)


def test_an_incident_is_a_mark(trace: TraceProcessor) -> None:
    found = trace.query("select ts, dur from slice where name = 'incident a.i1'")
    assert found == [{"ts": 50 * MS, "dur": 0}]


# Twice and more of what it takes here.
MOST_CPU_S, MOST_BYTES = 60.0, 250_000_000


@pytest.mark.timeout(900)
def test_a_trace_of_a_thousand_ranks_is_written_and_opens(chromium: Any, tmp_path: Path) -> None:
    """20 steps of 17 operations and 4 passes each."""
    path = tmp_path / "large.pftrace"
    done = subprocess.run(
        [sys.executable, "-m", "tests.trace.large", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    assert took["cpu_s"] < MOST_CPU_S
    assert took["peak_bytes"] < MOST_BYTES
    with page_of_perfetto() as address:
        loaded = TraceProcessor(chromium, address, path.read_bytes())
        (lost,) = loaded.query(
            "select count(1) as n from stats where value > 0 and severity in ('error', 'data_loss')"
        )
        found = loaded.query("select name, count(1) as n from slice group by 1 order by 1")
        (arrows,) = loaded.query(
            "select count(1) as n from flow join slice on slice.id = slice_in "
            "where slice.name = 'transfer'"
        )
        loaded.close()
    assert lost["n"] == 0
    numbers = {each["name"]: each["n"] for each in found}
    messages = STEPS * MICRO_BATCHES * 2 * (LARGE.pp - 1) * LARGE.tp * LARGE.dp
    assert numbers["forward"] == numbers["backward"] == STEPS * MICRO_BATCHES * LARGE.world_size
    assert numbers["recv"] == numbers["transfer"] == arrows["n"] == messages
    # Under way, and waited for.
    assert numbers["send"] == 2 * messages
