"""`outlast data prepare` and `show`: text becomes the same files, however it was interrupted."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from outlast.cli import data
from outlast.cli.errors import CliError, ExitCode
from outlast.tokens.files import open_source
from outlast.tokens.index import read_index
from tests.cli.running import outlast, outlast_json
from tests.controller.processes import wait_for
from trainer.data.corpus import run, tokenizer, units
from trainer.data.corpus.tokenizer import load
from trainer.data.corpus.units import documents, find_units

TEXT = {"--text-field": "text"}
TEXTS = [f"document {number}: " + "naïve " * (number % 7) for number in range(300)]


def lines(path: Path, texts: list[str], field: str = "text") -> Path:
    content = "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def order(*sources: Path, tokenizer: str = "byte", fraction: float = 0.1) -> run.Order:
    return run.Order(
        units=find_units(sources).units,
        tokenizer=tokenizer,
        fields=TEXT,
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
    made = run.prepare(tmp_path / "out", order(corpus), num_processes=2, done=lambda *_: None)
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
    found = find_units([lines(tmp_path / "a.jsonl", TEXTS[:20])]).units
    assert [text for unit in found for (text,) in documents(unit, TEXT)] == TEXTS[:20]


@pytest.mark.parametrize(
    ("size", "units_of"), [(900_000, 1), (64 << 20, 64), (64 * (2 << 20) + 1, 65), (2 << 30, 128)]
)
def test_a_file_of_lines_is_in_many_parts_of_a_bounded_size(
    tmp_path: Path, size: int, units_of: int
) -> None:
    path = lines(tmp_path / "a.jsonl", TEXTS * 100)
    os.truncate(path, size)
    found = find_units([path]).units
    assert len(found) == units_of
    assert sum(unit.num_bytes for unit in found) == size


def test_folders_and_packed_lines_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    lines(folder / "b.jsonl.gz", TEXTS[:5])
    (folder / "sub" / "c.txt").write_text("a file is a document")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "tests").mkdir()
    found = find_units([folder])
    packed, plain = found.units
    assert [text for (text,) in documents(packed, TEXT)] == TEXTS[:5]
    assert [units.is_text_file(unit, TEXT) for unit in found.units] == [False, True]
    assert plain.path == str(folder / "sub" / "c.txt")
    assert found.skipped == (folder / "picture.png", folder / "tests")


def test_an_interrupted_run_goes_on_and_ends_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_UNIT_BYTES", 2000)
    corpus = lines(tmp_path / "a.jsonl", TEXTS)
    whole = run.prepare(tmp_path / "whole", order(corpus), num_processes=1, done=lambda *_: None)

    class Killed(BaseException):
        pass

    def stop(num_bytes: int, num_tokens: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        run.prepare(tmp_path / "cut", order(corpus), num_processes=1, done=stop)
    parts = {path for path in (tmp_path / "cut" / "parts").iterdir() if path.name.isdigit()}
    assert parts
    other = order(corpus, fraction=0.3)
    with pytest.raises(ValueError, match="has parts of a corpus with other files or options"):
        run.prepare(tmp_path / "cut", other, num_processes=1, done=lambda *_: None)
    again = run.prepare(tmp_path / "cut", order(corpus), num_processes=1, done=lambda *_: None)
    assert again == whole
    for split in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "cut" / split).read_bytes() == (tmp_path / "whole" / split).read_bytes()


def is_alive(process: psutil.Process) -> bool:
    """A process whose parent was killed may not be waited for by the next one."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_command_goes_on_and_ends_alike(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(300):
        (corpus / f"{number:03}.txt").write_text(f"{number} " * 2_000)
    command = ["data", "prepare", str(corpus), "--processes", "2", "--json", "--output"]
    whole = outlast_json(*command, str(tmp_path / "whole"))
    cut = tmp_path / "cut"
    with subprocess.Popen([sys.executable, "-m", "outlast.cli.main", *command, str(cut)]) as first:
        wait_for(lambda: len(list(cut.glob("parts/[0-9]*"))) > 20, "some parts to be done")
        children = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    assert len(children) >= 2
    # They would write into the folders that the next call writes into.
    wait_for(lambda: not any(map(is_alive, children)), "all to end")
    assert not (cut / "train.bin").exists()
    again = outlast_json(*command, str(cut))
    assert (again["digest"], again["splits"]) == (whole["digest"], whole["splits"])
    num_tokens = sum(split["tokens"] for split in whole["splits"].values())
    assert again["tokens_per_s"] * again["seconds"] < 0.99 * num_tokens


def test_ids_with_gaps_are_kept(tmp_path: Path) -> None:
    """The largest id says how large a vocabulary is, and not how many there are."""
    tokenizers = pytest.importorskip("tokenizers", reason="test_every_document... takes bytes")
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 70_000}, unk_token="[UNK]")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    asked = order(lines(tmp_path / "a.jsonl", ["a b b a"]), tokenizer=str(tmp_path), fraction=0)
    made = run.prepare(tmp_path / "out", asked, num_processes=1, done=lambda *_: None)
    assert (made.vocab_size, made.token_type) == (70_001, "int32")
    assert open_source(str(tmp_path / "out")).train.tokens().tolist() == [1, 70_000, 70_000, 1]


def test_texts_together_are_tokenised_as_each_by_itself(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="test_every_document... takes bytes")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    expected_ids = [each.ids for each in library.encode_batch([*TEXTS, ""])]
    # As of a model that takes inputs in batches; a corpus has nothing of it.
    library.enable_padding()
    library.enable_truncation(4)
    path = str(tmp_path / "tokenizer.json")
    library.save(path)
    texts = [*TEXTS, "", "\N{SNOWMAN}\n" * 3]
    tokenizer = load(path)
    together = [ids.tolist() for ids in tokenizer.encode_all(texts)]
    assert together == [tokenizer.encode(text).tolist() for text in texts]
    assert together[:-1] == expected_ids
    # And so they are in a corpus of several batches, in one process with several threads.
    corpus = lines(tmp_path / "a.jsonl", TEXTS * 180)
    assert corpus.stat().st_size > 2 * run._BATCH_CHARACTERS
    out, found = tmp_path / "out", order(corpus, tokenizer=path, fraction=0)
    run.prepare(out, found, num_processes=3, done=lambda *_: None)
    expected = [id for text in TEXTS for id in tokenizer.encode(text).tolist()] * 180
    assert open_source(str(out)).train.tokens().tolist() == expected


def test_one_file_has_all_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def prepare(*_: object, num_processes: int, **__: object) -> None:
        seen.append(num_processes)
        raise ValueError("seen")

    monkeypatch.setattr(run, "prepare", prepare)
    arguments = ["data", "prepare", str(lines(tmp_path / "a.jsonl.gz", TEXTS))]
    done = outlast(*arguments, "--output", str(tmp_path / "out"), "--processes", "3")
    assert (seen, done.returncode) == ([3], ExitCode.BAD_INPUT)


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ('{"eos_token": "[END]"}', 1),
        ('{"eos_token": {"content": "[END]", "special": true}}', 1),
        ('{"eos_token": null}', None),
        ('{"eos_token": "elsewhere"}', None),
        (None, None),
    ],
)
def test_an_end_of_another_name_is_read_beside_the_tokenizer(
    tmp_path: Path, config: str | None, end: int | None
) -> None:
    path = word_tokenizer(tmp_path, {"a": 0, "[END]": 1, "[UNK]": 2})
    before = tokenizer.stamp(str(path)), tokenizer.digest(str(path))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    assert tokenizer.load(str(tmp_path)).end_of_document == end
    # A run that goes on sees the change; the tokens of both are still one tokenizer's.
    assert (tokenizer.stamp(str(path)) == before[0]) is (config is None)
    assert tokenizer.digest(str(path)) == before[1]


def test_the_usual_end_of_a_document_is_before_what_ends_an_answer(tmp_path: Path) -> None:
    word_tokenizer(tmp_path, {"<|im_end|>": 0, "<|endoftext|>": 1, "[UNK]": 2})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert tokenizer.load(str(tmp_path)).end_of_document == 1
    # A tag of HTML in the vocabulary ends no document of a model that says otherwise.
    word_tokenizer(tmp_path, {"<eos>": 0, "</s>": 1, "[UNK]": 2})
    assert tokenizer.load(str(tmp_path)).end_of_document == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert tokenizer.load(str(tmp_path)).end_of_document == 0
    (tmp_path / "tokenizer_config.json").write_text('["<|im_end|>"]')
    with pytest.raises(ValueError, match=r"tokenizer .*/tokenizer_config\.json: "):
        tokenizer.load(str(tmp_path))


def word_tokenizer(folder: Path, words: dict[str, int]) -> Path:
    """A tokenizer.json of whole words."""
    tokenizers = pytest.importorskip("tokenizers", reason="test_every_document... takes bytes")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_the_commands_prepare_and_show(tmp_path: Path) -> None:
    word_tokenizer(tmp_path, {"document": 0, "[UNK]": 1, "<|endoftext|>": 2, "naïve": 3})
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
        (
            b'{"text": "a"}\n{"body": "b", "id": 1}\n',
            "the line at byte 14 has no 'text', but 'body', 'id'; give another --text-field",
        ),
        (b'{"text": "a"}\nnot json\n', "the line at byte 14 is no JSON: Expecting value"),
        (b'["a"]\n', "the line at byte 0 is no JSON object, but list"),
        (b'{"text": 5}\n', "the line at byte 0 has no text in 'text', but int"),
        (b'{"text": "\0"}\n', "is not text but a binary file"),
        (b"", "is empty"),
    ],
)
def test_a_wrong_line_is_named_by_its_place(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        [text for unit in find_units([path]).units for (text,) in documents(unit, TEXT)]


def test_a_packed_file_that_is_cut_or_not_packed_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl.gz", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.jsonl.gz is damaged or truncated: .*; copy it again"):
        [text for unit in find_units([path]).units for (text,) in documents(unit, TEXT)]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"a.jsonl.gz is no .gz archive"):
        find_units([path])


def test_half_of_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\u00e9 \\ud83d\\ude00"}\n')
    (unit,) = find_units([path]).units
    assert list(documents(unit, TEXT)) == [("a?b é 😀",)]


def test_a_first_try_with_a_wrong_field_leaves_nothing_behind(tmp_path: Path) -> None:
    corpus, folder = lines(tmp_path / "a.jsonl", TEXTS, field="body"), tmp_path / "out"
    arguments = ["data", "prepare", str(corpus), "--output", str(folder), "--processes", "1"]
    wrong = outlast(*arguments)
    assert wrong.returncode == ExitCode.BAD_INPUT
    assert "has no 'text', but 'body', 'id'; give another --text-field" in wrong.stderr
    assert outlast_json(*arguments, "--text-field", "body")["splits"]["train"]["documents"] == 297


def test_what_is_skipped_is_said_and_bad_folders_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "picture.png").write_bytes(b"\x89PNG")
    prepare = ["data", "prepare", "--processes", "1", "--output"]
    nothing = outlast(*prepare, str(tmp_path / "out"), str(corpus))
    assert nothing.returncode == ExitCode.BAD_INPUT
    assert ".jsonl.zst, .parquet files, but 1: picture.png" in nothing.stderr
    (corpus / "a.txt").write_text("text")
    (tmp_path / "file").touch()
    refused = outlast(*prepare, str(tmp_path / "file"), str(corpus))
    assert refused.returncode == ExitCode.BAD_INPUT
    assert f"cannot write {tmp_path / 'file'}" in refused.stderr
    done = outlast(*prepare, str(tmp_path / "out"), str(corpus))
    assert done.returncode == ExitCode.OK
    assert "skipped     1: picture.png; names of their kind are not read" in done.stdout
    assert "validation  no documents: too few for --validation-fraction" in done.stdout


def test_two_runs_do_not_work_in_one_folder(tmp_path: Path) -> None:
    corpus, folder = order(lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out"

    def begin_another(num_bytes: int, num_tokens: int) -> None:
        run.prepare(folder, corpus, num_processes=1, done=lambda *_: None)

    with pytest.raises(ValueError, match="is being prepared by another process"):
        run.prepare(folder, corpus, num_processes=1, done=begin_another)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "prepare", stop)
    with pytest.raises(CliError, match="the same command goes on") as raised:
        data.prepare([lines(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out")
    assert raised.value.code == ExitCode.INTERRUPTED


def test_prompts_and_completions_are_told_apart(tmp_path: Path) -> None:
    pairs = [("ab", "cde"), ("", "fg"), ("hij", "k"), ("lost", "")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs))
    prepare = ["data", "prepare", str(path), "--processes", "1", "--output", str(tmp_path / "out")]
    alone = outlast(*prepare, "--prompt-field", "q")
    assert alone.returncode == ExitCode.BAD_INPUT
    assert "--prompt-field is given without --completion-field, which it needs" in alone.stderr
    wrong = outlast(*prepare, "--prompt-field", "q", "--completion-field", "b")
    assert "has no 'b', but 'q', 'a'; give another --completion-field" in wrong.stderr
    made = outlast_json(*prepare, "--prompt-field", "q", "--completion-field", "a")
    assert made["has_prompts"]
    assert made["splits"] == {"train": {"tokens": 11, "documents": 3}}
    file = open_source(str(tmp_path / "out")).train
    assert bytes(file.tokens().astype("uint8")) == b"abcdefghijk"
    assert file.has_prompts
    index, expected = file.index(), [letter in b"abhij" for letter in b"abcdefghijk"]
    for first in range(11):
        for count in range(1, 12 - first):
            assert index.prompts(first, count).tolist() == expected[first : first + count]


def test_text_files_have_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (unit,) = find_units([tmp_path]).units
    with pytest.raises(ValueError, match=r"a.txt is text and has no .*; give JSON lines"):
        units.is_text_file(unit, {"--prompt-field": "q", "--completion-field": "a"})


def test_zstd_is_read_across_frames_and_not_when_cut(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="test_folders_and_packed... takes gzip")
    plain = lines(tmp_path / "a.jsonl", TEXTS).read_bytes()
    packed = b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (plain[:1000], plain[1000:])
    )
    path = tmp_path / "b.jsonl.zst"
    path.write_bytes(packed)
    (unit,) = find_units([path]).units
    assert [text for (text,) in documents(unit, TEXT)] == TEXTS
    path.write_bytes(packed[:-20])
    (unit,) = find_units([path]).units
    with pytest.raises(ValueError, match=r"b.jsonl.zst is damaged or truncated"):
        list(documents(unit, TEXT))
    path.write_bytes(packed[:40] + bytes(200) + packed[240:])
    with pytest.raises(ValueError, match=r"b.jsonl.zst is damaged or truncated"):
        list(documents(unit, TEXT))


def test_a_packed_file_whose_library_is_missing_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"needs the package zstandard; pip install"):
        find_units([tmp_path])
