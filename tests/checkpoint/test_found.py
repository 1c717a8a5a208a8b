"""A checkpoint that was committed by an agent which ended before anybody heard of it."""

from __future__ import annotations

from pathlib import Path

from checkpoint.core import names
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import DEADLINE_S, commit_steps, uploading


def test_coordinator_that_begins_says_what_was_committed_last(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with uploading(url, tmp_path / "first") as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.found == []
    commit_steps(url, tmp_path / "memory", [3, 5])
    for _ in range(2):
        with uploading(url, tmp_path / "next") as (uploader, news):
            assert uploader.drain(DEADLINE_S)
        assert (news.committed, news.found) == ([], [(5, 1)])


def test_other_nodes_say_nothing_of_it(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    commit_steps(url, tmp_path / "memory", [3])
    with uploading(url, tmp_path / "next", coordinator=False) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.found == []


def test_record_that_cannot_be_read_holds_up_nothing(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    commit_steps(url, tmp_path / "memory", [3])
    (tmp_path / "store" / names.commit_path(3)).write_text("{}")
    with uploading(url, tmp_path / "next") as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert (news.found, news.trouble) == ([], [])
    assert Storage(url).committed_steps() == [3]
