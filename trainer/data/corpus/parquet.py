"""Reading the texts of Parquet files, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.data.corpus.extras import library

SUFFIX = ".parquet"
_MAGIC = b"PAR1"
# Rows that are in memory at a time: documents may be megabytes.
_ROWS = 256


def check(path: Path) -> None:
    """Refuse what is no whole Parquet file, and one for which the library is missing.

    Raises:
        ValueError: saying which.
    """
    _pyarrow(path)
    with path.open("rb") as file:
        beginning = file.read(len(_MAGIC))
        file.seek(max(0, path.stat().st_size - len(_MAGIC)))
        if (beginning, file.read()) != (_MAGIC, _MAGIC):
            raise ValueError(f"{path} is no Parquet file, or it is truncated")


def texts(path: Path, first: int, end: int, fields: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The texts of each row of the row groups that begin in bytes `first` to `end`.

    Raises:
        ValueError: the file is damaged, or has no text in a field.
    """
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, fields, pyarrow)
            yield from _texts(path, file, first, end, fields)
    except (OSError, pyarrow.ArrowException) as error:
        # Its messages may be long, and end with what a programmer may do.
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or truncated: {reason}; copy it again") from error


def _texts(
    path: Path, file: Any, first: int, end: int, fields: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    at = 0
    names = list(fields.values())
    for group in range(file.num_row_groups):
        begins, rows = _begins(file.metadata.row_group(group)), at
        at += file.metadata.row_group(group).num_rows
        if not first <= begins < end:
            continue
        batches = file.iter_batches(_ROWS, [group], dict.fromkeys(names), use_threads=False)
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in names]
            for row, found in enumerate(zip(*columns, strict=True), rows):
                for name, text in zip(names, found, strict=True):
                    if text is None:
                        raise ValueError(f"{path}: row {row:,} has nothing in {name!r}")
                yield found
            rows += batch.num_rows


def _begins(group: Any) -> int:
    """The first byte of a row group."""
    places = []
    for index in range(group.num_columns):
        column = group.column(index)
        places.append(column.data_page_offset)
        if column.has_dictionary_page:
            places.append(column.dictionary_page_offset)
    return min(places, default=0)


def _check_columns(path: Path, schema: Any, fields: Mapping[str, str], pyarrow: Any) -> None:
    for option, name in fields.items():
        if name not in schema.names:
            others = ", ".join(map(repr, schema.names)) or "nothing"
            raise ValueError(f"{path} has no {name!r}, but {others}; give another {option}")
        kind = schema.field(name).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{path} has no text in {name!r}, but {kind}")


def _pyarrow(path: Path) -> Any:
    library("pyarrow.parquet", "parquet", path)
    return library("pyarrow", "parquet", path)
