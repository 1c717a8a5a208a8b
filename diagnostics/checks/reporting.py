"""How the child process of a check tells its runner what came of it, one JSON line each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from diagnostics.checks.base import Emit, SkipCheckError


def reporting(check: Callable[[Emit], None]) -> Callable[[int], None]:
    """A body for the child: `check`, with its measurements and its end written as lines.

    A line is an object with one key: `measurement`, `skip` or `error`.
    """

    def body(sender: int) -> None:
        def send(kind: str, text: str) -> None:
            os.write(sender, json.dumps({kind: text}).encode() + b"\n")

        try:
            check(lambda measurement: send("measurement", measurement.to_json()))
        except SkipCheckError as error:
            send("skip", str(error))
        except Exception as error:  # noqa: BLE001 - whatever breaks a check is its finding
            send("error", f"{type(error).__name__}: {error}")

    return body
