"""Lists that a controller answers in pages, asked for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Response = TypeVar("_Response")
# Of a list, at once.
PAGE = 1000


def pages(
    ask: Callable[[Any], _Response], request: Any, size: str, most: int = 0, at_once: int = PAGE
) -> Iterator[_Response]:
    """The answers that have the `most` first of a list, or all of it when 0.

    `request` has fields `after` and, by the name `size`, how many are asked for at once, which are
    up to `at_once`; `next` of an answer is empty when it is the last.
    """
    num_asked = 0
    while True:
        wanted = min(at_once, most - num_asked) if most else at_once
        setattr(request, size, wanted)
        num_asked += wanted
        answer: Any = ask(request)
        yield answer
        request.after = answer.next
        if not request.after or num_asked == most:
            return
