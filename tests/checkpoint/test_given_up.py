"""What a person gave up by choosing where a job goes on gets no further than it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoint.storage.storage import Storage
from checkpoint.upload.uploader import Uploader
from outlast.chosen import ChosenStart
from tests.checkpoint.helpers import (
    DEADLINE_S,
    News,
    commit_rules,
    make_stager,
    make_tensors,
    uploading,
)


def test_nothing_given_up_is_uploaded_or_committed(url: str, tmp_path: Path) -> None:
    tensors = make_tensors(0)
    stager = make_stager(tmp_path / "memory", tensors)
    with uploading(url, tmp_path / "memory") as (uploader, _):
        uploader.stop()
        stager.save(5, {}, upload=True, common_step=4)
    rules = replace(commit_rules(), chosen=(ChosenStart(step=0, attempt=1),))
    news = News()
    uploader = Uploader(
        url,
        "job-1",
        tmp_path / "memory",
        (0,),
        (0,),
        True,
        rules,
        news.on_committed,
        news.on_trouble,
    )
    uploader.start()
    try:
        assert uploader.drain(DEADLINE_S)
    finally:
        uploader.stop()
        stager.close()
    assert (news.committed, news.trouble) == ([], [])
    assert Storage(url).entries("step-00000005.1") == []
