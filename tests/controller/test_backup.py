"""`outlast backup` beside a controller that runs, and `outlast restore` where none does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core.changes import State
from controller.state_dir import JOURNAL
from controller.store import backup as backup_module
from controller.store.curves import Curves
from controller.store.database import Database
from outlast.client import Client
from outlast.ids import JobId, NodeId
from tests.cli.running import Done, outlast
from tests.controller.fakes import FakeAgent, spec_document, until
from tests.controller.processes import ROOT, controller, wait_for
from tests.controller.test_journal import BATCH, node_put, opened, step_row


def back_up(state_dir: Path, file: Path) -> Done:
    return outlast("backup", str(file), "--state-dir", str(state_dir))


def restore(file: Path, state_dir: Path, *options: str) -> Done:
    return outlast("restore", str(file), "--state-dir", str(state_dir), *options)


def reason_of(done: Done) -> str:
    assert done.returncode == 2, done
    assert done.stdout == ""
    return " ".join(done.stderr.split())


def load(state_dir: Path) -> State:
    with opened(state_dir / JOURNAL) as journal:
        return journal.load()


def test_job_goes_on_in_another_folder_from_a_copy_made_while_it_ran(tmp_path: Path) -> None:
    """The machine of a controller is lost: agents meet another one, which knows their job."""
    file = tmp_path / "outlast.backup"

    async def scenario() -> None:
        with controller(tmp_path / "first") as first:
            address = first.grpc
            agents = [FakeAgent(f"n{number}", lambda: address) for number in range(2)]
            for agent in agents:
                agent.start()
            await until(lambda: all(agent.is_connected for agent in agents), "agents join")
            with Client(address) as client:
                job_id = client.submit(spec_document()).job_id
            await until(lambda: all(agent.running for agent in agents), "workers run")
            for agent in agents:
                await agent.progress(2)
            sent = await agents[0].report(1.5, 1.25)
            await until(lambda: agents[0].acked_seq >= sent, "the losses are taken in")
            await reach(address, job_id, "RUNNING")

            done = await asyncio.to_thread(back_up, first.state_dir, file)
            assert done.returncode == 0, done.stderr
            assert "the state in term 1" in done.stdout
            commands = [agent.kinds() for agent in agents]
            first.stop()
        assert restore(file, tmp_path / "second").returncode == 0
        with controller(tmp_path / "second") as second:
            address = second.grpc
            await until(
                lambda: all(agent.welcomes[-1].term == 2 for agent in agents), "agents come back"
            )
            await until(lambda: all(agent.is_connected for agent in agents), "they are there")
            for agent in agents:
                await agent.progress(3)
            with Client(address) as client:
                job, steps = client.get(job_id, with_steps=True)
            assert (job.state, job.attempt, job.restarts) == ("RUNNING", 1, 0)
            assert [report.loss for report in steps] == [1.5, 1.25]
            assert [agent.kinds() for agent in agents] == commands, "nothing was started again"
            for rank, agent in enumerate(agents):
                await agent.exit(rank, 0, step=10)
            await agents[0].commit(job_id, 10)
            await reach(address, job_id, "SUCCEEDED")
            await asyncio.gather(*(agent.stop() for agent in agents))

    asyncio.run(scenario())


async def reach(address: str, job_id: str, state: str) -> None:
    with Client(address) as client:
        await asyncio.to_thread(
            wait_for, lambda: client.get(job_id)[0].state == state, f"{job_id} is {state}"
        )


def test_copies_beside_a_busy_writer_have_whole_batches(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.controller.test_journal", str(state_dir / JOURNAL)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert writer.stdout is not None
    known = 0
    try:
        for number in range(4):
            announced = [int(writer.stdout.readline()) for _ in range(20)]
            assert back_up(state_dir, tmp_path / "copy").returncode == 0
            assert restore(tmp_path / "copy", tmp_path / f"{number}").returncode == 0
            reasons = [node.reason for node in load(tmp_path / f"{number}").nodes.values()]
            assert len(reasons) == BATCH
            assert len(set(reasons)) == 1, "a part of a batch was copied"
            assert int(reasons[0]) >= max(announced[-1], known), "an announced batch is missing"
            known = int(reasons[0])
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """The state of a controller that has ended: a node, a loss and an archive of code."""
    folder = tmp_path / "state"
    folder.mkdir()
    database = Database(folder / JOURNAL)
    curves = Curves(database)
    curves.take([step_row(1, 1, 5.0)])
    curves.flush()
    database.close()
    keep_node(folder, "n0")
    (folder / "code").mkdir()
    (folder / "code" / CODE_NAME).write_bytes(CODE)
    (folder / "code" / ".draft-1").write_bytes(b"half of another")
    (folder / "join-token").write_text("secret")
    return folder


CODE = b"code of a job"
CODE_NAME = hashlib.sha256(CODE).hexdigest()


def keep_node(folder: Path, name: str) -> None:
    with opened(folder / JOURNAL) as journal:
        journal.take_over()
        journal.append([node_put(name)])


def test_what_is_in_a_copy(state_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "copy"
    file.write_text("an older copy")
    file.chmod(0o644)
    assert back_up(state_dir, file).returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.glob(".*")) == []
    with zipfile.ZipFile(file) as archive:
        assert sorted(archive.namelist()) == sorted(
            [f"code/{CODE_NAME}", JOURNAL, "manifest.json"]
        ), "no tokens, no half archives"
        manifest = json.loads(archive.read("manifest.json"))
        digest = hashlib.sha256(archive.read(JOURNAL)).hexdigest()
    assert (manifest["schema_version"], manifest["term"]) == (2, 1)
    assert manifest["sha256"] == {JOURNAL: digest, f"code/{CODE_NAME}": CODE_NAME}

    to = tmp_path / "new" / "state"
    assert restore(file, to).returncode == 0
    assert set(load(to).nodes) == {NodeId("n0")}
    database = Database(to / JOURNAL)
    assert [row.loss for row in Curves(database).read(JobId("j"))] == [5.0]
    database.close()
    assert (to / "code" / CODE_NAME).read_bytes() == CODE
    for path in (to / JOURNAL, to / "code" / CODE_NAME):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_journal_that_is_there_is_set_aside_only_when_told_to(
    state_dir: Path, tmp_path: Path
) -> None:
    assert back_up(state_dir, tmp_path / "copy").returncode == 0
    # Killed: what it wrote last is in SQLite's log only.
    subprocess.run([sys.executable, "-c", _KEEP_AND_DIE, str(state_dir)], cwd=ROOT, check=False)
    assert (state_dir / f"{JOURNAL}-wal").stat().st_size > 0
    reason = reason_of(restore(tmp_path / "copy", state_dir))
    assert f"{state_dir / JOURNAL} is there already; give --force" in reason

    assert restore(tmp_path / "copy", state_dir, "--force").returncode == 0
    assert set(load(state_dir).nodes) == {NodeId("n0")}
    (aside,) = state_dir.glob("replaced-*")
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert set(load(aside).nodes) == {NodeId("n0"), NodeId("n1")}


_KEEP_AND_DIE = """
import os, pathlib, signal, sys
from tests.controller.test_backup import JOURNAL
from tests.controller.test_journal import node_put, opened
with opened(pathlib.Path(sys.argv[1]) / JOURNAL) as journal:
    journal.take_over()
    journal.append([node_put("n1")])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_restore_is_refused_while_a_controller_runs(state_dir: Path, tmp_path: Path) -> None:
    assert back_up(state_dir, tmp_path / "copy").returncode == 0
    with controller(tmp_path / "running") as it:
        reason = reason_of(restore(tmp_path / "copy", it.state_dir, "--force"))
        assert f"another controller (pid {it.pid}, {it.grpc}) uses this state directory" in reason
        assert not list(it.state_dir.glob("replaced-*"))


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


def swap_the_journal(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        manifest = archive.read("manifest.json")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(JOURNAL, b"SQLite format 3\0")
        archive.writestr("manifest.json", manifest)


def write_text(file: Path) -> None:
    file.write_text("notes")


def reach_out(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    manifest["sha256"]["../outside"] = "0"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, swap_the_journal, write_text, reach_out])
def test_damaged_copy_is_refused_and_changes_nothing(
    state_dir: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "copy"
    assert back_up(state_dir, file).returncode == 0
    damage(file)
    keep_node(state_dir, "n1")
    before = sorted(state_dir.iterdir())
    reason = reason_of(restore(file, state_dir, "--force"))
    assert str(file) in reason
    assert "damaged" in reason
    assert [path for path in sorted(state_dir.iterdir()) if path.name != "lock"] == before
    assert set(load(state_dir).nodes) == {NodeId("n0"), NodeId("n1")}


def test_copy_of_a_newer_version_is_refused(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert back_up(state_dir, tmp_path / "copy").returncode == 0
    monkeypatch.setattr(backup_module, "SCHEMA_VERSION", 1)
    reason = reason_of(restore(tmp_path / "copy", tmp_path / "other"))
    assert "version 2 of the journal" in reason
    assert "restore it with that version" in reason
    assert not (tmp_path / "other").exists()


def test_damaged_journal_is_not_copied(state_dir: Path, tmp_path: Path) -> None:
    (state_dir / JOURNAL).write_bytes(b"not a database at all" * 100)
    assert "not a database" in reason_of(back_up(state_dir, tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_places_that_cannot_be_used_are_named(state_dir: Path, tmp_path: Path) -> None:
    assert f"has no {JOURNAL}" in reason_of(back_up(tmp_path / "nowhere", tmp_path / "copy"))
    missing = tmp_path / "missing" / "copy"
    assert f"{missing} cannot be written" in reason_of(back_up(state_dir, missing))
    assert f"{missing} cannot be read" in reason_of(restore(missing, tmp_path / "other"))
