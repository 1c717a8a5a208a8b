"""Tokens to train on, in real stores: what is read, a file that is replaced, and faults."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

from outlast.errors import SettingError
from outlast.remote.disk import BlockFolder
from outlast.remote.files import RemoteFiles
from outlast.tokens.files import open_source
from tests.stores.proxy import Fault, FaultProxy
from tests.stores.seaweed import BUCKET
from tests.tokens.corpora import counted, prepared

LENGTHS = (300_000, 70, 9, 500_000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Tokens of several blocks."""
    documents = [counted(length, first=length, vocab_size=250) for length in LENGTHS]
    return prepared(tmp_path / "corpus", {"train": documents, "validation": [counted(400)]})


@pytest.fixture
def files(tmp_path: Path) -> RemoteFiles:
    return RemoteFiles(BlockFolder(tmp_path / "blocks", max_bytes=1 << 30))


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.iterdir()):
        put(f"{url}/{path.name}", path.read_bytes())


def put(url: str, data: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    with fs.open(path, "wb") as file:
        file.write(data)


def assert_read_and_guarded(corpus: Path, url: str, files: RemoteFiles) -> None:
    """What is read is what lies on disk, until it is replaced."""
    upload(corpus, url)
    local, remote = open_source(str(corpus)), open_source(url, files.open)
    assert (remote.digest, remote.vocab_size) == (local.digest, local.vocab_size)
    assert remote.train.digest_sampled() == local.train.digest_sampled()
    assert np.array_equal(remote.train.index().places, local.train.index().places)
    here, there = local.train.tokens(), remote.train.tokens()
    count = len(here)
    for part in (slice(0, 700), slice(400_000, 600_000), slice(count - 5, count)):
        assert np.array_equal(there[part], here[part])
    # Another file of that name, as long.
    put(f"{url}/train.bin", (corpus / "train.bin").read_bytes()[::-1])
    with pytest.raises(SettingError, match=r"train\.bin has changed since this attempt began"):
        there[slice(250_000, 251_000)]


def test_tokens_in_s3_are_those_on_disk(
    corpus: Path, session_proxy: FaultProxy, files: RemoteFiles
) -> None:
    assert_read_and_guarded(corpus, f"s3://{BUCKET}/{uuid.uuid4().hex}/corpus", files)


def test_tokens_in_hdfs_are_those_on_disk(corpus: Path, hdfs_url: str, files: RemoteFiles) -> None:
    assert_read_and_guarded(corpus, hdfs_url, files)


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.DROPPED, Fault.CUT])
def test_faults_that_pass_are_waited_for(
    corpus: Path, proxy: FaultProxy, files: RemoteFiles, fault: Fault
) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/corpus"
    upload(corpus, url)
    here = open_source(str(corpus)).train.tokens()
    there = open_source(url, files.open).train.tokens()
    proxy.inject(fault, times=3)
    assert np.array_equal(there[0:300_000], here[0:300_000])
    assert proxy.num_faults


def test_what_is_not_there_is_said(session_proxy: FaultProxy, files: RemoteFiles) -> None:
    with pytest.raises(ValueError, match="check the bucket and the path"):
        open_source(f"s3://{BUCKET}/{uuid.uuid4().hex}/corpus", files.open)
    with pytest.raises(ValueError, match="check the bucket and the path"):
        open_source(f"s3://no-{uuid.uuid4().hex}/corpus", files.open)
