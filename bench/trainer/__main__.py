"""The trainer beside what PyTorch gives out of the box, in one call: `make bench-trainer`.

Every comparison is interleaved step by step in the same processes, ranks pinned to
cores with one thread each; claims are medians of paired ratios. The baseline has two
forms, stock and with Outlast's reduce-scatter swapped in; the better one counts.

    python -m bench.trainer [--rounds 5] [--only loopback,link,...] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from bench.results import Claim, write
from bench.trainer import bubble, context, experts, link, loopback, overlap, start, window, zero
from bench.trainer.options import Options

Measured = tuple[list[dict[str, Any]], list[Claim]]

PARTS: Mapping[str, Callable[[Options], Measured]] = {
    "loopback": loopback.measure,
    "link": link.measure,
    "overlap": overlap.measure,
    "bubble": bubble.measure,
    "zero": zero.measure,
    "window": window.measure,
    "context": context.measure,
    "experts": experts.measure,
    "start": start.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side per comparison")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    given = parser.parse_args()
    options = Options(rounds=given.rounds, small=given.small)
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for name in given.only.split(","):
        if name not in PARTS:
            parser.error(f"--only {name!r}: allowed are {', '.join(PARTS)}")
        more_rows, more_claims = PARTS[name](options)
        rows += [{"part": name, **row} for row in more_rows]
        claims += more_claims
    # A try, or a part, must not take the place of the committed whole.
    whole = given.only == ",".join(PARTS) and not given.small
    write("trainer" if whole else "trainer-part", rows, claims)


if __name__ == "__main__":
    main()
