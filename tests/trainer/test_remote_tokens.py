"""Training on tokens at a URL: the same batches, bit for bit, as from the same files on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from checkpoint.storage.reading import FileStore
from outlast.errors import SettingError
from outlast.remote.files import RemoteFiles
from outlast.spec.parse import parse_spec
from outlast.tokens.writer import TokenWriter
from tests.tokens import remote
from tests.tokens.corpora import counted, prepared, write
from tests.trainer.places import place_of
from trainer.parallel.pipeline import MicroBatch
from trainer.worker.feeding import Feeding, open_data

SEQ_LEN = 48
STEPS = range(1, 25)


@dataclass
class Node:
    """The cache of the test's node."""

    cache_bytes: int = 1 << 20
    made: list[RemoteFiles] = field(default_factory=list)

    def files(self, data_dir: Path, cache_bytes: int) -> RemoteFiles:
        self.made.append(remote.files(data_dir / "blocks", max_bytes=self.cache_bytes))
        return self.made[-1]


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """One with blocks so small that sequences lie in several of them."""
    found = Node()
    monkeypatch.setattr("trainer.worker.feeding.files_of_node", found.files)
    return found


def opened(
    folder: Path, data: dict[str, Any], *, dp: int = 1, replica: int = 0, is_end: bool = True
) -> Feeding:
    document = {
        "name": "a",
        "model": {"seq_len": SEQ_LEN, "vocab_size": 256},
        "data": {"global_batch": 8, "validation_fraction": 0.1, **data},
        "parallel": {"dp": dp, "micro_batch": 2},
    }
    mesh = place_of(replica, is_first_stage=is_end, has_loss=is_end)
    return open_data(parse_spec(document), mesh, folder / "node")


def batches(feeding: Feeding) -> list[MicroBatch]:
    both = (feeding.train, feeding.evaluations[""])
    return [each for loader in both for step in STEPS for each in loader.micro_batches(step)]


def assert_same(one: Feeding, other: Feeding) -> None:
    assert (one.digest, one.has_unpredicted) == (other.digest, other.has_unpredicted)
    for a, b in zip(batches(one), batches(other), strict=True):
        assert a.num_predicted == b.num_predicted
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.targets, b.targets)
        assert (a.starts is None) == (b.starts is None)
        assert a.starts is None or torch.equal(a.starts, cast(torch.Tensor, b.starts))


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Path]:
    """A folder with a split of its own, a pair, an array, and prompts."""
    one = [counted(n, first=n, vocab_size=250) for n in (3000, 70, 9, 500, 31, 800)]
    folder = prepared(tmp_path / "web", {"train": one, "validation": [counted(400)]})
    pair = write(tmp_path / "pair" / "books", [counted(4001), counted(999)])
    (tmp_path / "array").mkdir()
    np.save(tmp_path / "array" / "code.npy", np.arange(5000, dtype=np.int32) % 256)
    (tmp_path / "chats").mkdir()
    writer = TokenWriter(tmp_path / "chats" / "chats", "int32")
    for number in range(90):
        writer.add(np.arange(20 + number % 7), np.arange(100 + number))
    writer.close()
    return {
        "web": folder,
        "books": pair,
        "code": tmp_path / "array" / "code.npy",
        "chats": tmp_path / "chats" / "chats",
    }


def url_of(path: Path) -> str:
    return remote.upload(path) if path.is_dir() else f"{remote.upload(path.parent)}/{path.name}"


@pytest.mark.parametrize("name", ["web", "books", "code", "chats"])
@pytest.mark.parametrize("cache_bytes", [1 << 20, 12_000])
def test_batches_are_those_of_the_files_on_disk(
    tmp_path: Path, node: Node, corpora: dict[str, Path], name: str, cache_bytes: int
) -> None:
    """Whether the cache has room for all of it or for a part."""
    node.cache_bytes = cache_bytes
    data = {"tokens": url_of(corpora[name])}
    assert_same(opened(tmp_path, data), opened(tmp_path, {"tokens": str(corpora[name])}))


def test_documents_are_packed_alike(tmp_path: Path, corpora: dict[str, Path]) -> None:
    for name in ("web", "chats"):
        local = {"tokens": str(corpora[name]), "packing": "whole"}
        assert_same(
            opened(tmp_path, {**local, "tokens": url_of(corpora[name])}), opened(tmp_path, local)
        )


def test_documents_are_masked_alike(tmp_path: Path, corpora: dict[str, Path]) -> None:
    local = {"tokens": str(corpora["web"]), "document_mask": True}
    assert_same(
        opened(tmp_path, {**local, "tokens": url_of(corpora["web"])}), opened(tmp_path, local)
    )


def test_prompts_are_not_predicted_either(tmp_path: Path, corpora: dict[str, Path]) -> None:
    folder = prepared(tmp_path / "answers", {"train": [counted(3000)], "validation": [counted(90)]})
    writer = TokenWriter(folder / "train", "uint16")
    for number in range(30):
        writer.add(np.arange(20), np.arange(80 + number % 3 - 1))
    writer.close()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["has_prompts"] = True
    manifest["splits"]["train"] |= {"documents": 30, "tokens": 3000}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    local = opened(tmp_path, {"tokens": str(folder)})
    assert local.has_unpredicted
    assert_same(opened(tmp_path, {"tokens": url_of(folder)}), local)


def test_blends_of_urls_and_paths_change_their_weights_alike(
    tmp_path: Path, corpora: dict[str, Path]
) -> None:
    def blend(web: str, books: str, held_out: str) -> dict[str, Any]:
        return {
            "tokens": {books: 3, web: 1},
            "blend_changes": [{"from_step": 6, "tokens": {web: 1}}],
            "validation_tokens": held_out,
        }

    # Sources are taken in the order of their names, so both have the same.
    web, books = corpora["web"], corpora["books"]
    urls = (f"file://{web}", f"file://{books}", f"file://{books}")
    remotely = opened(tmp_path, blend(*urls))
    assert_same(remotely, opened(tmp_path, blend(str(web), str(books), str(books))))


def test_each_replica_has_its_part(tmp_path: Path, corpora: dict[str, Path]) -> None:
    url = url_of(corpora["web"])
    for replica in range(2):
        assert_same(
            opened(tmp_path, {"tokens": url}, dp=2, replica=replica),
            opened(tmp_path, {"tokens": str(corpora["web"])}, dp=2, replica=replica),
        )


def test_the_next_step_is_fetched_before_anybody_asks(
    tmp_path: Path, node: Node, corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeding = opened(tmp_path, {"tokens": url_of(corpora["books"])})
    expected = opened(tmp_path, {"tokens": str(corpora["books"])})
    feeding.train.micro_batches(1)
    remote.wait_for(node.made[0])
    monkeypatch.setattr(FileStore, "read_range", refuse)
    found, wanted = feeding.train.micro_batches(2), expected.train.micro_batches(2)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("apart", [{"document_mask": True}, {"packing": "whole"}])
def test_a_stage_in_the_middle_fetches_no_tokens(
    tmp_path: Path, corpora: dict[str, Path], apart: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {**apart, "tokens": url_of(corpora["web"])}
    middle = opened(tmp_path, data, is_end=False)
    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "read_range", refuse)
        found = batches(middle)
    wanted = batches(opened(tmp_path, {**apart, "tokens": str(corpora["web"])}))
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens.numel() == one.targets.numel() == 0
        assert one.starts is not None
        assert other.starts is not None
        assert torch.equal(one.starts, other.starts)


def refuse(*given: object) -> bytes:
    raise AssertionError("read again")


def test_a_restart_on_the_node_fetches_nothing_again(
    tmp_path: Path, corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"tokens": url_of(corpora["web"]), "document_mask": True}
    batches(opened(tmp_path, data))
    monkeypatch.setattr(FileStore, "read_range", refuse)
    batches(opened(tmp_path, data))


def test_tokens_that_change_while_they_are_trained_on_end_it(
    tmp_path: Path, corpora: dict[str, Path]
) -> None:
    url = url_of(corpora["web"])
    feeding = opened(tmp_path, {"tokens": url})
    remote.put(f"{url}/train.bin", (corpora["web"] / "train.bin").read_bytes()[::-1])
    with pytest.raises(SettingError, match=rf"{url}/train.bin has changed since this attempt"):
        feeding.train.micro_batches(1)


def _cut_tokens(folder: Path) -> None:
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])


def _cut_index(folder: Path) -> None:
    path = folder / "train.idx"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_tokens, "train.bin, and train.idx is of .* truncated or of another corpus"),
        (_cut_index, "train.idx is truncated: .*; copy it again"),
        (lambda folder: (folder / "train.idx").unlink(), "has train.bin and no train.idx"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "has a manifest.json that"),
    ],
)
def test_damage_ends_a_rank_with_the_url(
    tmp_path: Path, corpora: dict[str, Path], damage: Callable[[Path], object], message: str
) -> None:
    damage(corpora["web"])
    url = url_of(corpora["web"])
    with pytest.raises(ValueError, match=rf"^data.tokens '{url}' .*{message}"):
        opened(tmp_path, {"tokens": url})
