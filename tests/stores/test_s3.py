"""Checkpoints on a real S3 server, behind a proxy that breaks things."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint import catalog
from checkpoint.core.pacing import TransferLimits
from checkpoint.core.retention import RetentionPolicy
from checkpoint.errors import StorageUnavailableError
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import Cleaner
from checkpoint.upload.transfer import Transfer
from tests.checkpoint.helpers import (
    assert_one_of_many_creates,
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)
from tests.stores.proxy import Fault, FaultProxy
from tests.stores.seaweed import BUCKET, Seaweed

# Five parts of the smallest size.
NUM_FLOATS = 10 << 20
SMALL_PARTS = TransferLimits(memory_bytes=32 << 20)
LONG_S = 120.0


def large_state(value: float) -> list[NamedTensor]:
    weights = torch.arange(NUM_FLOATS, dtype=torch.float32) + value
    return [NamedTensor("w", weights, (NUM_FLOATS,), (0,))]


def save_large(memory: Path, step: int) -> Stager:
    stager = make_stager(memory, large_state(step))
    stager.save(step, {}, upload=True, common_step=-1)
    return stager


def assert_whole(url: str, step: int) -> None:
    """The checkpoint exists, and every byte of it is what was saved."""
    storage = Storage(url)
    assert catalog.verify(storage, step, lambda num_bytes: None) == []
    restored = large_state(-1)
    load_alone(storage, step, restored)
    assert same_bits(restored, large_state(step))


def test_probe_passes_and_leaves_nothing(s3_url: str) -> None:
    Storage(s3_url).probe()
    assert not any(Storage(s3_url).entries(entry.name) for entry in Storage(s3_url).entries(""))


def test_of_many_writers_exactly_one_creates_a_record(s3_url: str) -> None:
    assert_one_of_many_creates(Storage(s3_url))


def test_checkpoints_come_back_bitwise_and_old_ones_go(s3_url: str, tmp_path: Path) -> None:
    commit_steps(s3_url, tmp_path, [1, 2, 3], keep=2)
    storage = Storage(s3_url)
    assert storage.committed_steps() == [3, 2]
    # Of the oldest no byte is left; SeaweedFS keeps empty folders for a while.
    for name in ("manifest.json", "__0_0.distcp", ".metadata"):
        with pytest.raises(FileNotFoundError):
            storage.size(f"step-00000001.1/{name}")
    restored = make_tensors(9)
    assert load_alone(storage, 3, restored) == {"step": 3}
    assert same_bits(restored, make_tensors(3))


def test_large_payload_goes_in_parts_and_leaves_no_upload_open(s3_url: str, tmp_path: Path) -> None:
    save_large(tmp_path, 5)
    with uploading(s3_url, tmp_path, limits=SMALL_PARTS) as (uploader, news):
        assert uploader.drain(LONG_S)
    assert (news.committed, news.trouble) == ([5], [])
    assert Storage(s3_url).unfinished() == []
    assert_whole(s3_url, 5)


@pytest.mark.parametrize(
    ("fault", "after_bytes"),
    [(Fault.BUSY, 0), (Fault.DROPPED, 3 << 20), (Fault.CUT, 0)],
)
def test_passing_trouble_costs_time_and_not_the_checkpoint(
    s3_url: str, tmp_path: Path, proxy: FaultProxy, fault: Fault, after_bytes: int
) -> None:
    save_large(tmp_path, 5)
    proxy.inject(fault, times=3, after_bytes=after_bytes)
    with uploading(s3_url, tmp_path, timeout_s=LONG_S, limits=SMALL_PARTS) as (uploader, news):
        assert uploader.drain(LONG_S)
        assert proxy.num_faults == 3
    assert (news.committed, news.trouble) == ([5], [])
    assert_whole(s3_url, 5)


def test_lasting_503_is_reported_in_words_and_the_next_upload_succeeds(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    tensors = make_tensors(0)
    stager = make_stager(tmp_path, tensors)
    with uploading(s3_url, tmp_path, timeout_s=5.0) as (uploader, news):
        assert uploader.drain(LONG_S)
        proxy.inject(Fault.BUSY)
        stager.save(1, {}, upload=True, common_step=-1)
        wait_for(lambda: bool(news.trouble), "trouble", timeout_s=LONG_S)
        step, stage, detail = news.trouble[0]
        assert (step, stage) == (1, "upload")
        assert s3_url in detail
        proxy.heal()
        stager.save(2, {}, upload=True, common_step=1)
        wait_for(lambda: news.committed == [2], "the next upload", timeout_s=LONG_S)


def test_part_that_gets_no_answer_is_sent_again(s3_url: str, proxy: FaultProxy) -> None:
    """s3fs waits for ever (seen: 150 s): the deadline of each call is ours."""
    payload = memoryview(bytes(range(256)) * (20 << 12))
    storage = Storage(s3_url, deadline_s=5.0)
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        if seconds > 0:
            pauses.append(seconds)
            proxy.heal()
        return False

    transfer = Transfer(storage, SMALL_PARTS, pause=pause, jitter=lambda: 0.0)
    storage.probe()
    proxy.on_sent = lambda total: total > (9 << 20) and proxy.inject(Fault.SILENT)
    transfer.send("file", payload, lambda at, part: None, deadline_s=time.monotonic() + LONG_S)
    assert pauses
    assert storage.read_bytes("file") == payload
    assert storage.unfinished() == []


def test_silence_fails_the_upload_at_its_deadline(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    stager = make_stager(tmp_path, make_tensors(0))
    with uploading(s3_url, tmp_path, timeout_s=4.0) as (uploader, news):
        assert uploader.drain(LONG_S)
        proxy.inject(Fault.SILENT)
        stager.save(1, {}, upload=True, common_step=-1)
        wait_for(lambda: bool(news.trouble), "trouble", timeout_s=LONG_S)
        assert "no answer" in news.trouble[0][2]
        proxy.heal()
        stager.save(2, {}, upload=True, common_step=1)
        wait_for(lambda: news.committed == [2], "the next upload", timeout_s=LONG_S)


def test_slow_storage_fails_an_upload_only_at_its_deadline(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    save_large(tmp_path, 5)
    with uploading(s3_url, tmp_path, timeout_s=6.0, limits=SMALL_PARTS) as (uploader, news):
        assert uploader.drain(LONG_S) or news.committed == [5]
    assert news.committed == [5]
    proxy.inject(Fault.SLOW, bytes_per_s=256 << 10)
    stager = save_large(tmp_path / "slow", 6)
    with uploading(s3_url, tmp_path / "slow", timeout_s=3.0, limits=SMALL_PARTS) as (_, news):
        wait_for(lambda: bool(news.trouble), "trouble", timeout_s=LONG_S)
    assert news.trouble[0][:2] == (6, "upload")
    assert not stager.upload_busy


def test_server_killed_in_the_middle_of_an_upload_delays_the_checkpoint(
    s3_url: str,
    tmp_path: Path,
    proxy: FaultProxy,
    seaweed: Seaweed,
    wait_for_server: Callable[[], None],
) -> None:
    save_large(tmp_path, 5)
    half = threading.Event()
    with uploading(s3_url, tmp_path, timeout_s=LONG_S, limits=SMALL_PARTS) as (uploader, news):
        proxy.on_sent = lambda total: half.set() if total > (20 << 20) else None
        assert half.wait(LONG_S)
        seaweed.kill()
        seaweed.start()
        wait_for_server()
        assert uploader.drain(LONG_S), news
    assert (news.committed, news.trouble) == ([5], [])
    assert_whole(s3_url, 5)


def kill_half_way(s3_url: str, memory: Path, proxy: FaultProxy) -> None:
    """An uploader dies when some parts of a payload are stored."""
    half = threading.Event()
    # The fifth part of 8 MiB has begun, and at most four are on their way at once.
    proxy.on_sent = lambda total: half.set() if total > (33 << 20) else None
    program = (
        "import pathlib, sys; from tests.checkpoint.helpers import uploading;"
        "from tests.stores.test_s3 import SMALL_PARTS\n"
        "with uploading(sys.argv[1], pathlib.Path(sys.argv[2]), limits=SMALL_PARTS) as (one, _):"
        " one.drain(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program, s3_url, str(memory)]) as uploader:
        assert half.wait(LONG_S)
        uploader.kill()
    storage = Storage(s3_url)
    assert storage.committed_steps() == []
    assert [one.path.rpartition("/")[0] for one in storage.unfinished()] == ["step-00000005.1"]


def test_upload_of_a_killed_uploader_is_gone_on_with_by_the_next_one(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    save_large(tmp_path, 5)
    kill_half_way(s3_url, tmp_path, proxy)
    sent: list[int] = []
    proxy.on_sent = sent.append
    with uploading(s3_url, tmp_path, limits=SMALL_PARTS) as (agent, news):
        assert agent.drain(LONG_S)
    assert news.committed == [5]
    assert_whole(s3_url, 5)
    # Of five parts at least one was stored, and nothing of the dead one is left.
    assert sent[-1] - sent[0] < 4 * NUM_FLOATS - (7 << 20)
    assert Storage(s3_url).unfinished() == []


def test_upload_of_a_killed_uploader_that_nobody_goes_on_with_is_swept(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    """Its node has died with it: host memory is gone."""
    save_large(tmp_path, 5)
    kill_half_way(s3_url, tmp_path, proxy)
    storage = Storage(s3_url)
    commit_steps(s3_url, tmp_path / "elsewhere", [6])
    # While an uploader could still be alive nothing of it is touched.
    Cleaner(storage, RetentionPolicy(keep=2), grace_s=3600.0).clean(waiting=())
    assert len(storage.unfinished()) == 1
    wait_for(lambda: has_aged(storage), "a second on the store's clock")
    Cleaner(storage, RetentionPolicy(keep=2), grace_s=0.0).clean(waiting=())
    assert storage.unfinished() == []


def has_aged(storage: Storage) -> bool:
    begun_s = [one.begun_at_s or 0.0 for one in storage.unfinished()]
    return storage.now_s() > max(begun_s)


def test_answer_cut_short_is_never_taken_for_the_whole(
    s3_url: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    save_large(tmp_path, 5)
    with uploading(s3_url, tmp_path, limits=SMALL_PARTS) as (uploader, _):
        assert uploader.drain(LONG_S)
    proxy.inject(Fault.CUT, times=2, after_bytes=1 << 20)
    assert_whole(s3_url, 5)
    assert proxy.num_faults == 2


def test_checkpoint_is_copied_between_kinds_of_store(s3_url: str, tmp_path: Path) -> None:
    local = f"file://{tmp_path}/store/job-1"
    save_large(tmp_path / "memory", 5)
    with uploading(local, tmp_path / "memory") as (uploader, _):
        assert uploader.drain(LONG_S)
    catalog.copy(Storage(local), 5, Storage(s3_url), lambda num_bytes: None)
    assert_whole(s3_url, 5)
    back = f"file://{tmp_path}/back/job-1"
    catalog.copy(Storage(s3_url), 5, Storage(back), lambda num_bytes: None)
    assert_whole(back, 5)


def test_wrong_key_is_a_lasting_refusal(
    s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StorageUnavailableError) as caught:
            Storage(s3_url).probe()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    assert caught.value.lasting
    assert BUCKET in str(caught.value)
