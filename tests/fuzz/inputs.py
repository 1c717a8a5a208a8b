"""What a peer may send that is no friend of ours, or not in its right mind.

`make test` sends a few hundred of each kind, `make test-fuzz` as many as FUZZ_INPUTS says.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

COUNT = int(os.environ.get("FUZZ_INPUTS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_MAX_NOISE = 3_000
_LARGE = 1 << 20


def noise(rng: random.Random) -> bytes:
    """Bytes without a meaning."""
    return rng.randbytes(rng.choice((0, 1, 2, 8, 64, rng.randrange(_MAX_NOISE))))


def damaged(rng: random.Random, whole: bytes) -> bytes:
    """A message with something wrong: bits, parts that are missing, repeated or put in."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64)))
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end] * rng.choice((1, 3, 50))
            case 3:
                data[at:at] = noise(rng)[:200]
            case 4 if data:
                data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case _:
                del data[at:]
    return bytes(data)


def nested(rng: random.Random) -> bytes:
    """JSON that is deeper than a parser's stack, or as wide as a message may be."""
    depth = rng.choice((100, 10_000, 200_000))
    return rng.choice(
        (
            b"[" * depth,
            b'{"a":' * depth,
            b"[" * depth + b"]" * depth,
            b"1" * 5_000,
            b'{"a":' + b"9" * 5_000 + b"}",
            b'"' + b"\\u0000" * 1_000 + b'"',
            b"[" + b"0," * (_LARGE // 8) + b"0]",
            b"NaN",
            b"-Infinity",
            b"\xff\xfe",
        )
    )


def several(number: int = COUNT, *, seed: int = 0) -> Iterator[random.Random]:
    """So many sources of chance, each of which can be had again by its place."""
    for place in range(number):
        yield random.Random(f"{SEED}/{seed}/{place}")


def memory_bytes(pid: int) -> int:
    """What a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
