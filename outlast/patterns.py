"""Regular expressions that people search many lines with, at a cost in proportion to the lines.

They come over the network and are evaluated beside training, so no pattern may take time
beyond that: the engine is Rust's `regex`, which pydantic has, and which never backtracks. What it
takes for a character grows with what a pattern counts, so counts are bounded.
"""

from __future__ import annotations

import math
import re

from pydantic_core import SchemaError, SchemaValidator, core_schema

MAX_CHARACTERS = 1_000
# All counts of repetitions, multiplied, as they may be nested: with 5,000, a line of 64 KiB took
# 7.7 s, in which no other thread ran.
MAX_REPETITIONS = 100
ALLOWED = (
    f"a regular expression of {MAX_CHARACTERS} characters or fewer, without look-around and "
    f"backreferences, whose counts of repetitions multiply to {MAX_REPETITIONS} at most"
)
_COUNTS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


class LinePattern:
    """What a line has to have in it; a part of it that matches is enough."""

    def __init__(self, text: str, name: str) -> None:
        """`name` is the option or field that has it.

        Raises:
            ValueError: it is no regular expression, or too large a one.
        """
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{name} has {len(text)} characters; allowed: {ALLOWED}")
        if _repetitions(text) > MAX_REPETITIONS:
            raise ValueError(f"{name} is {text!r}: it repeats too often; allowed: {ALLOWED}")
        try:
            self._validator = SchemaValidator(
                core_schema.str_schema(pattern=text, regex_engine="rust-regex")
            )
        except SchemaError as error:
            raise ValueError(f"{name} is {text!r}: {_why(error)}; allowed: {ALLOWED}") from error

    def matches(self, line: str) -> bool:
        """Whether it is found somewhere in a line."""
        return self._validator.isinstance_python(line)


def _repetitions(text: str) -> int:
    """What all counts of repetitions multiply to."""
    counts = (max(1, *(int(each) for each in found if each)) for found in _COUNTS.findall(text))
    return math.prod(counts)


def _why(error: SchemaError) -> str:
    """What the engine says is wrong, without its drawing of where."""
    last = str(error).strip().splitlines()[-1].strip()
    for before in ("SchemaError: ", "error: "):
        last = last.removeprefix(before)
    return last.rstrip(".").lower() if last.startswith("Compiled") else last
