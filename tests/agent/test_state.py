"""The agent's folders: for its own user, also where anybody may make one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from controller.agent import run as agent_run
from controller.agent import state
from controller.agent.__main__ import main as agent_main
from controller.agent.config import AgentConfig
from controller.agent.state import AgentStateError, make_private
from controller.store.database import Database


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_of_an_agent_are_for_its_user_only_in_a_folder_that_is_open(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (folder / "jobs").mkdir(parents=True)
    for each in (folder, folder / "jobs"):
        each.chmod(0o755)
    agent = state.AgentState(folder, tmp_path / "memory", tmp_path / "data")
    try:
        agent.write_agent("one", 29500, [])
    finally:
        agent.close()
    assert mode(folder / "agent.json") == 0o600
    assert mode(folder / "jobs") == 0o700


def test_folders_of_an_agent_are_for_its_user_only(shared: Path) -> None:
    folder = shared / "outlast-1" / "node-0"
    make_private(folder)
    assert [mode(folder.parent), mode(folder)] == [0o700, 0o700]
    # One of an earlier version is closed.
    folder.chmod(0o755)
    make_private(folder)
    assert mode(folder) == 0o700


def test_link_in_the_place_of_a_guessed_name_is_refused(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared / "outlast-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AgentStateError, match=f"{shared / 'outlast-1'} is a link"):
        make_private(shared / "outlast-1")
    with pytest.raises(AgentStateError, match="is a link"):
        make_private(shared / "outlast-1" / "node-0")


def test_folder_of_somebody_else_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "outlast-1").mkdir()
    monkeypatch.setattr(state.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AgentStateError, match=r"belongs to user \d+ and not to \d+"):
        make_private(shared / "outlast-1" / "node-0")


def test_folders_below_a_private_one_are_left_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "state"
    (tmp_path / "mine").mkdir(mode=0o755)
    make_private(folder)
    assert mode(tmp_path / "mine") == 0o755


def test_journal_is_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.touch(0o644)
    Database(path).close()
    assert mode(path) == 0o600


def test_agent_that_cannot_start_says_why_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(config: AgentConfig) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(agent_run, "Agent", full)
    monkeypatch.setattr(agent_run, "become_subreaper", lambda: None)
    folders = ("--state-dir", "--memory-dir", "--data-dir")
    places = [word for name in folders for word in (name, str(tmp_path))]
    code = agent_main(["--node", "n0", "--controller", "127.0.0.1:1", "--workers", "1", *places])
    assert code == 2
    said = capsys.readouterr().err
    assert "the agent of n0 cannot start: [Errno 24] Too many open files; look at" in said
