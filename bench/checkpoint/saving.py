"""Saves of one rank: how long it waits, when the state is durable, what training loses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.baselines.plain import write_past_cache
from bench.checkpoint import training
from bench.checkpoint.gpt import Size, mesh_of, noisy_state
from bench.checkpoint.loops import Computing, Launching, Loop, steps_lost
from bench.checkpoint.options import Measured, Options
from bench.checkpoint.savers import (
    Dcp,
    Ours,
    Plain,
    Saver,
    TorchSave,
    in_random_turns,
    in_turns,
    state_dict,
)
from bench.checkpoint.saving_claims import RAW_THREADS, claims_of
from bench.member import Rank
from bench.results import Claim
from bench.trainer.launch import run_ranks
from checkpoint.memory import free_bytes
from checkpoint.stage.copy_stream import CopyStream, HostCopyStream, copy_stream_for
from trainer.worker.state import TrainState

# How long a loop shows its pace before a save, and after. Tries of the program need not wait.
_ASIDE_S = 1.0
_WHOLE_BYTES = 10**9
# Torch's savers take up to ten seconds beside a loop.
_LOSS_ROUNDS = 3
# An agent meets each slot's memory for the first time once; it sees every step after that.
_WARM_SLOTS = 3
# Of a save and a plain copy: three of each gave 1.01 in one run and 1.26 in another.
_PAIRS = 9
# Beside the state and its three slots: a plain copy, and what others of the machine need.
_SPARE_BYTES = 3 << 30

Turns = dict[str, list[float]]


def measure(options: Options) -> Measured:
    """Claims at every size for which there is memory."""
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for size in options.sizes:
        missing = 4 * size.nbytes + _SPARE_BYTES - free_bytes(Path("/dev/shm"))
        if missing > 0 and not options.small:
            print(f"saving {size.name}: left out, {missing >> 20} MiB of memory are missing")
            continue
        row = run_ranks(
            "saving",
            {"size": asdict(size), "rounds": options.rounds_of(size)},
            world_size=1,
            program="bench.checkpoint.rank",
        )
        rows.append({"size": size.name, **row})
        claims += claims_of(size, row)
        print(f"saving {size.name}:", row, flush=True)
    return rows, claims


def run(rank: Rank, *, size: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """One rank's part."""
    shape = Size(**size)
    spec = shape.spec()
    state = noisy_state(spec, mesh_of(rank, spec), rank.folder / "data")
    row = _compare(rank.folder, state, rounds=rounds, together=not shape.is_large)
    if not shape.is_large:
        with closing(_ours(state)) as ours:
            row["training"] = training.beside_upload(rank, state, ours, rounds=rounds)
    return row


def _ours(state: TrainState, copy_stream: CopyStream | None = None) -> Ours:
    """As a worker has it that is alone on this machine, unless a copy_stream is given."""
    copy_stream = copy_stream or copy_stream_for(state.mesh.device, ranks_here=1)
    return Ours(state.named_tensors(), state.extra(1), copy_stream)


def _compare(folder: Path, state: TrainState, *, rounds: int, together: bool) -> dict[str, Any]:
    """Ours and torch's, each beside the plain copy.

    Three slots and torch's copies of a large state do not fit into memory together:
    then ours go before torch's come.
    """
    tensors = state.named_tensors()
    named = state_dict(tensors)
    nbytes = sum(tensor.nbytes for tensor in named.values())
    aside_s = _ASIDE_S * min(1.0, nbytes / _WHOLE_BYTES)
    plain = Plain(tensors)
    with _dcp(named, folder, wanted=together) as theirs:
        # What a rank waits for in the worst case: no core is free for the copy.
        with closing(_ours(state, HostCopyStream())) as ours:
            ours.guard(f"file://{folder}/guarded/job-1")
            pairs = max(rounds, _PAIRS)
            both: dict[str, Saver] = {"plain": plain, "ours": ours}
            blocked = [in_random_turns(both, pairs, _blocked_s, warm=_WARM_SLOTS)]
            delays_s = [_checksum_delay_s(ours) for _ in range(pairs)]
        # Apart from the pairs: a file of 4 GB on its way to disk disturbs whoever comes next.
        others: dict[str, Saver] = {"plain": plain, "torch_save": TorchSave(named, folder)}
        blocked.append(in_turns({**others, **theirs}, rounds, _blocked_s))
        with closing(_ours(state)) as ours:
            beside: dict[str, Saver] = {"plain": plain, "ours_beside": ours}
            blocked.append(in_random_turns(beside, pairs, _blocked_s, warm=_WARM_SLOTS))
            ours.upload_to(f"file://{folder}/uploads/job-1")
            durable = _durable(ours, folder, rounds)
            # With every core busy torch takes half a minute for 4 GB.
            loops = ("launching", "computing") if together else ("launching",)
            lost = _lost({"ours": ours, **theirs}, rounds, loops, aside_s)
    if not together:
        with _dcp(named, folder, wanted=True) as theirs:
            blocked.append(in_turns({"plain": plain, **theirs}, rounds, _blocked_s))
            for loop, found in _lost(theirs, rounds, loops, aside_s).items():
                lost[loop] |= found
    return {
        "nbytes": nbytes,
        "blocked_s": blocked,
        "checksum_delay_s": delays_s,
        "durable_s": durable,
        "lost_steps": lost,
    }


def _checksum_delay_s(ours: Ours) -> float:
    """How long damage to a slot that was just sealed would not be found."""
    ours.save()
    return ours.checksum_delay_s()


def _blocked_s(saver: Saver) -> float:
    return saver.save()


@contextmanager
def _dcp(state: dict[str, Any], folder: Path, *, wanted: bool) -> Iterator[dict[str, Saver]]:
    """torch's two ways, if they are wanted now."""
    if not wanted:
        yield {}
        return
    thread = Dcp(state, folder / "thread", "thread")
    process = Dcp(state, folder / "process", "process")
    yield {"dcp_thread": thread, "dcp_process": process}
    thread.close()
    process.close()


def _durable(ours: Ours, folder: Path, rounds: int) -> Turns:
    """From the seal to the checkpoint that exists, beside plain writes of the same bytes."""
    found: Turns = {"ours": [], **{f"raw_{threads}": [] for threads in RAW_THREADS}}
    path = folder / "raw"
    for number in range(_WARM_SLOTS + rounds):
        ours.save()
        ours.stager.finish()
        sealed_s = time.time()
        took = {"ours": ours.durable_at_s() - sealed_s}
        for threads in RAW_THREADS:
            os.sync()
            with ours.saved() as saved:
                took[f"raw_{threads}"] = write_past_cache(path, saved, threads)
            path.unlink()
        os.sync()
        if number >= _WARM_SLOTS:
            for name, seconds in took.items():
                found[name].append(seconds)
    return found


def _lost(
    savers: dict[str, Saver], rounds: int, names: tuple[str, ...], aside_s: float
) -> dict[str, Turns]:
    """Steps that each kind of loop loses to each way of saving."""
    loops: dict[str, Callable[[], Loop]] = {
        "launching": Launching,
        "computing": partial(Computing, len(os.sched_getaffinity(0))),
    }
    found = {}
    for name in names:
        loop = loops[name]()
        found[name] = in_turns(
            savers, min(rounds, _LOSS_ROUNDS), partial(steps_lost, loop, aside_s)
        )
    return found
