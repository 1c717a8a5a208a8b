"""A checkpoint root belongs to one job: others are refused, and its own attempts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.core import names
from checkpoint.errors import RootTakenError
from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import Storage
from checkpoint.upload.uploader import Uploader
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import (
    DEADLINE_S,
    News,
    commit_rules,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
)

OWNER = Owner(job_id="gpt-abc12", mark="of one controller")
OTHER = Owner(job_id="gpt-abc12", mark="of another controller")


@both_stores
def test_first_job_has_the_root_for_good_and_may_say_so_again(url: str) -> None:
    claim(Storage(url), OWNER)
    claim(Storage(url), OWNER)
    with pytest.raises(RootTakenError) as caught:
        claim(Storage(url), OTHER)
    assert caught.value.lasting
    for words in ("checkpoint.url", url, "gpt-abc12", f"checkpoint.load: {url}"):
        assert words in str(caught.value)
    claim(Storage(url), OWNER)


def test_damaged_record_does_not_lock_a_job_out(url: str) -> None:
    storage = Storage(url)
    claim(storage, OWNER)
    raw = storage.read_bytes(names.OWNER)
    storage.write_bytes(names.OWNER, raw[:-2])
    claim(storage, OWNER)
    assert storage.read_bytes(names.OWNER) == raw


def upload(url: str, memory: Path, owner: Owner, *, seed: int) -> News:
    """Save and upload step 5 of attempt 1 for a job."""
    stager = make_stager(memory, make_tensors(seed))
    stager.save(5, {}, upload=True, common_step=-1)
    stager.close()
    news = News()
    uploader = Uploader(
        url,
        owner.job_id,
        memory,
        (0,),
        (0,),
        True,
        commit_rules(),
        news.on_committed,
        news.on_trouble,
        owner=owner,
    )
    uploader.start()
    assert uploader.drain(DEADLINE_S)
    uploader.stop()
    return news


def test_uploads_of_another_job_touch_nothing_and_are_trouble_in_words(
    url: str, tmp_path: Path
) -> None:
    """Both are in attempt 1 and save step 5: without an owner they would write the same files."""
    assert upload(url, tmp_path / "memory", OWNER, seed=1).committed == [5]
    root = tmp_path / "store/job-1"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    news = upload(url, tmp_path / "other", OTHER, seed=2)
    assert news.committed == []
    [(step, stage, detail)] = news.trouble
    assert (step, stage) == (5, "upload")
    assert "belongs to another job" in detail
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before
    restored = make_tensors(9)
    load_alone(Storage(url), 5, restored)
    assert same_bits(restored, make_tensors(1))
