"""One loader for all ranks of a node beside one in each rank, at 8 ranks; and preparing tokens.

Eight processes take the same steps of the same token file, each computing for a while in between,
once with a loader of their own and once through the node's; the classes are those that jobs run.
Measured are the batches that are read, CPU seconds of all processes and their memory. Then the
demo's job trains without faults, and each rank's black box says in how many steps it waited.
Making tokens, and orders of samples, are in `bench.preparing`.

    python -m bench.data [--steps 40] [--rounds 3]
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench import preparing
from bench.recovery.ours import controller
from bench.results import Claim, write
from outlast import local_socket
from outlast.blackbox import Reader
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from trainer.data.loader import Loader, Source, Split
from trainer.data.node import NodeLoader, NodeSource, SplitId
from trainer.data.serving import Server
from trainer.data.step_batch import Memory, Parts, StepBatch, Wanted
from trainer.worker.feeding import open_splits

RANKS = 8
# Tensor-parallel ranks share a batch, replicas do not, and of four stages two read nothing.
LAYOUTS = ({"tp": 8}, {"tp": 2, "dp": 4}, {"dp": 8}, {"tp": 2, "pp": 4})
COMPUTE_S = 0.1
# 256 MiB of uint16, mapped by all.
NUM_TOKENS = 2**27
CORPUS_BYTES = 64 * 2**20
DEMO_DEADLINE_S = 900.0
_FORK = get_context("fork")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        tokens = folder / "tokens.npy"
        num_tokens = 2**20 if options.small else NUM_TOKENS
        generator = np.random.default_rng(0)
        np.save(tokens, generator.integers(0, 50_000, num_tokens, dtype=np.uint16))
        for _, layout, mode in product(range(options.rounds), LAYOUTS, ("rank", "node")):
            rows.append(_measure(folder, tokens, layout, mode, options.steps))
            print(_in_words(rows[-1]), flush=True)
        demo = _demo(folder, steps=20 if options.small else None)
        num_bytes = 2**20 if options.small else CORPUS_BYTES
        made = preparing.preparing(folder, rounds=options.rounds, num_bytes=num_bytes)
        made += preparing.orders()
    claims = [*_claims(rows), _of(demo), *preparing.claims(made)]
    write("data-part" if options.small else "data", [*rows, demo, *made], claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a process does."""

    spec: JobSpec
    folder: Path
    socket: Path | None
    steps: int


class _Counting(Split):
    """A split that counts what is read of it."""

    def __init__(self, inner: Split) -> None:
        self._inner = inner
        self.num_micro_batches = inner.num_micro_batches
        self.num_reads = 0

    def read(
        self,
        step: int,
        replica: int,
        parts: Parts,
        *,
        allocate: Callable[[int], Memory] = bytearray,
    ) -> StepBatch:
        self.num_reads += 1
        return self._inner.read(step, replica, parts, allocate=allocate)


def _measure(
    folder: Path, tokens: Path, layout: dict[str, int], mode: str, steps: int
) -> dict[str, Any]:
    """A row: all ranks of a layout take so many steps."""
    spec = parse_spec(
        {
            "name": "data",
            "steps": steps + 1,
            "model": {"layers": 4, "heads": 8, "vocab_size": 50_000, "seq_len": 4096},
            "parallel": {**layout, "micro_batch": 1},
            # So that each replica has eight micro-batches.
            "data": {"tokens": str(tokens), "global_batch": 8 * layout.get("dp", 1)},
        }
    )
    path = folder / "data.sock"
    place = _Place(spec=spec, folder=folder, socket=path if mode == "node" else None, steps=steps)
    barrier, done = _FORK.Barrier(RANKS), _FORK.Event()
    loader = []
    with local_socket.listen(path) as listening:
        if mode == "node":
            loader = [_Child(lambda say: _serve(place, listening, say))]
        ranks = [_Child(partial(_rank, place, rank, barrier, done)) for rank in range(RANKS)]
        found = [each.hear() for each in ranks]
        for each in loader:
            os.kill(each.pid, signal.SIGTERM)
        found += [each.hear() for each in loader]
        done.set()
        for each in (*ranks, *loader):
            each.join()
    return {
        "layout": "·".join(f"{axis}{size}" for axis, size in layout.items()),
        "loader": mode,
        "steps": steps,
        "batches_read": sum(each["reads"] for each in found),
        "memory_bytes": sum(each["memory_bytes"] for each in found),
        "cpu_s": sum(each["cpu_s"] for each in found),
        "loader_cpu_s": sum(each["cpu_s"] for each in found[RANKS:]),
        "steps_waited": sum(each["waits"] for each in found[:RANKS]),
        "wait_s": sum(each["wait_s"] for each in found[:RANKS]),
    }


class _Child:
    """A forked process with something to say at its end."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self._hear, say = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=work, args=(say,))
        process.start()
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = self._hear.recv()
        return found

    def join(self) -> None:
        self._process.join()


def _rank(place: _Place, rank: int, barrier: Barrier, done: Event, say: Connection) -> None:
    """Take the steps as a rank does: the next one is asked for while this one computes."""
    spec = place.spec
    at = spec.layout.coordinate(rank)
    own = _Counting(open_splits(spec, place.folder).train)
    source: Source = own
    if place.socket is not None:
        source = NodeSource(NodeLoader(place.socket, start_s=60.0), SplitId.TRAIN, own)
    loader = Loader(
        source,
        replica=at.dp,
        device=torch.device("cpu"),
        wanted=Wanted(tokens=at.pp == 0, targets=at.pp == spec.parallel.loss_stage, starts=False),
    )
    loader.micro_batches(1)
    own.num_reads, waits, waited_ns, memory = 0, 0, 0, 0
    barrier.wait()
    began_s = time.process_time()
    loader.prepare(2)
    for step in range(2, place.steps + 2):
        time.sleep(COMPUTE_S)
        batches = loader.micro_batches(step)
        waits += loader.last_wait_ns > 0
        waited_ns += loader.last_wait_ns
        if step <= place.steps:
            loader.prepare(step + 1)
        memory = max(memory, _memory_bytes())
        assert len(batches) == 8
        barrier.wait()
    cpu_s = time.process_time() - began_s
    say.send(
        {
            "reads": own.num_reads,
            "memory_bytes": memory,
            "cpu_s": cpu_s,
            "waits": waits,
            "wait_s": waited_ns / 1e9,
        }
    )
    loader.close()
    # While others are measured: pages that they share with this process are counted in parts.
    done.wait()


def _serve(place: _Place, listening: socket.socket, say: Connection) -> None:
    """Be the node's loader until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    split = _Counting(open_splits(place.spec, place.folder).train)
    server = Server(
        listening,
        {SplitId.TRAIN: split},
        steps_ahead=place.spec.data.steps_ahead,
        last_steps={SplitId.TRAIN: place.spec.steps},
    )
    began_s = time.process_time()
    try:
        server.serve()
    finally:
        cpu_s = time.process_time() - began_s
        # The first step of each replica is not measured in ranks either.
        reads = split.num_reads - place.spec.parallel.dp
        say.send({"reads": reads, "memory_bytes": _memory_bytes(), "cpu_s": cpu_s})


def _memory_bytes() -> int:
    """This process's share of what it has written and shares with others, files left out."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    kilobytes = sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return kilobytes * 1024


def _demo(folder: Path, steps: int | None) -> dict[str, Any]:
    """A row: the demo's job without its faults, on nodes of its own."""
    text = importlib.resources.files("outlast.cli").joinpath("templates/gpt-tiny.yaml").read_text()
    document = yaml.safe_load(text)
    document["resources"]["standby"] = 0
    document["steps"] = document["steps"] if steps is None else steps
    spec = parse_spec(document)
    per_node = spec.workers_per_node
    state_dir = folder / "demo"
    with controller(state_dir, nodes=spec.layout.world_size // per_node, workers=per_node) as job:
        job_id = job.submit(document).job_id
        deadline_s = time.monotonic() + DEMO_DEADLINE_S
        while (state := job.get(job_id)[0].state) != "SUCCEEDED":
            assert state != "FAILED", "the demo's job failed"
            assert time.monotonic() < deadline_s, f"the demo's job is {state}"
            time.sleep(1.0)
        boxes = [
            Reader(path) for path in sorted(state_dir.glob(f"nodes/*/jobs/{job_id}/a1/*.blackbox"))
        ]
    uses = [box.step_use() for box in boxes]
    return {
        "layout": "demo",
        "ranks": len(uses),
        "steps": spec.steps,
        # Of each rank, the first step is the start's.
        "steps_waited": sum(max(0, use.data_waits - 1) for use in uses),
        "steps_waited_with_first": sum(use.data_waits for use in uses),
        "wait_s": sum(use.data_wait_ns for use in uses) / 1e9,
    }


def _in_words(row: dict[str, Any]) -> str:
    return (
        f"{row['layout']}, loader of each {row['loader']}: {row['batches_read']} batches read, "
        f"{row['cpu_s']:.2f} CPU s, {row['memory_bytes'] / 2**20:.0f} MiB, "
        f"{row['steps_waited']} steps waited"
    )


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Ratios of both, layout by layout; medians over the rounds."""
    claims = []
    what = {"batches_read": "reads", "cpu_s": "CPU", "memory_bytes": "memory"}
    for layout in dict.fromkeys(row["layout"] for row in rows):
        for field, name in what.items():
            of = {
                mode: statistics.median(
                    row[field] for row in rows if (row["layout"], row["loader"]) == (layout, mode)
                )
                for mode in ("rank", "node")
            }
            claims.append(
                Claim(
                    claim=f"{name}_of_one_loader_per_node_{layout}",
                    value=of["node"] / of["rank"],
                    unit="x",
                    goal="< 1 where ranks share a batch",
                    baseline="a loader in each of 8 ranks",
                    how=f"medians; {of['node']:.4g} against {of['rank']:.4g}",
                )
            )
    return claims


def _of(demo: dict[str, Any]) -> Claim:
    return Claim(
        claim="demo_steps_that_waited_for_data",
        value=demo["steps_waited"],
        unit="steps",
        goal="0",
        baseline=f"{demo['steps']} steps of {demo['ranks']} ranks, without the first of each",
        how=f"black boxes; {demo['wait_s']:.3g} s in all, the first steps included",
    )


if __name__ == "__main__":
    main()
