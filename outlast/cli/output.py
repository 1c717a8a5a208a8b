"""Facts to standard output: JSON for programs, aligned text and tables for people."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from outlast.facts import facts as facts
from outlast.facts import finite

LABEL_WIDTH = 11
# Narrower terminals wrap by themselves.
MIN_WIDTH = 40
# The last column of a table is at least so wide, or stands below.
MIN_LAST = 24
VERBATIM = ("stacks", "error")
_GAP = "  "
# Further lines of a problem in a list of problems.
_HANG = 4
_QUANTITY = re.compile(r"(\d) (?=%|(?:[num]?s|min|h|d|[KMGTP]?i?B|steps?|times|ranks?|nodes?)\b)")


def print_json(value: object) -> None:
    """One JSON document, indented; NaN and infinities become null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def print_json_line(value: object) -> None:
    """One JSON document on one line, written at once: an element of a stream."""
    print(json.dumps(finite(value), allow_nan=False), flush=True)


def width() -> int | None:
    """Columns to write in: the terminal's or `COLUMNS`; None for a pipe, whose lines stay whole."""
    if os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty():
        return max(MIN_WIDTH, shutil.get_terminal_size().columns)
    return None


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Labelled lines; a label repeated is printed once, further lines of a text are indented."""
    lines, last = list(lines), ""
    labels = max((len(label) for label, _ in lines), default=0)
    labels = max(labels, LABEL_WIDTH)
    for label, text in lines:
        shown = "" if label == last else label
        last = label or last
        # What Python or a debugger wrote keeps its own lines.
        is_verbatim = label in VERBATIM
        for line in text.splitlines() or [""]:
            for part in [line] if is_verbatim else _wrapped(line, labels + 1):
                print(f"{shown:<{labels}} {part}".rstrip())
                shown = ""


def print_wrapped(text: str) -> None:
    """A sentence or two, wrapped at the terminal's width."""
    for line in text.splitlines():
        print("\n".join(_wrapped(line, 0)))


def print_message(text: str) -> None:
    """Notes for a person beside the facts, to standard error.

    Wrapped where that is a terminal; whole lines for a pipe, which a program may search.
    """
    is_terminal = sys.stderr.isatty()
    columns = max(MIN_WIDTH, shutil.get_terminal_size().columns)
    for line in text.splitlines():
        is_long = is_terminal and len(line) > columns
        print(_filled(line, columns) if is_long else line, file=sys.stderr)


def _filled(line: str, columns: int) -> str:
    # What stands below a line, such as one problem of many, is set apart from it when it wraps.
    lead = len(line) - len(line.lstrip())
    # A first word such as "outlast:" is not left alone by a long path.
    joined = line if lead else line.replace(" ", "\0", 1)
    return textwrap.fill(
        joined,
        width=columns,
        subsequent_indent=" " * (lead + _HANG if lead else 0),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Columns as wide as their widest cell; the last one wraps, or takes lines of its own."""
    if not rows:
        print(empty)
        return
    # A column in which no row has anything says nothing.
    last = len(header) - 1
    kept = [i for i in range(len(header)) if i == last or any(row[i] for row in rows)]
    table = [[row[i] for i in kept] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(kept) - 1)]
    indent = sum(widths) + len(_GAP) * len(widths)
    columns = width()
    longest = max(len(row[-1]) for row in table)
    if columns is not None and indent > columns and len(widths) > 1:
        _print_long_names(table, widths)
        return
    is_below = columns is not None and indent + min(longest, MIN_LAST) > columns
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        if is_below:
            print(_GAP.join(cells).rstrip())
            parts = _wrapped(row[-1], 4) if row[-1] else []
            print(*(f"    {part}" for part in parts), sep="\n", end="\n" if parts else "")
            continue
        first, *rest = _wrapped(row[-1], indent)
        print(_GAP.join((*cells, first)).rstrip())
        for part in rest:
            print(f"{'':<{indent}}{part}")


def _print_long_names(table: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    """Each row's name on a line of its own, and the other columns below."""
    indent = 2 + sum(widths[1:]) + len(_GAP) * len(widths[1:])
    for row in table:
        print(row[0])
        cells = [cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        first, *rest = _wrapped(row[-1], indent)
        print(f"  {_GAP.join((*cells, first))}".rstrip())
        for part in rest:
            print(f"{'':<{indent}}{part}")


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines that fit beside `indent`; words stay whole, and columns of a line stay columns."""
    columns = width()
    if columns is None or indent + len(text) <= columns:
        return [text]
    room = max(MIN_LAST, columns - indent)
    lead = len(text) - len(text.lstrip())
    gap = text.rfind("  ", 0, room // 2)
    hang = gap + 2 if gap >= 0 else lead
    hang += len(text[hang:]) - len(text[hang:].lstrip())
    # A number and its unit stay on one line.
    joined = _QUANTITY.sub("\\1\0", text[lead:])
    lines = textwrap.wrap(
        joined,
        width=room,
        initial_indent=" " * lead,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines] or [text]
