"""A unit of any size goes on where it was cut off, and ends with the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial as bound
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.core.checked_json import Fields
from outlast.tokens.index import read_index
from tests.cli.running import outlast_json
from tests.controller.processes import wait_for
from tests.trainer.test_corpus import is_alive
from trainer.data.corpus import long_text, partial, run, units
from trainer.data.corpus.counts import Counts
from trainer.data.corpus.partial import RECORD, Pace, Partial
from trainer.data.corpus.tokenizer import load
from trainer.data.corpus.units import find_units

NAMES = ["train.bin", "train.idx", "validation.bin", "validation.idx"]
FIELDS = {"--text-field": "text"}
# Bytes are tokens here: a record is made after half of these at the latest.
NUM_BYTES = 80_000_000
CHARACTERS = ["plain text\n", "naïve ", "文字", "😀 ", "\n\n", "a"]


class Killed(BaseException):
    """In the middle of something."""


class Moments:
    """Counts what a process does to its files and with its texts, and ends it at one of these."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self.num_encoded = 0
        for name in ("replace", "rename", "unlink", "truncate"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        # What a process has written is there when it is gone; of a machine, see `lose`.
        patch.setattr(os, "fsync", self._counted(lambda handle: None))
        tokenizer = load("byte")
        encode_all = self._counted(tokenizer.encode_all, is_encoding=True)
        patch.setattr(run, "_loaded", lambda *_: replace(tokenizer, encode_all=encode_all))

    def _counted(self, call: Callable, *, is_encoding: bool = False) -> Callable:  # type: ignore[type-arg]
        def counted(*given: object, **options: object) -> object:
            if self._left == 0:
                raise Killed
            if self._left is not None:
                self._left -= 1
            self.num_encoded += is_encoding
            return call(*given, **options)

        return counted

    def has_ended(self, work: Callable[[], None], within: int | None = None) -> bool:
        """Whether work is done in so many moments; it is killed otherwise."""
        self._left, self.num_encoded = within, 0
        try:
            work()
        except Killed:
            return False
        finally:
            self._left = None
        return True


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moments]:
    """Records are made as often as they can be."""
    monkeypatch.setattr(partial, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(partial, "_TIMES_COST", 0)
    monkeypatch.setattr(run, "_BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(long_text, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(long_text, "_READ_BYTES", 777)
    monkeypatch.setattr(run, "_counts", Counts(get_context("spawn")), raising=False)
    return Moments(monkeypatch)


def text(path: Path, seed: int) -> Path:
    draw = random.Random(seed)
    path.write_text("".join(draw.choice(CHARACTERS) for _ in range(3000)))
    return path


def packed(path: Path, seed: int) -> Path:
    """Lines with texts of many lengths, some of them empty."""
    draw = random.Random(seed)
    texts = ["x" * draw.choice([0, 1, 40, 300, 600]) + str(number) for number in range(90)]
    texts[::7] = [""] * len(texts[::7])
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="the same with gzip")
        path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    else:
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return path


def rows(path: Path, seed: int) -> Path:
    """A table with one row group, which is one unit however large it is."""
    pyarrow = pytest.importorskip("pyarrow", reason="the same of packed lines")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw = random.Random(seed)
    texts = [draw.choice(CHARACTERS) * draw.randint(0, 90) for _ in range(90)]
    parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


MADE = {"a.txt": text, "a.jsonl.gz": packed, "a.jsonl.zst": packed, "a.parquet": rows}


def work_on(source: Path, part: Path) -> Callable[[], None]:
    """What a process does with a file that is one unit."""
    (unit,) = find_units([source]).units
    options = run.Order(units=(), tokenizer="byte", fields=FIELDS, validation_fraction=0.3)
    return bound(run._tokenize, part, options, unit, 0, 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lose(folder: Path, draw: random.Random) -> None:
    """Take from files what a machine without power takes: anything that no record has."""
    if not (folder / RECORD).exists():
        return
    marks = json.loads((folder / RECORD).read_bytes())["marks"]
    for split, mark in marks.items():
        ends = (
            ("bin", 2 * mark["num_tokens"]),
            ("lengths", 4 * mark["num_sequences"]),
            ("documents", 8 * mark["num_documents"]),
        )
        for ending, size in ends:
            path = folder / f"{split}.{ending}"
            kept = path.read_bytes()[:size]
            path.write_bytes(kept + draw.choice([b"", b"\7" * draw.randint(1, 99)]))


@pytest.mark.parametrize("name", MADE)
def test_killed_at_any_moment_a_unit_goes_on_and_ends_alike(
    tmp_path: Path, moments: Moments, name: str
) -> None:
    source = MADE[name](tmp_path / name, 1)
    assert moments.has_ended(work_on(source, tmp_path / "whole"))
    num_encoded, whole = moments.num_encoded, contents(tmp_path / "whole")
    assert sorted(whole) == NAMES
    assert num_encoded > 4
    draw, within, encoded = random.Random(2), 0, []
    while not moments.has_ended(work_on(source, part := tmp_path / str(within)), within):
        lose(part.with_name(f"{part.name}.partial"), draw)
        assert moments.has_ended(work_on(source, part))
        assert contents(part) == whole
        encoded.append(moments.num_encoded)
        within += 1
    # The later it was killed, the less was left.
    before_finish = [number for number in encoded if number != num_encoded]
    assert before_finish == sorted(before_finish, reverse=True)
    assert set(range(2, num_encoded)) <= set(before_finish)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    name=st.sampled_from(list(MADE)),
    seed=st.integers(0, 2**32),
    lives=st.lists(st.integers(0, 60), max_size=6),
)
def test_killed_again_and_again_a_unit_ends_alike(
    tmp_path_factory: pytest.TempPathFactory,
    moments: Moments,
    name: str,
    seed: int,
    lives: list[int],
) -> None:
    folder, draw = tmp_path_factory.mktemp("unit"), random.Random(seed)
    source = MADE[name](folder / name, seed)
    assert moments.has_ended(work_on(source, folder / "whole"))
    cut = work_on(source, folder / "cut")
    for within in lives:
        if moments.has_ended(cut, within):
            break
        lose(folder / "cut.partial", draw)
    else:
        assert moments.has_ended(cut)
    assert contents(folder / "cut") == contents(folder / "whole")
    shutil.rmtree(folder)


def cut_off(source: Path, part: Path, moments: Moments) -> Path:
    """The record of a unit that was killed when it had tokenised four times."""
    folder = part.with_name(f"{part.name}.partial")
    for within in count():
        shutil.rmtree(folder, ignore_errors=True)
        assert not moments.has_ended(work_on(source, part), within)
        if moments.num_encoded == 4:
            break
    return folder / RECORD


@pytest.mark.parametrize("name", MADE)
def test_what_was_done_counts_as_bytes_and_not_as_tokens(
    tmp_path: Path, moments: Moments, name: str
) -> None:
    source = MADE[name](tmp_path / name, 1)
    cut_off(source, tmp_path / "part", moments)
    seen: list[tuple[int, int]] = []
    run._counts.report(lambda *_: None)
    assert moments.has_ended(work_on(source, tmp_path / "part"))
    run._counts.report(lambda *given: seen.append(given))
    paths = [tmp_path / "part" / f"{split}.bin" for split in partial.SPLITS]
    num_tokens = sum(path.stat().st_size // 2 for path in paths)
    ((num_bytes, num_new),) = seen
    assert num_bytes == source.stat().st_size
    assert 0 < num_new < 0.9 * num_tokens


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_a_damaged_record_is_none(tmp_path: Path, moments: Moments, name: str) -> None:
    source, part = MADE[name](tmp_path / name, 1), tmp_path / "part"
    moments.has_ended(work_on(source, tmp_path / "whole"))
    num_encoded, whole = moments.num_encoded, contents(tmp_path / "whole")
    good = cut_off(source, part, moments).read_bytes()
    saved = shutil.copytree(tmp_path / "part.partial", tmp_path / "saved")
    draw = random.Random(3)
    damaged = [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        good[:-1],
        good + b" ",
        good.replace(b"part 0", b"part 1"),
    ]
    for _ in range(40):
        at = draw.randrange(len(good))
        damaged.append(good[:at] + bytes([good[at] ^ 1 << draw.randrange(7)]) + good[at + 1 :])
    for content in damaged:
        shutil.copytree(saved, tmp_path / "part.partial", dirs_exist_ok=True)
        (tmp_path / "part.partial" / RECORD).write_bytes(content)
        assert moments.has_ended(work_on(source, part))
        assert moments.num_encoded == num_encoded
        assert contents(part) == whole
        shutil.rmtree(part)


@pytest.mark.parametrize("lost", ["train.bin", "train.lengths", "train.documents"])
def test_a_record_of_more_than_there_is_is_none(
    tmp_path: Path, moments: Moments, lost: str
) -> None:
    source, part = packed(tmp_path / "a.jsonl.gz", 1), tmp_path / "part"
    moments.has_ended(work_on(source, tmp_path / "whole"))
    num_encoded = moments.num_encoded
    cut_off(source, part, moments)
    path = tmp_path / "part.partial" / lost
    marks = json.loads((tmp_path / "part.partial" / RECORD).read_bytes())["marks"]["train"]
    sizes = {"train.bin": 2 * marks["num_tokens"], "train.lengths": 4 * marks["num_sequences"]}
    os.truncate(path, sizes.get(lost, 8 * marks["num_documents"]) // 2)
    assert moments.has_ended(work_on(source, part))
    assert moments.num_encoded == num_encoded
    assert contents(part) == contents(tmp_path / "whole")


def test_a_record_of_another_corpus_option_or_part_is_none(tmp_path: Path) -> None:
    with Partial(tmp_path / "0", "uint16", "one") as made:
        made._pace = Pace(-1e9)
        made.keep({"documents": 5})
    with Partial(tmp_path / "0", "uint16", "one") as again:
        assert isinstance(again.position, Fields)
        assert again.position.integer("documents") == 5
    with Partial(tmp_path / "0", "uint16", "another") as other:
        assert other.position is None
    assert not (tmp_path / "0.partial" / RECORD).exists()


def test_a_unit_with_a_record_is_not_thrown_away_by_another_option(
    tmp_path: Path, moments: Moments
) -> None:
    source, folder = text(tmp_path / "a.txt", 1), tmp_path / "out"
    order = run.Order(
        units=find_units([source]).units, tokenizer="byte", fields=FIELDS, validation_fraction=0.3
    )
    run._claim(folder, folder / "parts", order)
    cut_off(source, folder / "parts" / "0", moments)
    with pytest.raises(ValueError, match="has parts of a corpus with other files or options"):
        run._claim(folder, folder / "parts", replace(order, validation_fraction=0.1))
    run._claim(folder, folder / "parts", order)


def test_another_file_of_a_tokenizer_is_another_order(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    order = run.Order(units=(), tokenizer=str(path), fields=FIELDS, validation_fraction=0)
    before = order.digest()
    assert order.digest() == before
    path.write_text("{ }")
    assert order.digest() != before


def test_a_process_of_an_earlier_run_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_ENDS_WITHIN_S", 0.1)
    part = tmp_path / "0"
    with (
        Partial(part, "uint16", "order"),
        pytest.raises(ValueError, match=r"0\.partial is still open in a process of an earlier run"),
    ):
        Partial(part, "uint16", "order")


def test_records_cost_a_two_hundredth_of_the_time() -> None:
    pace = Pace(100.0)
    assert not pace.is_due(104.9, 0)
    assert pace.is_due(105.0, 0)
    assert pace.is_due(100.1, 64 << 20)
    slow = Pace(100.0, 1 << 30, cost_s=0.5)
    assert not slow.is_due(199.9, 2 << 30)
    assert slow.is_due(200.0, 1 << 30)


def test_a_part_of_plain_lines_makes_no_record(
    tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(gzip.decompress(packed(tmp_path / "b.jsonl.gz", 1).read_bytes()))
    monkeypatch.setattr(Partial, "keep", None)
    assert units.is_small(find_units([source]).units[0])
    assert moments.has_ended(work_on(source, tmp_path / "part"))


def large_text(path: Path, block: str, number: int) -> bytes:
    path.write_bytes(block.encode() * number)
    return path.read_bytes()


def large_packed(path: Path, block: str, number: int) -> bytes:
    line = json.dumps({"text": block}).encode() + b"\n"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(number):
            file.write(line)
    return block.encode() * number


@pytest.mark.parametrize(("name", "make"), [("a.txt", large_text), ("a.jsonl.gz", large_packed)])
def test_a_command_that_is_killed_within_a_file_goes_on_there(
    tmp_path: Path, name: str, make: Callable[[Path, str, int], bytes]
) -> None:
    block = "".join(random.Random(1).choices(CHARACTERS, k=1000))
    content = make(tmp_path / name, block, NUM_BYTES // len(block.encode()))
    out = tmp_path / "out"
    command = ["data", "prepare", str(tmp_path / name), "--validation-fraction", "0"]
    command += ["--processes", "1", "--json", "--output", str(out)]
    with subprocess.Popen([sys.executable, "-m", "outlast.cli.main", *command]) as first:
        wait_for(lambda: any(out.glob(f"parts/0.partial/{RECORD}")), "a record")
        children = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    assert children
    wait_for(lambda: not any(map(is_alive, children)), "all to end")
    record = json.loads((out / "parts" / "0.partial" / RECORD).read_bytes())
    num_before = record["marks"]["train"]["num_tokens"]
    made = outlast_json(*command)
    tokens = np.frombuffer(content, dtype=np.uint8).astype("<u2")
    assert made["splits"]["train"]["tokens"] == len(tokens)
    assert np.array_equal(np.fromfile(out / "train.bin", dtype="<u2"), tokens)
    assert len(read_index(out / "train.idx").lengths) == made["splits"]["train"]["documents"]
    # Those of the record are none of this run; a rate and a time are rounded.
    num_left = len(tokens) - num_before
    assert made["tokens_per_s"] * made["seconds"] == pytest.approx(num_left, rel=0.01)
