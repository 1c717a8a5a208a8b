"""Profiles of several ranks: in one file of speedscope, and as shares of their time.

The format is that of https://www.speedscope.app/file-format-schema.json, as py-spy writes it: a
sampled profile of each thread, whose samples are stacks of numbers of shared frames, outermost
first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

Document = dict[str, Any]


class Place(NamedTuple):
    """A function."""

    name: str
    file: str


def merged(profiles: Mapping[str, Document]) -> Document:
    """One document of several, whose threads are named by what each is of; the main ones first."""
    frames: list[Any] = []
    threads: list[Document] = []
    others: list[Document] = []
    for owner, document in profiles.items():
        offset = len(frames)
        frames += document["shared"]["frames"]
        main = _main_thread(document)
        for thread in document["profiles"]:
            (threads if thread is main else others).append(
                {
                    **thread,
                    "name": f"{owner}: {thread['name']}",
                    "samples": [[each + offset for each in stack] for stack in thread["samples"]],
                }
            )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": ", ".join(profiles),
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": [*threads, *others],
    }


def own_shares(document: Document) -> dict[Place, float]:
    """Of a main thread's time, the share that each function itself has, its callees left out."""
    seconds: dict[Place, float] = defaultdict(float)
    frames = document["shared"]["frames"]
    main = _main_thread(document)
    for stack, weight in zip(main["samples"], main["weights"], strict=True) if main else ():
        if stack:
            frame = frames[stack[-1]]
            seconds[Place(frame["name"], frame.get("file") or "")] += weight
    total = sum(seconds.values())
    return {place: each / total for place, each in seconds.items()}


def _main_thread(document: Document) -> Document | None:
    threads: list[Document] = document["profiles"]
    named = (each for each in threads if each["name"].endswith('"MainThread"'))
    # A program without the module of threads does not name its only one.
    return next(named, threads[0] if len(threads) == 1 else None)
