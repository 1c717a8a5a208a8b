"""Preparing text once, and reading the same samples for ever after."""

from __future__ import annotations

import gzip
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outlast import sources
from outlast.cli.errors import ExitCode
from outlast.rules.data import split_sizes
from outlast.sources import survey
from tests.cli.running import outlast, outlast_json
from trainer.core.batch import BatchPlan
from trainer.data.corpus import long_text
from trainer.data.corpus.tokenizer import load
from trainer.data.dataset import TokenDataset
from trainer.data.loader import Loader, Split
from trainer.data.prepare import DataOptions, prepare
from trainer.parallel.pipeline import MicroBatch


def options(source: Path | str, **changes: float) -> DataOptions:
    return DataOptions(
        source=str(source),
        tokenizer="byte",
        validation_fraction=changes.get("validation_fraction", 0.1),
        max_bytes=int(changes.get("max_bytes", 1 << 20)),
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 256)) * 40)
    return path


def test_both_splits_together_are_the_source(tmp_path: Path, text: Path) -> None:
    files = prepare(tmp_path / "data", options(text))
    train, held_out = files.train.read_bytes(), files.validation.read_bytes()
    assert (len(train), len(held_out)) == (files.train_tokens, files.validation_tokens)
    assert sorted(train + held_out) == sorted(text.read_bytes())
    assert len(held_out) / len(train + held_out) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3, 0.49])
@pytest.mark.parametrize("nbytes", [1, 10, 99, 8191, 81_920, 500_001])
def test_the_sizes_of_both_splits_are_foretold(
    tmp_path: Path, nbytes: int, fraction: float
) -> None:
    source = tmp_path / "text.txt"
    source.write_bytes(b"x" * nbytes)
    files = prepare(tmp_path / "data", options(source, validation_fraction=fraction))
    assert (files.train_tokens, files.validation_tokens) == split_sizes(nbytes, fraction)


def test_a_second_call_builds_nothing(tmp_path: Path, text: Path) -> None:
    first = prepare(tmp_path / "data", options(text))
    before = os.stat(first.train).st_mtime_ns
    assert prepare(tmp_path / "data", options(text)) == first
    assert os.stat(first.train).st_mtime_ns == before


def test_other_options_or_a_changed_source_make_another_data_set(
    tmp_path: Path, text: Path
) -> None:
    data = tmp_path / "data"
    first = prepare(data, options(text))
    assert prepare(data, options(text, max_bytes=5000)).folder != first.folder
    text.write_bytes(b"x" * 6000)
    changed = prepare(data, options(text))
    assert changed.folder != first.folder
    assert changed.digest != first.digest


def test_what_a_dead_builder_left_is_swept(tmp_path: Path, text: Path) -> None:
    data = tmp_path / "data"
    expected = prepare(data, options(text))
    leftover = expected.folder.with_name(f"{expected.folder.name}.partial")
    expected.folder.rename(leftover)
    (leftover / "train.bin").write_bytes(b"torn")
    assert prepare(data, options(text)) == expected
    assert not leftover.exists()


def test_a_folder_is_read_in_sorted_order_and_cut_at_max_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_bytes(b"2" * 3000)
    (folder / "a.md").write_bytes(b"1" * 3000)
    (folder / "image.png").write_bytes(b"3" * 3000)
    assert survey(str(folder), 4500).files == (folder / "a.md", folder / "b" / "two.txt")
    files = prepare(tmp_path / "data", options(folder, max_bytes=4500))
    tokens = files.train.read_bytes() + files.validation.read_bytes()
    assert sorted(tokens) == sorted(b"1" * 3000 + b"2" * 1500)
    skipped, cut = files.left_out
    assert skipped == f"1 file of {folder} skipped (image.png): only .py, .txt, .rst, .md are read"
    assert cut.startswith(f"text cut at 4,500 of 6,000 bytes of {folder}")


def test_all_of_a_source_is_read_unless_the_spec_says_otherwise(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    with source.open("wb") as file:
        for number in range(17):
            file.write(bytes([65 + number]) * (1 << 20))
    made = prepare(tmp_path / "data", replace(options(source), max_bytes=None))
    assert made.train_tokens + made.validation_tokens == 17 << 20
    assert made.left_out == ()
    # Nobody means to train on all that ships with Python.
    assert survey("python-stdlib", None).max_bytes == 16 << 20


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PAR1\x15\x04", "a Parquet file"),
        (gzip.compress(b"text" * 100), "a gzip archive; decompress it"),
        ("text".encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (np.arange(100, dtype=np.uint16).tobytes(), "a binary file: it has zero bytes"),
    ],
    ids=["parquet", "gzip", "utf-16", "tokens"],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("Straße, in UTF-8")
    (folder / "two.txt").write_bytes("Straße, in an older encoding".encode("latin-1"))
    assert len(survey(str(folder), None).files) == 2
    path = folder / "three.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"is not text but {kind}"):
        survey(str(path), None)
    with pytest.raises(ValueError, match=rf"holds three\.txt, which is not text but {kind}"):
        prepare(tmp_path / "data", options(folder))


@pytest.mark.parametrize("at", [8000, (1 << 20) + 5])
def test_what_is_no_text_further_on_is_refused_when_it_is_read(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * at + b"\0" + b"x" * 100)
    survey(str(path), None)
    data = replace(options(path), max_bytes=None)
    with pytest.raises(ValueError, match=rf"a\.txt is not text but .*: byte {at:,} is zero"):
        prepare(tmp_path / "data", data)
    # What a limit leaves out is not read.
    prepare(tmp_path / "data", replace(data, max_bytes=at))
    with pytest.raises(ValueError, match=rf"a\.txt is not text but .*: byte {at:,} is zero"):
        list(long_text.pieces(path, load("byte")))
    done = outlast(
        *("data", "prepare", str(path), "--processes", "1", "--output"), str(tmp_path / "o")
    )
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"byte {at:,} is zero; leave it out" in done.stderr


def test_files_that_were_not_looked_into_are_refused_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MAX_SAMPLED", 1)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text " * 1000)
    (tmp_path / "texts" / "b.txt").write_bytes(b"%PDF-1.7 and more")
    with pytest.raises(ValueError, match=r"b\.txt is not text but a PDF; extract its text"):
        prepare(tmp_path / "data", options(tmp_path / "texts"))


def test_the_standard_library_has_text() -> None:
    files = survey("python-stdlib", 1 << 20).files
    assert list(files) == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_the_command_shows_what_is_trained_on_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, size in (("a", 6000), ("b", 0), ("c", 6000), ("d", 6000)):
        (folder / f"{name}.txt").write_text("x" * size)
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f"name: a\nsteps: 50\nmodel: {{seq_len: 16}}\n"
        f"data: {{source: {folder}, validation_fraction: 0.1, global_batch: 8}}\n"
    )
    for max_bytes, documents in (
        (None, 3),
        (18000, 3),
        (12001, 3),
        (12000, 2),
        (6001, 2),
        (5000, 1),
    ):
        given = () if max_bytes is None else ("--set", f"data.max_bytes={max_bytes}")
        (row,) = outlast_json("data", "show", str(spec), *given)["sources"]
        files = prepare(tmp_path / "data", replace(options(folder), max_bytes=max_bytes))
        dataset = TokenDataset(files.train, seq_len=16)
        assert row == {
            "source": str(folder),
            "documents": documents,
            "tokens": files.train_tokens + files.validation_tokens,
            "sequences": dataset.num_samples,
            "samples": 400,
            "epochs": 400 / dataset.num_samples,
        }
    shown = outlast("data", "show", str(spec))
    assert shown.returncode == 0
    assert "DOCUMENTS" in shown.stdout
    assert "18,000" in shown.stdout


def test_a_missing_source_and_too_little_text_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither 'python-stdlib' nor an existing file"):
        prepare(tmp_path, options("/no/such/place"))
    short = tmp_path / "short.bin"
    short.write_bytes(b"0123456789")
    with pytest.raises(ValueError, match=r"holds 10 tokens, .*\.seq_len \+ 1 = 11"):
        TokenDataset(short, seq_len=10)


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(21, dtype=np.uint8).tofile(path)
    dataset = TokenDataset(path, seq_len=5)
    assert dataset.num_samples == 4
    read = dataset.read([3, 0])
    tokens, targets = read.tokens, read.targets
    assert tokens.t().tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert targets.t().tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]


@pytest.fixture
def loaders(tmp_path: Path, text: Path) -> Iterator[Callable[[int], Loader]]:
    """Makes loaders of one data set, by replica, and ends their threads."""
    files = prepare(tmp_path / "data", options(text))
    made = []

    def loader(replica: int) -> Loader:
        dataset = TokenDataset(files.train, seq_len=16)
        plan = BatchPlan(
            num_samples=dataset.num_samples,
            global_batch=8,
            micro_batch=2,
            num_replicas=2,
            seed=1,
        )
        made.append(Loader(Split(dataset, plan), replica=replica, device=torch.device("cpu")))
        return made[-1]

    yield loader
    for each in made:
        each.close()


def same(one: Sequence[MicroBatch], other: Sequence[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
        for a, b in zip(one, other, strict=True)
    )


def test_a_new_loader_reads_what_the_old_one_would_have_read(
    loaders: Callable[[int], Loader],
) -> None:
    old = loaders(1)
    through = [old.micro_batches(step) for step in range(1, 40)]
    for step in (1, 17, 39):
        assert same(through[step - 1], loaders(1).micro_batches(step))
    assert not same(loaders(0).micro_batches(1), through[0])


def test_what_is_read_ahead_is_what_would_have_been_read(
    loaders: Callable[[int], Loader],
) -> None:
    ahead, plain = loaders(0), loaders(0)
    before = threading.active_count()
    for step in range(1, 6):
        assert same(ahead.micro_batches(step), plain.micro_batches(step))
        ahead.prepare(step + 1)
        assert threading.active_count() == before + 1
    # Another step than the one that was read ahead, as after a restart from a checkpoint.
    assert same(ahead.micro_batches(3), plain.micro_batches(3))
    ahead.prepare(4)
    ahead.prepare(9)
    assert same(ahead.micro_batches(9), plain.micro_batches(9))
    ahead.prepare(10)
    ahead.close()
    assert threading.active_count() == before


def test_only_what_was_not_read_before_is_waited_for(loaders: Callable[[int], Loader]) -> None:
    loader = loaders(0)
    loader.micro_batches(1)
    assert loader.last_wait_ns > 0
    deadline_s = time.monotonic() + 30
    while loader.last_wait_ns > 0:
        # In the background it takes no time at all, unless this thread is faster.
        loader.prepare(2)
        time.sleep(0.01)
        loader.micro_batches(2)
        assert time.monotonic() < deadline_s


def test_an_error_in_the_background_is_raised_where_training_waits_for_the_data(
    loaders: Callable[[int], Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TokenDataset, samples: Sequence[int]) -> None:
        raise OSError("the disk is gone")

    loader = loaders(0)
    monkeypatch.setattr(TokenDataset, "read", fail)
    loader.prepare(2)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.micro_batches(2)
    # It is not kept: the next attempt reads again.
    monkeypatch.undo()
    assert len(loader.micro_batches(2)) == 2
