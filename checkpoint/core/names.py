"""Where things lie below a job's checkpoint root.

    commits/00000050.json                   the checkpoint of step 50 exists
    step-00000050.2/manifest.json           what attempt 2 saved at step 50
    step-00000050.2/__3_0.distcp            payload of one rank
    step-00000050.2/parts/rank-00003.json   its record, until the manifest has it
    step-00000050.2/.metadata               for torch's tools: what lies where, once more
    quarantine/00000050.2.json              commit record of a checkpoint found corrupt

Every attempt writes into a folder of its own, so that a writer that wakes up
late cannot touch bytes that another attempt has committed. The folder is one that
`torch.distributed.checkpoint` reads too, which is why payloads have the names they have.
"""

from __future__ import annotations

import re

COMMITS = "commits"
QUARANTINE = "quarantine"
PARTS = "parts"
MANIFEST = "manifest.json"
# torch looks for this name.
METADATA = ".metadata"

_ATTEMPT_FOLDER = re.compile(r"step-(\d{8,})\.(\d+)")
_COMMIT = re.compile(r"(\d{8,})\.json")
_QUARANTINED = re.compile(r"(\d{8,})\.(\d+)\.json")
_PART = re.compile(r"rank-(\d{5,})\.json")


def attempt_folder(step: int, attempt: int) -> str:
    """The folder that `attempt` writes its checkpoint of `step` into."""
    return f"step-{step:08d}.{attempt}"


def parse_attempt_folder(name: str) -> tuple[int, int] | None:
    """Step and attempt of an attempt folder; None for any other name."""
    match = _ATTEMPT_FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def commit_path(step: int) -> str:
    """The record whose existence makes the checkpoint of `step` exist."""
    return f"{COMMITS}/{step:08d}.json"


def parse_commit(name: str) -> int | None:
    """Step of a commit record's file name; None for any other name."""
    match = _COMMIT.fullmatch(name)
    return int(match[1]) if match else None


def quarantine_path(step: int, attempt: int) -> str:
    """Where the commit record of a corrupt checkpoint is kept for people to look at."""
    return f"{QUARANTINE}/{step:08d}.{attempt}.json"


def parse_quarantined(name: str) -> tuple[int, int] | None:
    """Step and attempt of a quarantined commit record; None for any other name."""
    match = _QUARANTINED.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def payload_name(rank: int) -> str:
    """File of a rank's payload in its attempt folder."""
    return f"__{rank}_0.distcp"


def part_name(rank: int) -> str:
    """File of a rank's record in the folder `parts` of its attempt folder."""
    return f"rank-{rank:05d}.json"


def parse_part(name: str) -> int | None:
    """Rank of a part record's file name; None for any other name."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def memory_folder(rank: int) -> str:
    """A rank's folder in the host memory of its job."""
    return f"rank-{rank:05d}"
