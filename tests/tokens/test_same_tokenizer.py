"""Corpora of a blend have the ids of one tokenizer, wherever its file lay."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.problems import FieldProblem
from outlast.spec.parse import parse_spec
from outlast.tokens.fit import look_at_data
from trainer.data.corpus import run, units

TEXTS = "\n".join(["one two three four"] * 400)


def nowhere(url: str) -> object:
    raise AssertionError(f"nothing is at {url}")


def tokenizer_of(folder: Path, *words: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="bytes have no file")
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: number for number, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"
        )
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return folder


def prepared_with(tokenizer: Path, out: Path) -> str:
    text = out.with_suffix(".txt")
    text.write_text(TEXTS)
    order = run.Order(
        units=units.find_units([text]).units,
        fields={"--text-field": "text"},
        tokenizer=str(tokenizer),
        validation_fraction=0.0,
    )
    run.prepare(out, order, num_processes=1, done=lambda *_: None)
    return str(out)


def problems(*tokens: str) -> list[FieldProblem]:
    data = {"tokens": dict.fromkeys(tokens, 1.0)}
    spec = parse_spec({"name": "a", "model": {"seq_len": 16}, "data": data})
    return look_at_data(spec, nowhere)[0]  # type: ignore[arg-type]  # nothing is opened


def test_a_copy_of_a_tokenizer_is_the_same_and_another_file_at_its_place_is_not(
    tmp_path: Path,
) -> None:
    first = tokenizer_of(tmp_path / "first", "one", "two", "three", "four")
    copy = tokenizer_of(tmp_path / "copy", "one", "two", "three", "four")
    one = prepared_with(first, tmp_path / "a")
    assert problems(one, prepared_with(copy, tmp_path / "b")) == []
    (first / "tokenizer.json").unlink()
    first.rmdir()
    tokenizer_of(tmp_path / "first", "four", "three", "two", "one")
    (problem,) = problems(one, prepared_with(first, tmp_path / "c"))
    assert problem.field == "data.tokens"
    assert "has ids of different tokenizers" in problem.message
