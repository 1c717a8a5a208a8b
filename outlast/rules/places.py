"""Where checkpoints may lie: what a path or URL in a spec must look like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from outlast.problems import shown

# Stores that can create a file only if it is absent, which keeps two attempts apart.
SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "hdfs", "webhdfs")
# Others that `checkpoint.storage.stores` takes: within one process, and an alias of fsspec's.
_ALSO_TAKEN = ("memory", "local")
# Steps of another job's checkpoints; more would not help a person.
_NUM_STEPS = 8
# Said of a folder to load from, here and on a node.
NO_CHECKPOINT = "has no committed checkpoint; give the folder of one job"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(url: str) -> str | None:
    """What stands before the colon of a URL; None for a path."""
    found = _SCHEME.match(url)
    return found.group(1).lower() if found else None


def local_path(url: str) -> str | None:
    """The path that a place means on a node's own file system; None for other stores."""
    if url.startswith("/"):
        return url
    scheme, _, rest = url.partition("://")
    return rest if scheme in ("file", "local") and rest.startswith("/") else None


def wrong_with_steps(
    url: str, steps: Sequence[int], wanted: int | None, end: int | None
) -> str | None:
    """Why a job of `end` steps cannot begin with a checkpoint at `url`, which holds `steps`.

    `steps` are ascending, and one at least. Where only weights are taken there is no end.
    """
    near = ", ".join(map(str, steps[-_NUM_STEPS:]))
    if wanted is not None:
        missing = f"is {wanted}, and {url} has no checkpoint of that step; allowed: {near}"
        return None if wanted in steps else missing
    if end is None or steps[-1] < end:
        return None
    earlier = [step for step in steps if step < end]
    remedy = f", or checkpoint.load_step: {earlier[-1]}" if earlier else ""
    return (
        f"is {shown(url)}, whose newest checkpoint is of step {steps[-1]}, which leaves nothing to "
        f"train as steps = {end}; allowed: more than {steps[-1]} steps{remedy}"
    )


def wrong_with_place(url: str, example: str) -> str | None:
    """Why nothing can lie at `url` whatever the node, with what is allowed; None if it can."""
    allowed = (
        f"an absolute path such as /{example}, or a URL of {', '.join(SCHEMES[:-1])} or "
        f"{SCHEMES[-1]}, such as s3://bucket/{example}"
    )
    given = f"is {shown(url)}"
    if not url or not url.isprintable() or url != url.strip():
        return f"{given}, which is no place; allowed: {allowed}"
    if url.startswith("/"):
        return None
    scheme = scheme_of(url)
    if scheme is None:
        return f"{given}, a relative path; allowed: {allowed}"
    if scheme not in (*SCHEMES, *_ALSO_TAKEN):
        near = difflib.get_close_matches(scheme, SCHEMES, n=1, cutoff=0.5)
        meant = f" (did you mean {near[0]}?)" if near else ""
        return f"{given}; there is no store {scheme!r}{meant}; allowed: {allowed}"
    rest = url[len(scheme) + 1 :]
    if not rest.startswith("//") or not rest.strip("/"):
        return f"{given}, which names no place in the store; allowed: {allowed}"
    if scheme in ("file", "local") and local_path(url) is None:
        return f"{given}; a file URL has three slashes, as in file:///{example}"
    return None
