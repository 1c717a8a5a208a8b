"""Regular expressions that people search many lines with, at a cost in proportion to the lines.

They come over the network and are evaluated beside training, so no pattern may take time
beyond that: the engine is Rust's `regex`, which pydantic has, and which never backtracks.
"""

from __future__ import annotations

from pydantic_core import SchemaError, SchemaValidator, core_schema

MAX_CHARACTERS = 1_000
ALLOWED = (
    f"a regular expression of {MAX_CHARACTERS} characters or fewer, without look-around and "
    "backreferences"
)


class LinePattern:
    """What a line has to have in it; a part of it that matches is enough."""

    def __init__(self, text: str, name: str) -> None:
        """`name` is the option or field that has it.

        Raises:
            ValueError: it is no regular expression, or too large a one.
        """
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{name} has {len(text)} characters; allowed: {ALLOWED}")
        try:
            self._validator = SchemaValidator(
                core_schema.str_schema(pattern=text, regex_engine="rust-regex")
            )
        except SchemaError as error:
            raise ValueError(f"{name} is {text!r}: {_why(error)}; allowed: {ALLOWED}") from error

    def matches(self, line: str) -> bool:
        """Whether it is found somewhere in a line."""
        return self._validator.isinstance_python(line)


def _why(error: SchemaError) -> str:
    """What the engine says is wrong, without its drawing of where."""
    last = str(error).strip().splitlines()[-1].strip()
    for before in ("SchemaError: ", "error: "):
        last = last.removeprefix(before)
    return last.rstrip(".").lower() if last.startswith("Compiled") else last
