"""`outlast data prepare` and `show`: text becomes the same files, however it was interrupted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from outlast.tokens.files import open_source
from outlast.tokens.index import read_index
from tests.cli.running import outlast, outlast_json
from trainer.data.corpus import run, units
from trainer.data.corpus.units import documents, find_units

TEXTS = [f"document {number}: " + "naïve " * (number % 7) for number in range(300)]


def lines(path: Path, texts: list[str], field: str = "text") -> Path:
    content = "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def order(*sources: Path, tokenizer: str = "byte", fraction: float = 0.1) -> run.Order:
    return run.Order(
        units=tuple(find_units(sources)),
        tokenizer=tokenizer,
        text_field="text",
        validation_fraction=fraction,
    )


def texts_of(folder: Path, split: str) -> list[str]:
    tokens = (folder / f"{split}.bin").read_bytes()[::2]
    index = read_index(folder / f"{split}.idx")
    return [
        tokens[place // 2 : place // 2 + length].decode()
        for place, length in zip(index.places, index.lengths, strict=True)
    ]


def test_every_document_is_in_one_split_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_UNIT_BYTES", 1000)
    corpus = lines(tmp_path / "a.jsonl", TEXTS)
    made = run.prepare(tmp_path / "out", order(corpus), num_processes=2, done=lambda _: None)
    train, held = (texts_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert sorted(train + held) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train
    assert len(held) == pytest.approx(30, abs=15)
    assert made.splits["train"].documents == len(train)
    source = open_source(str(tmp_path / "out"))
    assert source.digest == made.digest
    assert source.vocab_size == 256
    assert not (tmp_path / "out" / "parts").exists()


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_a_line_is_in_the_part_that_it_begins_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(units, "_UNIT_BYTES", size)
    found = find_units([lines(tmp_path / "a.jsonl", TEXTS[:20])])
    assert [text for unit in found for text in documents(unit, "text")] == TEXTS[:20]


def test_folders_and_packed_lines_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    lines(folder / "b.jsonl.gz", TEXTS[:5])
    (folder / "sub" / "c.txt").write_text("a file is a document")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    found = find_units([folder])
    read = [text for unit in found for text in documents(unit, "text")]
    assert read == [*TEXTS[:5], "a file is a document"]


def test_an_interrupted_run_goes_on_and_ends_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_UNIT_BYTES", 2000)
    corpus = lines(tmp_path / "a.jsonl", TEXTS)
    whole = run.prepare(tmp_path / "whole", order(corpus), num_processes=1, done=lambda _: None)

    class Killed(BaseException):
        pass

    def stop(num_bytes: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        run.prepare(tmp_path / "cut", order(corpus), num_processes=1, done=stop)
    parts = {path for path in (tmp_path / "cut" / "parts").iterdir() if path.name.isdigit()}
    assert parts
    other = order(corpus, fraction=0.3)
    with pytest.raises(ValueError, match="has parts of a corpus with other files or options"):
        run.prepare(tmp_path / "cut", other, num_processes=1, done=lambda _: None)
    again = run.prepare(tmp_path / "cut", order(corpus), num_processes=1, done=lambda _: None)
    assert again == whole
    for split in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "cut" / split).read_bytes() == (tmp_path / "whole" / split).read_bytes()


def test_the_commands_prepare_and_show(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="test_every_document... takes bytes")
    words = {"document": 0, "[UNK]": 1, "<|endoftext|>": 2, "naïve": 3}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus, folder = lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    arguments = ["data", "prepare", str(corpus), "--output", str(folder), "--processes", "1"]
    made = outlast_json(*arguments, "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert (made["vocab_size"], made["end_of_document"]) == (4, 2)
    assert made["splits"]["train"]["documents"] == 297
    tokens = open_source(str(folder)).train.tokens().tolist()
    assert tokens[:8] == [0, 1, 1, 2, 0, 1, 1, 3]
    again = outlast(*arguments)
    assert again.returncode == ExitCode.BAD_INPUT
    assert "has a prepared corpus already; give another --output" in again.stderr
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f"name: a\nsteps: 50\nmodel: {{seq_len: 4}}\n"
        f"data: {{tokens: {folder}, validation_fraction: 0.1}}\n"
    )
    (row,) = outlast_json("data", "show", str(spec))["sources"]
    assert row["documents"] == 297
    assert row["samples"] == 50 * 8
    assert row["epochs"] == pytest.approx(400 / row["sequences"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', "the line at byte 14 has no 'text'; see --text-field"),
        (b'{"text": "a"}\nnot json\n', "the line at byte 14 is no JSON object"),
        (b'{"text": 5}\n', "'text' of the line at byte 0 is no text"),
    ],
)
def test_a_wrong_line_is_named_by_its_place(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        [text for unit in find_units([path]) for text in documents(unit, "text")]
