"""Who uploads what on a node, with an uploader that only notes what it is told."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.core.manifest import CommitRecord
from checkpoint.errors import DamagedMemoryError
from checkpoint.memory import held_bytes
from checkpoint.stage.damage import Damage, leave_note
from checkpoint.upload.commit import Committed
from checkpoint.upload.insisting import Insisting
from controller.agent.memory import uploads as uploads_module
from controller.agent.memory.uploads import PushError, UploadPlan, Uploads, delete_job_memory

PLAN = UploadPlan(
    url="memory://checkpoints/job",
    job_id="job",
    memory_dir=Path(tempfile.mkdtemp(prefix="outlast-test-")),
    local_ranks=(0, 1),
    saver_ranks=(0, 1),
    is_coordinator=True,
    timeout_s=600.0,
    interval_steps=50,
    keep=3,
    keep_every_steps=None,
    keep_best=0,
    memory_bytes=1 << 27,
    bytes_per_s=None,
    owner="its mark",
)
FOUND = CommitRecord(step=0, attempt=1, world_size=2, size_bytes=1000, manifest_sha256="0" * 64)
COMMITTED = Committed(
    step=50, size_bytes=1000, upload_s=0.5, total_s=2.5, is_behind=False, attempt=1
)


class NotingUploader:
    """Stands in for `checkpoint.upload.uploader.Uploader`."""

    notes: list[str]

    def __init__(self, **settings: object) -> None:
        self.name = f"{settings['job_id']}:{settings['local_ranks']}"
        self.insisting = Insisting([], last_step=None, for_s=0.0)
        committed, trouble = settings["on_committed"], settings["on_trouble"]
        found = settings["on_found"]
        assert callable(committed)
        assert callable(found)
        assert callable(trouble)
        self.found: Callable[..., None] = found
        self.committed: Callable[..., None] = committed
        self.trouble: Callable[..., None] = trouble

    def start(self) -> None:
        self.notes.append(f"start {self.name}")
        thread = threading.Thread(target=self.work)
        thread.start()
        thread.join()

    def work(self) -> None:
        self.found(FOUND)
        self.committed(COMMITTED)
        self.trouble(100, "upload", "No space left on device")

    def drain(self, timeout_s: float) -> bool:
        self.notes.append(f"drain {self.name} {timeout_s}")
        return True

    def stop(self) -> None:
        self.notes.append(f"stop {self.name}")


class Heard:
    """Upload events, with the thread they came in."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.threads: set[int] = set()

    def upload_found(self, job_id: str, found: CommitRecord) -> None:
        self.threads.add(threading.get_ident())
        self.events.append((job_id, found))

    def upload_committed(self, job_id: str, committed: Committed) -> None:
        self.threads.add(threading.get_ident())
        self.events.append((job_id, committed))

    def upload_trouble(self, job_id: str, step: int, stage: str, detail: str) -> None:
        self.threads.add(threading.get_ident())
        self.events.append((job_id, step, stage, detail))

    def memory_damaged(self, job_id: str, damage: Damage) -> None:
        self.threads.add(threading.get_ident())
        self.events.append((job_id, damage))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    NotingUploader.notes = []
    monkeypatch.setattr(uploads_module, "Uploader", NotingUploader)
    return NotingUploader.notes


def test_uploader_outlives_attempts_and_is_replaced_when_ranks_move(notes: list[str]) -> None:
    async def run() -> None:
        uploads = Uploads(Heard())
        await uploads.follow(PLAN)
        await uploads.follow(PLAN)
        await uploads.follow(replace(PLAN, local_ranks=(2, 3), is_coordinator=False))
        assert len(uploads) == 1
        await uploads.finish("job", PLAN.memory_dir)
        assert len(uploads) == 0

    asyncio.run(run())
    assert notes == [
        "start job:(0, 1)",
        "stop job:(0, 1)",
        "start job:(2, 3)",
        "drain job:(2, 3) 630.0",
        "stop job:(2, 3)",
    ]


def test_agent_that_starts_after_the_end_finishes_what_the_last_one_left(
    notes: list[str], tmp_path: Path
) -> None:
    async def run() -> None:
        before = Uploads(Heard())
        await before.follow(replace(PLAN, memory_dir=tmp_path))
        await before.stop()
        await Uploads(Heard()).finish("job", tmp_path)
        # As an older agent has kept it.
        plan = json.loads((tmp_path / "upload.json").read_text())
        assert plan.pop("owner") == "its mark"
        (tmp_path / "upload.json").write_text(json.dumps(plan))
        await Uploads(Heard()).finish("job", tmp_path)
        await Uploads(Heard()).finish("job", tmp_path / "never-ran-here")

    asyncio.run(run())
    again = ["start job:(0, 1)", "drain job:(0, 1) 630.0", "stop job:(0, 1)"]
    assert notes[2:] == again * 2


def test_what_an_uploader_reports_is_heard_in_the_event_loop(notes: list[str]) -> None:
    heard = Heard()

    async def run() -> None:
        uploads = Uploads(heard)
        await uploads.follow(PLAN)
        await uploads.stop()

    asyncio.run(run())
    assert heard.events == [
        ("job", FOUND),
        ("job", COMMITTED),
        ("job", 100, "upload", "No space left on device"),
    ]
    assert heard.threads == {threading.get_ident()}
    assert notes == ["start job:(0, 1)", "stop job:(0, 1)"]


def test_damaged_memory_is_heard_in_the_event_loop_also_at_the_very_end(
    notes: list[str], tmp_path: Path
) -> None:
    heard = Heard()
    error = DamagedMemoryError(rank=1, slot=2, step=30, attempt=4, what="it is not what it was")

    async def run() -> None:
        uploads = Uploads(heard)
        await uploads.follow(replace(PLAN, memory_dir=tmp_path))
        leave_note(tmp_path, error)
        await uploads.finish("job", tmp_path)
        assert uploads.guarded.damaged == 1

    asyncio.run(run())
    damages = [event for event in heard.events if isinstance(event[1], Damage)]
    words = "step 30, host memory, slot 2 of rank 1: it is not what it was"
    assert damages == [("job", Damage(rank=1, slot=2, step=30, attempt=4, what=words))]
    assert heard.threads == {threading.get_ident()}


@pytest.mark.parametrize("way", ["drop", "finish", "stop"])
def test_a_push_ends_with_its_uploader(notes: list[str], tmp_path: Path, way: str) -> None:
    async def run() -> None:
        uploads = Uploads(Heard())
        plan = replace(PLAN, memory_dir=tmp_path)
        await uploads.follow(plan)
        push = asyncio.create_task(
            uploads.push("job", tmp_path, url=plan.url, owner="", timeout_s=600.0)
        )
        await asyncio.sleep(0)
        match way:
            case "drop":
                await uploads.drop("job")
            case "finish":
                await uploads.finish("job", tmp_path)
            case _:
                await uploads.stop()
        async with asyncio.timeout(30.0):
            with pytest.raises(PushError, match="the uploader was stopped"):
                await push

    asyncio.run(run())


def test_a_push_has_a_deadline_of_its_own(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "PUSH_MARGIN_S", 0.0)

    async def run() -> None:
        uploads = Uploads(Heard())
        plan = replace(PLAN, memory_dir=tmp_path)
        await uploads.follow(plan)
        # This uploader never looks, as one whose call to storage hangs.
        with pytest.raises(PushError, match="did not end within"):
            await uploads.push("job", tmp_path, url=plan.url, owner="", timeout_s=0.0)
        await uploads.stop()

    asyncio.run(run())


def test_held_memory_is_counted_and_freed(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "slot-0").write_bytes(b"x" * 100_000)
    assert held_bytes([tmp_path / "job", tmp_path / "unknown"]) >= 100_000
    delete_job_memory(tmp_path / "job")
    assert held_bytes([tmp_path / "job"]) == 0
    assert not (tmp_path / "job").exists()
    delete_job_memory(tmp_path / "job")
