"""torch's description of a checkpoint comes from a child process, and damage to it is noticed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpoint.commit import Coordinator
from checkpoint.core.manifest import Manifest
from checkpoint.describe import Describer, DescriptionError, describe_in_child
from checkpoint.storage import Storage
from tests.checkpoint.helpers import (
    DEADLINE_S,
    commit_rules,
    commit_steps,
    describe_here,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
)


def manifest_of(url: str, tmp_path: Path) -> Manifest:
    commit_steps(url, tmp_path / "memory", [4])
    return Storage(url).read_commit(4)[1]


def test_a_child_process_describes_as_this_one_does(url: str, tmp_path: Path) -> None:
    raw = manifest_of(url, tmp_path).to_json()
    made = describe_in_child(raw, is_stopping=lambda: False)
    assert made == describe_here(raw)
    assert (tmp_path / "store/job-1/step-00000004.1/.metadata").read_bytes() == made


def test_a_child_that_fails_says_why_in_one_line() -> None:
    with pytest.raises(DescriptionError, match="RecordError"):
        describe_in_child(b"no manifest", is_stopping=lambda: False)


def test_an_uploader_that_stops_ends_its_child(url: str, tmp_path: Path) -> None:
    raw = manifest_of(url, tmp_path).to_json()
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(DescriptionError):
        describe_in_child(raw, is_stopping=stopping.is_set)
    # Nobody is left behind.
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_one_layout_is_described_once(url: str, tmp_path: Path) -> None:
    manifest = manifest_of(url, tmp_path)
    asked: list[bytes] = []

    def counted(raw: bytes) -> bytes:
        asked.append(raw)
        return describe_here(raw)

    describer = Describer(counted)
    assert describer.description(manifest) == describer.description(manifest)
    assert len(asked) == 1


def test_a_checkpoint_that_torch_cannot_be_told_of_is_still_one(url: str, tmp_path: Path) -> None:
    def fail(raw: bytes) -> bytes:
        raise DescriptionError("No module named 'torch'")

    stager = make_stager(tmp_path / "memory", make_tensors(4))
    with uploading(url, tmp_path / "memory", describe=fail) as (uploader, news):
        stager.save(4, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [4]
    [(step, stage, detail)] = news.trouble
    assert (step, stage) == (4, "commit")
    assert "no .metadata: No module named 'torch'" in detail
    restored = make_tensors(9)
    load_alone(Storage(url), 4, restored)
    assert same_bits(restored, make_tensors(4))


def test_a_coordinator_that_comes_after_leaves_a_manifest_and_what_it_names(
    url: str, tmp_path: Path
) -> None:
    """The one before wrote the manifest and died; another torch describes otherwise."""
    manifest = manifest_of(url, tmp_path)
    storage = Storage(url)
    storage.delete_file("commits/00000004.json")
    for part in manifest.parts:
        storage.write_bytes("step-00000004.1/parts/rank-00000.json", part.to_json())
    coordinator = Coordinator(
        storage, [0], Describer(lambda raw: b"other"), commit_rules(timeout_s=DEADLINE_S)
    )
    coordinator.adopt()
    assert [type(news).__name__ for news in coordinator.poll()] == ["Committed"]
    assert storage.read_commit(4)[1] == manifest
    load_alone(storage, 4, make_tensors(9))
