"""Logs that an agent sends: of one attempt, and with the time of each piece."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.agent.observe import log_sources, logs
from controller.agent.observe.log_times import LogTimes
from controller.agent.observe.logs import Logs
from controller.agent.observe.worker_logs import WorkerLogs
from controller.agent.workers.worker import Worker
from controller.rpc.server import MAX_INBOUND_BYTES
from outlast.blackbox import Group, Op, OpRecord, Pass, Phase, SpanRecord, Writer
from outlast.v1 import agents_pb2, ranks_pb2
from outlast.worker_contract import MOST_BLACK_BOX_RECORDS, WorkerFiles
from tests.step_records import step_record

DEADLINE_S = 60.0


def answers(
    jobs_dir: Path, running: Sequence[Worker] = (), job_id: str = "job", **query: object
) -> list[agents_pb2.LogChunk]:
    """What a query that does not follow gets."""
    found: list[agents_pb2.LogChunk] = []
    ended = asyncio.Event()

    async def send(message: agents_pb2.AgentMessage) -> None:
        if message.log_chunk.end:
            ended.set()
        else:
            found.append(message.log_chunk)

    async def run() -> None:
        logs = Logs(jobs_dir, send, max_queries=1, running=lambda: running)
        logs.query(agents_pb2.LogQuery(query_id="q", job_id=job_id, **query))  # type: ignore[arg-type]  # checked by protobuf
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()

    asyncio.run(run())
    return found


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    """Three attempts of two ranks."""
    for attempt in (1, 2, 10):
        folder = tmp_path / "job" / f"a{attempt}"
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"rank-{rank:05}.log").write_text(f"rank {rank} of attempt {attempt}\n")
    return tmp_path


def test_one_attempt_or_the_newest_is_sent(jobs_dir: Path) -> None:
    assert {(c.attempt, c.data) for c in answers(jobs_dir, attempt=2, rank=1)} == {
        (2, b"rank 1 of attempt 2\n")
    }
    assert {c.attempt for c in answers(jobs_dir)} == {10}
    assert answers(jobs_dir, attempt=3) == []
    assert {c.at_s for c in answers(jobs_dir)} == {0.0}


def test_times_are_those_of_black_boxes(jobs_dir: Path) -> None:
    folder = jobs_dir / "job" / "a10"
    writer = Writer(folder / "rank-00001.blackbox", rank=1, world_size=2, attempt=10)
    writer.enter(Op.ALL_REDUCE, Group.DP)
    writer.leave()
    writer.phase(Phase.FORWARD_BACKWARD)
    writer.add_span(
        SpanRecord(
            phase=Phase.FORWARD_BACKWARD,
            work=Pass.FORWARD,
            chunk=1,
            micro_batch=2,
            start_ns=5,
            end_ns=9,
            waited_ns=1,
        )
    )
    writer.enter(Op.SEND, Group.PP, 3)
    # Rank 0 has no box, and what is no box has no times.
    (folder / "rank-00000.blackbox").write_bytes(b"none")
    (chunk,) = answers(jobs_dir, times=True)
    times = ranks_pb2.RankTimes.FromString(chunk.data)
    assert (chunk.rank, chunk.attempt) == (1, 10)
    first, second = times.operations
    assert (first.op, first.group, first.sequence) == ("all_reduce", "dp", 1)
    assert 0 < first.start_ns <= first.end_ns <= second.start_ns
    assert (second.op, second.detail, second.end_ns) == ("send", 3, 0)
    started, forward, present = times.spans
    assert (started.phase, started.work, started.micro_batch) == ("starting", "", -1)
    assert started.waited_ns == first.end_ns - first.start_ns
    assert (forward.phase, forward.work) == ("forward_backward", "forward")
    assert (forward.chunk, forward.micro_batch, forward.waited_ns) == (1, 2, 1)
    # The phase that the rank is in has not ended.
    assert (present.phase, present.work, present.end_ns) == ("forward_backward", "", 0)
    assert present.start_ns == started.end_ns


def test_what_steps_took_is_summed_up_where_the_black_box_is(jobs_dir: Path) -> None:
    writer = Writer(
        jobs_dir / "job" / "a10" / "rank-00001.blackbox", rank=1, world_size=2, attempt=10
    )
    for number in (1, 2, 3):
        begun_ns = number * 10**9
        writer.add_span(
            SpanRecord(
                phase=Phase.FORWARD_BACKWARD,
                work=Pass.FORWARD,
                micro_batch=0,
                start_ns=begun_ns,
                end_ns=begun_ns + 500_000_000,
                waited_ns=number * 125_000_000,
            )
        )
        writer.completed(step_record(number, begun_ns, begun_ns + 750_000_000))

    def taken(measure: str, most_steps: int = 0) -> ranks_pb2.RankTimes:
        (chunk,) = answers(jobs_dir, times=True, measure=measure, most_steps=most_steps)
        return ranks_pb2.RankTimes.FromString(chunk.data)

    forward = taken("forward", 2)
    assert (list(forward.measured.steps), list(forward.measured.seconds)) == ([2, 3], [0.25, 0.125])
    assert [field.name for field, _ in forward.ListFields()] == ["measured", "world_size"]
    assert list(taken("step").measured.seconds) == [0.75] * 3
    # What it never notes is not known: operations, of which work is the rest, are nothing of it.
    for measure in ("work", "checkpoint"):
        assert taken(measure).HasField("measured")
        assert not taken(measure).measured.steps
    # What this version does not know is for the controller to make of all there is.
    assert len(taken("later").steps) == 3


def test_only_what_lies_in_some_steps_is_sent(jobs_dir: Path) -> None:
    path = jobs_dir / "job" / "a10" / "rank-00001.blackbox"
    writer = Writer(path, rank=1, world_size=2, attempt=10)
    second_ns = 10**9
    for number in range(1, 6):
        begun_ns = number * second_ns
        for sequence, at_ns in enumerate((begun_ns, begun_ns + 900_000_000), start=1):
            writer.ended(
                OpRecord(
                    op=Op.ALL_REDUCE,
                    group=Group.DP,
                    seq=10 * number + sequence,
                    detail=-1,
                    start_ns=at_ns,
                    end_ns=at_ns + 50_000_000,
                )
            )
        writer.add_span(
            SpanRecord(
                phase=Phase.DATA, start_ns=begun_ns, end_ns=begun_ns + second_ns, waited_ns=number
            )
        )
        writer.completed(step_record(number, begun_ns, begun_ns + second_ns))

    def within(first: int, last: int) -> ranks_pb2.RankTimes:
        (chunk,) = answers(jobs_dir, times=True, first_step=first, last_step=last)
        return ranks_pb2.RankTimes.FromString(chunk.data)

    found = within(2, 3)
    assert [each.sequence for each in found.operations] == [21, 22, 31, 32]
    assert [each.waited_ns for each in found.spans] == [2, 3]
    # Since a moment: whatever had not ended by then.
    (chunk,) = answers(jobs_dir, times=True, since_s=3.92)
    late = ranks_pb2.RankTimes.FromString(chunk.data)
    assert [each.sequence for each in late.operations] == [32, 41, 42, 51, 52]
    assert [each.waited_ns for each in late.spans][:3] == [3, 4, 5]
    assert [each.step for each in late.steps] == [3, 4, 5]
    # Of some ranks, of which 0 has no box.
    (chunk,) = answers(jobs_dir, times=True, rank=0, num_ranks=2)
    assert chunk.rank == 1
    assert answers(jobs_dir, times=True, rank=0) == []
    # All steps, as a page offers them, and since when there is more than their length.
    assert [each.step for each in found.steps] == [1, 2, 3, 4, 5]
    assert found.known_since_ns == second_ns
    assert not within(7, 9).operations


def test_the_longest_black_box_is_one_message(jobs_dir: Path) -> None:
    path = jobs_dir / "job" / "a10" / "rank-00001.blackbox"
    writer = Writer(path, rank=1, world_size=2, attempt=10, records=MOST_BLACK_BOX_RECORDS)
    at_ns = 2**62
    span = SpanRecord(
        phase=Phase.FORWARD_BACKWARD,
        work=Pass.BACKWARD,
        chunk=100,
        micro_batch=10_000,
        start_ns=at_ns,
        end_ns=at_ns,
        waited_ns=10**12,
    )
    for _ in range(MOST_BLACK_BOX_RECORDS):
        writer.enter(Op.REDUCE_SCATTER, Group.EXPERT_DP, 10_000)
        writer.leave()
        writer.add_span(span)
    (chunk,) = answers(jobs_dir, times=True)
    assert len(ranks_pb2.RankTimes.FromString(chunk.data).spans) > MOST_BLACK_BOX_RECORDS - 2
    assert chunk.ByteSize() < MAX_INBOUND_BYTES


def test_each_piece_has_the_time_at_which_it_was_seen(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "a1"
    folder.mkdir(parents=True)
    loop = asyncio.new_event_loop()
    worker = Worker(
        job_id="job",
        attempt=1,
        rank=0,
        paths=WorkerFiles.below(folder, 0),
        requested_ns=0,
        gone=loop.create_future(),
    )
    loop.close()
    log = worker.paths.log
    seen = WorkerLogs(lambda: [worker])
    for at_s, line in ((100.0, "one\n"), (105.5, "two\n"), (111.0, "unseen\n")):
        with log.open("a") as file:
            file.write(line)
        os.utime(log, (at_s, at_s))
        if line != "unseen\n":
            seen.look()
            seen.look()
    found = [(chunk.data, chunk.at_s) for chunk in answers(tmp_path, timestamps=True)]
    assert found == [(b"one\n", 100.0), (b"two\n", 105.5), (b"unseen\n", 111.0)]
    # Nothing was written between two looks, so nothing was noted.
    assert log.with_name(f"{log.name}.times").stat().st_size == 2 * 16
    # From the middle of a log on, and with half a note at the end.
    with log.with_name(f"{log.name}.times").open("ab") as file:
        file.write(b"half")
    pieces = list(LogTimes(log).pieces(6, b"o\nunseen\n"))
    assert pieces == [(b"o\n", 105.5), (b"unseen\n", 111.0)]


def written(folder: Path, *parts: tuple[str, float]) -> Path:
    """The log of rank 0, whose parts were written at these times."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rank-00000.log"
    with path.open("a") as file:
        for text, at_s in parts:
            file.write(text)
            file.flush()
            LogTimes(path).note(file.tell(), at_s)
    os.utime(path, (parts[-1][1], parts[-1][1]))
    return path


def test_only_what_was_written_since_a_moment_is_sent(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "a1"
    path = written(folder, ("one\n", 100.0), ("two\nthr", 200.0), ("ee\nfour\n", 300.0))

    def since(at_s: float, **query: object) -> bytes:
        return b"".join(c.data for c in answers(tmp_path, since_s=at_s, **query))

    assert since(50.0) == since(100.0) == b"one\ntwo\nthree\nfour\n"
    assert since(101.0) == b"two\nthree\nfour\n"
    # A line is whole, though it was begun before.
    assert since(201.0) == b"three\nfour\n"
    assert since(301.0) == b""
    assert since(101.0, tail_bytes=5) == b"four\n"
    # What nobody has noted yet is as old as the file.
    with path.open("a") as file:
        file.write("five\n")
    os.utime(path, (400.0, 400.0))
    assert since(301.0) == b"five\n"
    assert all(c.is_selected for c in answers(tmp_path, since_s=50.0))


def test_lines_that_match_are_found_in_all_attempts(jobs_dir: Path) -> None:
    def found(**query: object) -> list[tuple[int, bytes]]:
        return [(c.attempt, c.data) for c in answers(jobs_dir, **query)]

    assert found(grep="^rank 1 .* [12]$", all_attempts=True) == [
        (1, b"rank 1 of attempt 1\n"),
        (2, b"rank 1 of attempt 2\n"),
    ]
    assert found(grep="^rank 1 .* [12]$") == []
    assert found(grep="(?i)ATTEMPT", rank=0) == [(10, b"rank 0 of attempt 10\n")]
    assert {attempt for attempt, _ in found(all_attempts=True)} == {1, 2, 10}
    # No such pattern comes from a controller; the query ends all the same.
    assert found(grep="(") == []


def test_a_search_reads_all_of_a_log_and_sends_matching_lines_with_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lines begin in one piece that is read and end in the next.
    monkeypatch.setattr(log_sources, "SEARCH_BYTES", 7)
    filler = "x" * 200_000 + "\n"
    written(
        tmp_path / "job" / "a1",
        (f"loss is nan\n{filler}", 100.0),
        ("more\nloss is nan\nnan agai", 200.0),
        ("n\nend nan", 300.0),
    )
    chunks = answers(tmp_path, grep="nan", timestamps=True)
    assert [(c.data, c.at_s) for c in chunks] == [
        (b"loss is nan\n", 100.0),
        (b"loss is nan\n", 200.0),
        # A line was written when it was ended.
        (b"nan again\n", 300.0),
        (b"end nan", 300.0),
    ]
    assert [c.data for c in answers(tmp_path, grep="nan", tail_bytes=3)] == [b"end nan"]


def test_what_is_searched_may_have_lines_without_end(tmp_path: Path) -> None:
    path = written(tmp_path / "job" / "a1", ("y" * 3 * log_sources.MAX_LINE_BYTES + "nan", 1.0))
    found = b"".join(c.data for c in answers(tmp_path, grep="nan"))
    assert found.endswith(b"nan")
    assert len(found) <= path.stat().st_size


def test_no_more_than_a_bound_of_one_log_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_TAIL_BYTES", 1 << 20)
    written(tmp_path / "job" / "a1", ("nan nan nan\n" * 300_000, 1.0))
    pieces = [c.data for c in answers(tmp_path, grep="nan")]
    assert pieces[-1] == b"[outlast] more than 1 MiB match; the rest is not sent\n"
    # And no more than one piece that is read beyond it.
    assert sum(map(len, pieces)) < (1 << 20) + 1.1 * log_sources.SEARCH_BYTES
    assert sum(len(c.data) for c in answers(tmp_path, since_s=0.5)) <= (1 << 20) + 12


def test_who_follows_a_search_gets_lines_once_they_are_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "job" / "a1", ("a nan\n", 1.0))
    found: list[bytes] = []
    news = asyncio.Event()

    async def send(message: agents_pb2.AgentMessage) -> None:
        found.append(message.log_chunk.data)
        news.set()

    async def write(text: str) -> None:
        news.clear()
        with path.open("a") as file:
            file.write(text)

    async def scenario() -> None:
        queries = logs.Logs(tmp_path, send, max_queries=1)
        queries.query(agents_pb2.LogQuery(query_id="q", job_id="job", grep="nan", follow=True))
        async with asyncio.timeout(DEADLINE_S):
            await news.wait()
            await write("nothing\nanother na")
            await write("n\n")
            await news.wait()
        queries.cancel_all()

    asyncio.run(scenario())
    assert found == [b"a nan\n", b"another nan\n"]
