"""Parquet files as corpora: rows in order, whole row groups a unit, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from tests.cli.running import outlast, outlast_json
from tests.trainer.test_corpus import TEXT, TEXTS, lines
from trainer.data.corpus import units
from trainer.data.corpus.units import documents, find_units

pyarrow = pytest.importorskip("pyarrow", reason="pip install outlast[parquet]")
pq = pytest.importorskip("pyarrow.parquet", reason="pip install outlast[parquet]")


def table(path: Path, rows: int = 50, **columns: object) -> Path:
    """A file with row groups of `rows` rows."""
    pq.write_table(pyarrow.table(columns), path, row_group_size=rows)
    return path


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary("int32", "string")]
)
@pytest.mark.parametrize("unit_bytes", [300, 1 << 20])
def test_rows_are_documents_in_order_whatever_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: object, unit_bytes: int
) -> None:
    monkeypatch.setattr(units, "_PARQUET_UNIT_BYTES", unit_bytes)
    values = pyarrow.array(TEXTS).cast(kind)
    path = table(tmp_path / "a.parquet", text=values, id=list(range(len(TEXTS))))
    found = find_units([path]).units
    assert len(found) == -(-path.stat().st_size // unit_bytes)
    assert [text for unit in found for (text,) in documents(unit, TEXT)] == TEXTS


def test_it_becomes_what_the_same_json_lines_become(tmp_path: Path) -> None:
    prepare = ["data", "prepare", "--processes", "1", "--validation-fraction", "0.1", "--output"]
    (tmp_path / "one").mkdir()
    table(tmp_path / "one" / "a.parquet", text=TEXTS)
    lines(tmp_path / "a.jsonl", TEXTS)
    tables = outlast_json(*prepare, str(tmp_path / "t"), str(tmp_path / "one"))
    others = outlast_json(*prepare, str(tmp_path / "l"), str(tmp_path / "a.jsonl"))
    assert tables["splits"] == others["splits"]
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "t" / name).read_bytes() == (tmp_path / "l" / name).read_bytes()


def test_prompts_and_completions_are_columns(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", q=["ab", "lost", "c"], a=["cd", "", "e"])
    (unit,) = find_units([path]).units
    fields = {"--prompt-field": "q", "--completion-field": "a"}
    assert list(documents(unit, fields)) == [("ab", "cd"), ("c", "e")]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", body=["x"], number=[1], text=["y"])
    (unit,) = find_units([path]).units
    with pytest.raises(ValueError, match=r"has no 't', but 'body', 'number', 'text'; give another"):
        list(documents(unit, {"--text-field": "t"}))
    with pytest.raises(ValueError, match=r"has no text in 'number', but int64"):
        list(documents(unit, {"--text-field": "number"}))
    path = table(tmp_path / "b.parquet", rows=2, text=["x", "y", "z", None])
    (unit,) = find_units([path]).units
    with pytest.raises(ValueError, match=r"b.parquet: row 3 has nothing in 'text'"):
        list(documents(unit, TEXT))


def test_a_file_that_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=TEXTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    wrong = outlast("data", "prepare", str(path), "--output", str(tmp_path / "out"))
    assert wrong.returncode == ExitCode.BAD_INPUT
    assert "a.parquet is no Parquet file, or it is truncated" in wrong.stderr
    path.write_bytes(whole[:20] + bytes(100) + whole[120:])
    (unit,) = find_units([path]).units
    with pytest.raises(ValueError, match=r"a.parquet is damaged or truncated: .*; copy it again"):
        list(documents(unit, TEXT))


def test_without_the_library_it_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "a.parquet", text=TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow; pip install"):
        find_units([path])
