"""A worker may write anything into its black box: it is that rank's trouble and nobody else's."""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from controller.agent.core.reports import Reports
from controller.agent.mistakes import Mistakes
from controller.agent.observe import stall_watch
from controller.agent.observe.leftovers import left_steps
from controller.agent.observe.metrics import ranks as rank_metrics
from controller.agent.observe.reporter import Reporter
from controller.agent.observe.stall_watch import StallWatch
from controller.agent.workers.worker import Worker, post_mortem, read_environment
from outlast.blackbox import (
    Expected,
    Group,
    Op,
    Phase,
    StepRecord,
    StepUse,
    Writer,
)
from outlast.blackbox.file import HEADER_BYTES, Rings
from outlast.blackbox.records import MAX_COUNT
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles
from tests.agent.harness import (
    AgentProcess,
    FakeController,
    start_command,
    start_job,
    stop_command,
    wait_for,
)

NUM_CASES = 100_000
NUM_RANKS = 20
SEED = 20_240_611
# The words that mean something, and the ring of steps behind the header.
NUM_WORDS = 168
STEPS_END = HEADER_BYTES + 512 * 72
EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**62, 10, 9, 5, 255, 1 << 32)
SECOND_NS = 10**9
FILE_BYTES = Rings().file_bytes


def write_box(path: Path, rank: int) -> None:
    """A rank in the middle of its training."""
    box = Writer(path, rank=rank, world_size=NUM_RANKS, attempt=1)
    box.resumed(10)
    box.expect(Expected(memory_bytes=2**30, bubble=0.1))
    for step in range(11, 31):
        box.phase(Phase.FORWARD_BACKWARD)
        box.enter(Op.ALL_REDUCE, Group.DP)
        box.leave()
        box.used(StepUse(forward_ns=5, backward_ns=9, busy_ns=14, peak_memory_bytes=2**20))
        box.completed(
            StepRecord(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                tokens=8,
                start_ns=step * SECOND_NS,
                end_ns=(step + 1) * SECOND_NS,
                eval_loss=None,
            )
        )
    box.close()


def mutate(box: mmap.mmap, random: Random) -> None:
    """Words set to extremes, bytes flipped, areas overwritten, records that claim to be whole."""
    for _ in range(random.randrange(1, 5)):
        match random.randrange(6):
            case 0 | 1:
                word = random.choice(EXTREMES) if random.random() < 0.7 else random.getrandbits(63)
                struct.pack_into("<q", box, 8 * random.randrange(1, NUM_WORDS), word)
            case 2:
                at = random.randrange(8, STEPS_END)
                box[at] ^= 1 << random.randrange(8)
            case 3:
                at = random.randrange(8, STEPS_END - 64)
                box[at : at + 64] = random.randbytes(64)
            case 4:
                box[64:HEADER_BYTES] = random.randbytes(HEADER_BYTES - 64)
            case _:
                # A whole record, by its index, with anything in it.
                written = random.randrange(21, 600)
                at = HEADER_BYTES + (written - 1) % 512 * 72
                box[at : at + 64] = random.randbytes(64)
                struct.pack_into("<Q", box, at + 64, written)
                struct.pack_into("<q", box, 8 * 12, written)


def numbers(message: Message) -> Iterator[tuple[str, float]]:
    """Every number of a message, however deep, with its field's name."""
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            if not isinstance(next(iter(value.values())), str):
                yield from ((f"{field.name}[{key}]", value[key]) for key in value)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for each in value if isinstance(value, list) or hasattr(value, "add") else [value]:
                yield from numbers(each)
        elif isinstance(value, int | float):
            yield field.name, value


# What a step's figures are, is for the training to say; the controller takes them as they are.
FIGURES = {"loss", "grad_norm", "learning_rate", "eval_loss"}


def check(message: Message) -> None:
    message.SerializeToString()
    for name, number in numbers(message):
        if name in FIGURES:
            continue
        assert math.isfinite(number), (name, number)
        assert -1 <= number <= MAX_COUNT, (name, number)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Boxes:
    """Black boxes of one node's ranks, on tmpfs."""

    def __init__(self, folder: Path) -> None:
        attempt_dir = folder / "jobs" / "job" / "a1"
        attempt_dir.mkdir(parents=True)
        self.paths = [WorkerFiles.below(attempt_dir, rank) for rank in range(NUM_RANKS)]
        self.maps = []
        for rank, paths in enumerate(self.paths):
            write_box(paths.blackbox, rank)
            with paths.blackbox.open("r+b") as file:
                self.maps.append(mmap.mmap(file.fileno(), FILE_BYTES))
        self._whole = [box[:STEPS_END] for box in self.maps]

    def spoil(self, random: Random) -> int:
        """Mutate every box; how many of them were cut short or made longer."""
        num_cut = 0
        for box, whole, paths in zip(self.maps, self._whole, self.paths, strict=True):
            os.truncate(paths.blackbox, FILE_BYTES)
            if random.random() < 0.5:
                box[:STEPS_END] = whole
            mutate(box, random)
            if random.random() < 0.01:
                os.truncate(paths.blackbox, random.choice((0, 1, HEADER_BYTES, FILE_BYTES + 1)))
                num_cut += 1
        return num_cut


def test_mutated_black_boxes_end_nothing_and_no_number_leaves_its_range(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the kernel says of a process has nothing to do with its box, and costs a read each.
    monkeypatch.setattr(stall_watch, "_starved_s", lambda pid: 0.0)
    monkeypatch.setattr(stall_watch, "process_state", lambda pid: "S")
    random = Random(SEED)
    boxes = Boxes(memory_dir)
    events: list[agents_pb2.AgentEvent] = []
    mistakes = Mistakes()

    async def run() -> None:
        gone = asyncio.get_running_loop().create_future()
        workers = [
            Worker(
                job_id="job",
                attempt=1,
                rank=rank,
                paths=paths,
                requested_ns=0,
                gone=gone,
                mistakes=mistakes,
            )
            for rank, paths in enumerate(boxes.paths)
        ]
        for worker in workers:
            worker.pid = os.getpid()
        reporter = Reporter(lambda event, weight: events.append(event), lambda: False, Reports())
        stall_watch = StallWatch(lambda: workers, lambda: None)
        reporter.watch(workers)
        begun_bytes, num_cut = 0, 0
        for number in range(NUM_CASES // NUM_RANKS):
            num_cut += boxes.spoil(random)
            reporter.look(float(number))
            stall_watch.look(float(number))
            for worker in workers:
                summary = reporter.summary(worker)
                stall_watch.describe(worker, summary)
                check(summary)
            readings = rank_metrics.read(workers)
            if number % 20 == 0:
                list(rank_metrics.collect(readings))
                for worker in workers:
                    check(
                        post_mortem(
                            worker, 1, out_of_memory="", max_text_bytes=99, stderr_tail_bytes=99
                        )
                    )
                list(left_steps(memory_dir / "jobs", memory_dir / "jobs"))
            for event in events:
                check(event)
            events.clear()
            if number == NUM_CASES // NUM_RANKS // 5:
                begun_bytes = resident_bytes()
        grown_bytes = resident_bytes() - begun_bytes
        assert grown_bytes < 8 * 2**20, f"{grown_bytes} bytes more"
        # Only those that were cut short could not be read, and that was counted.
        assert num_cut > 0
        assert mistakes.counts.keys() == {"black box"}
        assert num_cut <= mistakes.counts["black box"] <= 20 * num_cut
        for worker in workers:
            worker.close()

    asyncio.run(run())


def test_garbage_in_one_rank_s_box_leaves_the_agent_and_the_other_ranks_alone(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank1="garbage")
    start_job(controller)
    pids = [agent.worker_pid(1, rank) for rank in (0, 1)]

    def is_unknown() -> bool:
        ranks = {rank.rank: rank for beat in controller.heartbeats() for rank in beat.ranks}
        return len(ranks) == 2 and ranks[1].phase == "unknown" and ranks[0].completed_step > 0

    wait_for(is_unknown, "a heartbeat with an unknown phase")
    num_beats = len(controller.heartbeats())
    os.kill(pids[1], signal.SIGKILL)
    assert controller.exit_of("job", 1, 1).code == -signal.SIGKILL
    wait_for(lambda: len(controller.heartbeats()) > num_beats + 2, "more heartbeats")
    assert len(controller.hellos) == 1
    assert Path(f"/proc/{pids[0]}").exists()
    # The next attempt runs there as anywhere.
    assert controller.result(controller.command(stop_command(1))).ok
    agent.behave()
    assert controller.result(controller.command(start_command(2))).ok
    controller.progress("job", 2)


@pytest.mark.parametrize(
    "left",
    [
        json.dumps({"type": "\ud800", "message": "\udfff", "traceback": "x" * 200_000}),
        json.dumps({"at_s": 10**400}),
        '{"at_s": NaN}',
        "[" * 200_000,
        "[]",
        '{"at_s": "now", "message": ["a"]}',
    ],
    ids=["half a surrogate pair", "a huge time", "NaN", "nested", "a list", "other types"],
)
def test_whatever_a_worker_reports_of_its_end_is_told(tmp_path: Path, left: str) -> None:
    async def run() -> agents_pb2.WorkerExit:
        gone = asyncio.get_running_loop().create_future()
        paths = WorkerFiles.below(tmp_path, 0)
        paths.error.write_text(left)
        paths.environment.write_text(left)
        assert not read_environment(paths.environment).environment
        worker = Worker(job_id="job", attempt=1, rank=0, paths=paths, requested_ns=0, gone=gone)
        return post_mortem(worker, 1, out_of_memory="", max_text_bytes=99, stderr_tail_bytes=99)

    found = asyncio.run(run())
    check(found)
    assert found.code == 1
    assert len(found.traceback) <= 99


def test_what_a_worker_notes_of_its_environment_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    document = {
        "environment": {f"n{number}\ud800": "v" * 4_000 for number in range(1_000)},
        "changes": ["c" * 4_000] * 1_000,
        "left_out": ["l" * 4_000] * 1_000,
        "skipped": [[2**70, "too far"], [-1, "before"], [8, "w" * 4_000]] * 1_000,
    }
    path.write_text(json.dumps(document))
    note = read_environment(path)
    progress = agents_pb2.ProgressMade(
        environment=note.environment,
        environment_changes=note.changes,
        data_left_out=note.left_out,
    )
    assert len(progress.SerializeToString()) < 2 * 2**20
    assert {step for step, _ in note.skipped} == {8}
    assert len(note.skipped) <= 256
