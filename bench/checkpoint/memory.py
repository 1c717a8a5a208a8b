"""Restores from host memory with checksums, beside the same restores of slots that have none."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.checkpoint.gpt import SIZES, Size, mesh_of, noisy_state
from bench.checkpoint.options import Measured, Options, quartiles, ratio
from bench.checkpoint.savers import Ours
from bench.member import Rank
from bench.results import Claim
from bench.trainer.launch import run_ranks
from checkpoint.restore.restore import SealedStep, load_memory
from checkpoint.stage import slotfile
from checkpoint.stage.copy_stream import HostCopyStream
from checkpoint.stage.slot_sums import ensure_sums

_PAIRS = 9


def measure(options: Options) -> Measured:
    """What it costs to compare every byte of a slot with its checksum."""
    row = run_ranks(
        "memory",
        {"size": asdict(options.sized(SIZES["1"]))},
        world_size=1,
        program="bench.checkpoint.rank",
    )
    print("restoring from host memory:", row, flush=True)
    with_sums, without = row["seconds"]["with_sums"], row["seconds"]["without"]
    low, middle, high = quartiles(with_sums, without)
    claim = Claim(
        claim="memory_restore_with_checksums",
        value=ratio(with_sums, without),
        unit="x",
        goal="<= 1.1",
        baseline="the same restore of a slot that has no checksums",
        how=f"GPT state of {row['nbytes'] / 1e9:.2f} GB, one rank, one core to spare; quartiles "
        f"of {len(without)} pairs in random order {low:.2f}, {middle:.2f}, {high:.2f}",
    )
    return [row], [claim]


def run(rank: Rank, *, size: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of both, in the memory of tensors that a restart has just made."""
    spec = Size(**size).spec()
    state = noisy_state(spec, mesh_of(rank, spec), rank.folder / "data")
    tensors = state.named_tensors()
    order = random.Random(0)
    seconds: dict[str, list[float]] = {"with_sums": [], "without": []}
    with closing(Ours(tensors, state.extra(1), HostCopyStream())) as ours:
        # Of the two slots one has checksums.
        for _ in seconds:
            ours.save()
        _sum(ours.folder, step=2)
        for number in range(-1, _PAIRS):
            for name in order.sample(sorted(seconds), len(seconds)):
                step = 2 if name == "with_sums" else 1
                begin_s = time.perf_counter()
                load_memory(ours.folder, SealedStep(step, ours.attempt), tensors)
                took_s = time.perf_counter() - begin_s
                if number >= 0:
                    seconds[name].append(took_s)
    return {"nbytes": sum(named.tensor.nbytes for named in tensors), "seconds": seconds}


def _sum(folder: Path, *, step: int) -> None:
    """What a node's agent does right after the seal."""
    slots = slotfile.open_existing(folder)
    for slot in slots:
        if slot.read().step == step:
            assert ensure_sums(slot) is not None
        slot.close()
