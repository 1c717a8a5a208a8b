"""The smallest and the largest id of a file of tokens, noted beside a file that has no manifest.

`outlast data describe` reads the whole file once and writes `FILE.ids.json`. Checks before a start
then read that instead of the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

ENDING = ".ids.json"
FORMAT = "outlast-ids/1"
# A note is far shorter; what is longer is none.
MOST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRange:
    """All ids of a file are from `smallest` to `largest`."""

    smallest: int
    largest: int
    largest_at: int | None = None
    """Which token is the first with the largest id, counted from 0; None where nobody knows."""

    def note(self, digest: str) -> bytes:
        """What is written beside the file whose samples have this digest."""
        facts = {"format": FORMAT, "digest": digest, **asdict(self)}
        return (json.dumps(facts, indent=2) + "\n").encode()


def parse_note(raw: bytes, digest: str) -> IdRange | None:
    """The range in a note; None where it is no note, or one of another file than `digest` is of."""
    try:
        document = json.loads(raw)
        if (document.pop("format"), document.pop("digest")) != (FORMAT, digest):
            return None
        found = IdRange(**{name: int(value) for name, value in document.items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return found if found.smallest <= found.largest else None
