"""Where things lie below a job's checkpoint root.

    commits/00000050.json                   the checkpoint of step 50 exists
    step-00000050.2/manifest.json           what attempt 2 saved at step 50
    step-00000050.2/__3_0.distcp            payload of one rank
    step-00000050.2/parts/rank-00003.json   its record, until the manifest has it
    step-00000050.2/.metadata               for torch's tools: what lies where, once more
    quarantine/00000050.2.json              commit record of a checkpoint found corrupt, or given up
    pins/00000050.json                      a person wants to keep the checkpoint of step 50
    leases/00000050.<token>.json            somebody is reading it
    owner.json                              which job this root belongs to

Every attempt writes into a folder of its own, so that a writer that wakes up
late cannot touch bytes that another attempt has committed. The folder is one that
`torch.distributed.checkpoint` reads too, which is why payloads have the names they have.
"""

from __future__ import annotations

import re

from outlast.worker_contract import parse_rank_name, rank_name

COMMITS = "commits"
QUARANTINE = "quarantine"
PINS = "pins"
LEASES = "leases"
OWNER = "owner.json"
PARTS = "parts"
# A shared object with xxh3, beside `checkpoint.xxh3` in copies of it.
XXH3_LIBRARY = "libxxh3.so"
REPLICAS = "replicas"
MANIFEST = "manifest.json"
# torch looks for this name.
METADATA = ".metadata"

_ATTEMPT_FOLDER = re.compile(r"step-(\d{8,})\.(\d+)")
_COMMIT = re.compile(r"(\d{8,})\.json")
_QUARANTINED = re.compile(r"(\d{8,})\.(\d+)\.json")
_LEASE = re.compile(r"(\d{8,})\.([0-9a-f]+)\.json")
_DRAFT = re.compile(r"\.(.+)\.([0-9a-f]{32})")
_PAYLOAD = re.compile(r"__(\d+)_0\.distcp")


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


def pin_path(step: int) -> str:
    """The record that keeps the checkpoint of `step` whatever retention says."""
    return f"{PINS}/{step:08d}.json"


def lease_path(step: int, token: str) -> str:
    """The record by which one reader keeps the checkpoint of `step` for a while."""
    return f"{LEASES}/{step:08d}.{token}.json"


def parse_lease(name: str) -> int | None:
    """Step of a lease's file name; None for any other name."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def draft_name(name: str, token: str) -> str:
    """What a file is called before it is whole; `token` is 32 hexadecimal digits."""
    return f".{name}.{token}"


def parse_draft(name: str) -> tuple[str, str] | None:
    """Name and token of a file that is not whole yet; None for any other name."""
    match = _DRAFT.fullmatch(name)
    return (match[1], match[2]) if match else None


def payload_name(rank: int) -> str:
    """File of a rank's payload in its attempt folder."""
    return f"__{rank}_0.distcp"


def parse_payload(name: str) -> int | None:
    """Rank of a payload's file name; None for any other name."""
    match = _PAYLOAD.fullmatch(name)
    return int(match[1]) if match else None


def part_name(rank: int) -> str:
    """File of a rank's record in the folder `parts` of its attempt folder."""
    return f"{rank_name(rank)}.json"


def parse_part(name: str) -> int | None:
    """Rank of a part record's file name; None for any other name."""
    return parse_rank_name(name.removesuffix(".json")) if name.endswith(".json") else None


def memory_folder(rank: int) -> str:
    """A rank's folder in the host memory of its job."""
    return rank_name(rank)


def parse_memory_folder(name: str) -> int | None:
    """Rank of a folder of host memory; None for any other name."""
    return parse_rank_name(name)


def replica_folder(rank: int) -> str:
    """Where a node keeps the copies of a rank of another node, in the host memory of its job."""
    return f"{REPLICAS}/{memory_folder(rank)}"
