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
# Without a name where the program has no module of threads, and so no other thread.
_MAIN = ('"MainThread"', '""')


class Place(NamedTuple):
    """A function."""

    name: str
    file: str


def merged(profiles: Mapping[str, Document]) -> Document:
    """One document of several, whose threads are named by what each is of; the main ones first."""
    frames: list[Any] = []
    threads: list[Document] = []
    for owner, document in profiles.items():
        offset = len(frames)
        frames += document["shared"]["frames"]
        threads += [
            {
                **thread,
                "name": f"{owner}: {thread['name']}",
                "samples": [[frame + offset for frame in stack] for stack in thread["samples"]],
            }
            for thread in document["profiles"]
        ]
    threads.sort(key=lambda thread: not thread["name"].endswith(_MAIN))
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": ", ".join(profiles),
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": threads,
    }


def own_shares(document: Document) -> dict[Place, float]:
    """Of a main thread's time, the share that each function itself has, its callees left out."""
    seconds: dict[Place, float] = defaultdict(float)
    frames = document["shared"]["frames"]
    for thread in document["profiles"]:
        if not thread["name"].endswith(_MAIN):
            continue
        for stack, weight in zip(thread["samples"], thread["weights"], strict=True):
            if stack:
                frame = frames[stack[-1]]
                seconds[Place(frame["name"], frame.get("file") or "")] += weight
    total = sum(seconds.values())
    return {place: each / total for place, each in seconds.items()}
