"""A text file that is larger than memory: its ids are those of the whole text."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from dataclasses import asdict
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.core.checked_json import Fields
from outlast.tokens.files import open_source
from outlast.tokens.index import read_index
from outlast.tokens.writer import TokenWriter
from trainer.data.corpus import long_text, run
from trainer.data.corpus.tokenizer import load
from trainer.data.corpus.tokenizer_type import Tokenizer
from trainer.data.corpus.units import find_units

WORDS = ["the", "Quick", "brown", "fox's", "12345", "naïve", "été", "jumps", "(over)", "lazy,"]
CHARACTERS = "文字化處理語言模型"
NUM_BYTES = 100_000_000


def prose(seed: int) -> str:
    """Words in lines of some lengths, with empty lines, blanks at their ends and marks."""
    draw = random.Random(seed)
    ends = [" "] * 12 + ["\n", "\n\n", " \n", ".\n", "  ", ".\n/", "\r\n", "\t"]
    return "".join(draw.choice(WORDS) + draw.choice(ends) for _ in range(4000))


def characters(seed: int) -> str:
    """A language without blanks, in one line."""
    draw = random.Random(seed)
    return "".join(draw.choice(CHARACTERS) for _ in range(20_000))


def byte_level(folder: Path, text: str) -> Tokenizer:
    """As GPT-2 has it."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return load(str(folder))


def pieced(folder: Path, text: str, kind: str, rule: str) -> Tokenizer:
    """As Llama 2 and T5 have it: a blank is put in front of each text, and some are removed."""
    library = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(text[at : at + 500] for at in range(0, len(text), 500)),
        model_writer=made,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type=kind,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    return load(str(folder))


MADE = {
    "byte": lambda folder, text: load("byte"),
    "byte level": byte_level,
    "bpe": lambda folder, text: pieced(folder, text, "bpe", "identity"),
    "bpe that normalises": lambda folder, text: pieced(folder, text, "bpe", "nmt_nfkc"),
    "unigram": lambda folder, text: pieced(folder, text, "unigram", "nmt_nfkc"),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(long_text, "_READ_BYTES", 777)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("text_of", [prose, characters])
def test_the_ids_are_those_of_the_whole_text(tmp_path: Path, kind: str, text_of: object) -> None:
    assert callable(text_of)
    text = text_of(1)
    tokenizer = MADE[kind](tmp_path, text_of(2))
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(long_text.pieces(tmp_path / "a.txt", tokenizer))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) >= len(text) // 2000
    # Each but the first has what is before it.
    assert all(piece.start.num_ids_before for piece in pieces[1:])
    found = np.concatenate(list(long_text.encoded(pieces, tokenizer))).tolist()
    expected = tokenizer.encode(text).tolist()
    if (kind, text_of) != ("unigram", characters):
        assert found == expected
        return
    # One sum of float32 over all of a text decides between parts of words that are as likely:
    # without a blank, the library's own choice depends on what is far before it.
    assert tokenizer.decode(found) == tokenizer.decode(expected)
    matcher = SequenceMatcher(None, found, expected, autojunk=False)
    assert matcher.ratio() > 0.99


@pytest.mark.usefixtures("small_pieces")
def test_where_no_place_is_good_a_piece_begins_as_a_document(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "a" * 3000)
    (tmp_path / "a.txt").write_text("a" * 9001)
    pieces = list(long_text.pieces(tmp_path / "a.txt", tokenizer))
    assert {piece.start.num_ids_before for piece in pieces} == {0}
    found = np.concatenate(list(long_text.encoded(pieces, tokenizer)))
    assert tokenizer.decode(found.tolist()) == "a" * 9001


@pytest.mark.usefixtures("small_pieces")
def test_a_run_of_one_letter_looks_good_from_no_place(tmp_path: Path) -> None:
    """Its tokens are of 2, 4 and 8 letters, which any even number of letters is made of."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "aa": 1, "aaaa": 2, "aaaaaaaa": 3, "x": 4}
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("x" + "a" * 9000)
    pieces = list(long_text.pieces(tmp_path / "a.txt", load(str(tmp_path))))
    assert {piece.start.num_ids_before for piece in pieces} == {0}


@pytest.mark.usefixtures("small_pieces")
def test_bytes_that_are_no_text_are_replaced_as_in_the_whole(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(20_000).replace(b"\0", b"\x80")
    (tmp_path / "a.txt").write_bytes(content)
    found = [piece.text for piece in long_text.pieces(tmp_path / "a.txt", load("byte"))]
    assert "".join(found) == content.decode(errors="replace")


def decisive(piece: long_text.Piece) -> tuple[str, str, int]:
    """All that ids follow from; the same place may be so many characters behind another byte."""
    return piece.start.before, piece.text, piece.start.num_ids_before


def assert_goes_on_anywhere(path: Path, tokenizer: Tokenizer) -> None:
    """Pieces are the same from wherever they are begun."""
    pieces = list(long_text.pieces(path, tokenizer))
    assert len(pieces) > 5
    for number, piece in enumerate(pieces):
        written = json.dumps(asdict(piece.next))
        start = long_text.parsed(Fields(json.loads(written)))
        # As much of the file is read again as is read at a time, and a character.
        assert start.skip <= 777
        rest = list(long_text.pieces(path, tokenizer, start))
        assert list(map(decisive, rest)) == list(map(decisive, pieces[number + 1 :]))
        read = start.byte + sum(each.num_bytes for each in rest)
        assert read == path.stat().st_size or not rest


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("text_of", [prose, characters])
def test_a_text_goes_on_behind_any_piece(tmp_path: Path, kind: str, text_of: object) -> None:
    assert callable(text_of)
    tokenizer = MADE[kind](tmp_path, text_of(2))
    (tmp_path / "a.txt").write_bytes(text_of(1).encode())
    assert_goes_on_anywhere(tmp_path / "a.txt", tokenizer)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_text_go_on_behind_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also where blocks end within a character, and the file does."""
    draw = random.Random(seed)
    monkeypatch.setattr(long_text, "_READ_BYTES", draw.randint(1, 777))
    parts = [
        "naïve 文字 😀".encode(),
        b"\xff",
        b"\xe6\x96",
        b"\xf0\x9f\x98",
        b"plain text\n",
        b"\xc3",
    ]
    content = b"".join(draw.choice(parts) for _ in range(2500))
    (tmp_path / "a.txt").write_bytes(content)
    assert_goes_on_anywhere(tmp_path / "a.txt", load("byte"))


def test_a_document_in_pieces_is_one_sequence(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a", "uint16")
    for at in range(0, 50, 10):
        writer.add_piece(np.arange(at, at + 10))
    writer.end_document()
    writer.end_document()
    writer.add(np.array([7]))
    writer.close()
    index = read_index(tmp_path / "a.idx")
    assert (index.num_documents, index.lengths.tolist()) == (2, [50, 1])
    tokens = np.fromfile(tmp_path / "a.bin", dtype="<u2")
    assert tokens.tolist() == [*range(50), 7]


def test_one_file_is_the_same_with_any_number_of_processes(tmp_path: Path) -> None:
    text = prose(1)
    tokenizer = byte_level(tmp_path, text)
    (tmp_path / "a.txt").write_bytes((text * 50).encode())
    assert len(text) * 50 > 4 * long_text.PIECE_CHARACTERS
    for number in (1, 3):
        counted = [0, 0]

        def count(num_bytes: int, num_tokens: int, counted: list[int] = counted) -> None:
            counted[0] += num_bytes
            counted[1] += num_tokens

        order = run.Order(
            units=find_units([tmp_path / "a.txt"]).units,
            tokenizer=tokenizer.name,
            fields={"--text-field": "text"},
            validation_fraction=0.0,
        )
        run.prepare(tmp_path / str(number), order, num_processes=number, done=count)
        found = open_source(str(tmp_path / str(number))).train.tokens()
        expected = tokenizer.encode(text * 50)
        assert np.array_equal(found, expected)
        assert counted == [(tmp_path / "a.txt").stat().st_size, len(expected)]


# The largest of the processes that have ended, in KiB; each measures one file alone.
MEASURED = """
import resource, sys
from pathlib import Path
from trainer.data.corpus import run
from trainer.data.corpus.units import find_units
if __name__ == "__main__":
    path = Path(sys.argv[1])
    order = run.Order(units=find_units([path]).units, tokenizer="byte",
                      fields={"--text-field": "text"}, validation_fraction=0.0)
    run.prepare(path.with_suffix(".out"), order, num_processes=1, done=lambda *_: None)
    usage = [resource.getrusage(each).ru_maxrss
             for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(max(usage) * 1024)
"""


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    program = tmp_path / "measured.py"
    program.write_text(MEASURED)
    block = prose(1).encode()
    if suffix != ".txt":
        block = json.dumps({"text": prose(1)}).encode() + b"\n"
    opened: Any = partial(gzip.open, compresslevel=1) if suffix.endswith(".gz") else open
    peaks = []
    for name, size in (("small", len(block)), ("large", NUM_BYTES)):
        path = tmp_path / f"{name}{suffix}"
        with opened(path, "wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
        done = subprocess.run(
            [sys.executable, str(program), str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        peaks.append(int(done.stdout))
    # A batch of four pieces with their ids, and what the text's blocks are joined in.
    assert peaks[1] - peaks[0] < NUM_BYTES // 5
