"""Checkpoints beside a plain copy, torch.save and torch's own checkpoints: `make bench-checkpoint`.

Everything is measured beside its baseline in the same minutes, one of each in turn;
claims are medians of paired ratios. What is measured is the product: the stager, the
agent's uploader in a process of its own, the trainer's restore, a job under a controller.

    python -m bench.checkpoint [--rounds 5] [--sizes 1,4] [--only saving,...] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from bench.checkpoint import checksums, memory, restoring, saving, starting
from bench.checkpoint.gpt import SIZES, SMALL
from bench.checkpoint.options import Measured, Options
from bench.results import Claim, write

PARTS: Mapping[str, Callable[[Options], Measured]] = {
    "saving": saving.measure,
    "restoring": restoring.measure,
    "memory": memory.measure,
    "starting": starting.measure,
    "checksums": checksums.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of the state, in GB")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    given = parser.parse_args()
    sizes = given.sizes.split(",")
    parts = given.only.split(",")
    for name, known, option in [(each, SIZES, "--sizes") for each in sizes] + [
        (each, PARTS, "--only") for each in parts
    ]:
        if name not in known:
            parser.error(f"{option} {name!r}: allowed are {', '.join(known)}")
    options = Options(
        rounds=given.rounds,
        small=given.small,
        sizes=(SMALL,) if given.small else tuple(SIZES[name] for name in sizes),
    )
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for part in parts:
        more_rows, more_claims = PARTS[part](options)
        rows += [{"part": part, **row} for row in more_rows]
        claims += more_claims
    # A try, or a part, must not take the place of the committed whole.
    whole = given.only == ",".join(PARTS) and not given.small and sizes == list(SIZES)
    write("checkpoint" if whole else "checkpoint-part", rows, claims)


if __name__ == "__main__":
    main()
