"""Whether MegaScale's changes of the algorithm cost loss: a small GPT, real text, equal tokens.

The serial and the parallel block, full and sliding-window attention, both changes together; AdamW,
and LAMB with four times the batch, beside AdamW with that batch. Each is one rank of the production
loop, with a core of its own, over the text of Python's standard library as bytes. Learning rates
are one for each optimizer and batch: the best of a few at an eighth of the tokens (`--sweep`), for
AdamW with the usual batch the best of the baseline.

Source: Jiang et al., MegaScale (arXiv 2402.15627), section 3.1 and figure 10.

    python -m bench.convergence [--tokens 3000000] [--seeds 2] [--sweep]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.results import Claim, write
from bench.trainer.ours import Ours
from outlast.spec.parse import parse_spec

_HOW = "python -m bench.convergence"
_SEQ_LEN = 256
_BATCH = 8
# Of a run, how often the held-out loss is taken.
_NUM_EVALS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs from the baseline: sections of the spec, and the learning rate."""

    name: str
    lr: float
    model: Mapping[str, Any]
    optimizer: str = "adamw"
    times_batch: int = 1

    def spec(self, tokens: int, seed: int) -> dict[str, Any]:
        """A job of one rank that trains on so many tokens."""
        batch = _BATCH * self.times_batch
        steps = max(_NUM_EVALS, tokens // (batch * _SEQ_LEN))
        return {
            "name": "convergence",
            "seed": seed,
            "steps": steps,
            "model": {"layers": 4, "hidden": 128, "heads": 4, "seq_len": _SEQ_LEN, **self.model},
            "parallel": {"micro_batch": _BATCH},
            "data": {"global_batch": batch},
            "optimizer": {
                "name": self.optimizer,
                "lr": self.lr,
                "weight_decay": 0.1,
                "schedule": {"name": "cosine", "warmup_steps": max(1, steps // 20)},
            },
            # As many sequences whatever the batch is.
            "eval": {
                "interval_steps": steps // _NUM_EVALS,
                "batches": 8 // self.times_batch,
            },
        }


_WINDOW = {"window": 64}
_PARALLEL = {"block": "parallel"}
BASELINE = "serial, full attention, AdamW"
BIG_ADAMW, LAMB = "AdamW, 4 x batch", "LAMB, 4 x batch"
VARIANTS = (
    Variant(name=BASELINE, lr=1e-3, model={}),
    Variant(name="parallel block", lr=1e-3, model=_PARALLEL),
    Variant(name="window of 64", lr=1e-3, model=_WINDOW),
    Variant(name="parallel block, window of 64", lr=1e-3, model={**_PARALLEL, **_WINDOW}),
    Variant(name=BIG_ADAMW, lr=8e-3, model={}, times_batch=4),
    Variant(name=LAMB, lr=4e-2, model={}, optimizer="lamb", times_batch=4),
)
_RATES = (0.5, 1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3_000_000, help="that each run trains on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="only try learning rates")
    given = parser.parse_args()
    if given.sweep:
        _sweep(given.tokens // 8)
        return
    work = [(each, given.tokens, seed) for seed in range(given.seeds) for each in VARIANTS]
    rows = []
    for row in _trained(work):
        rows.append(row)
        print(f"{row['variant']}, seed {row['seed']}: {row['held_out'][-1]:.4f}", flush=True)
    write("convergence", rows, _claims(rows))


def _sweep(tokens: int) -> None:
    """Print what a few learning rates come to."""
    work = [
        (replace(each, lr=each.lr * factor), tokens, 0) for each in VARIANTS for factor in _RATES
    ]
    for row in _trained(work):
        print(f"{row['variant']}, lr {row['lr']:g}: {row['held_out'][-1]:.4f}", flush=True)


def _trained(work: Sequence[tuple[Variant, int, int]]) -> Iterator[dict[str, Any]]:
    """A row for each run, as many at once as there are cores."""
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores, maxtasksperchild=1) as pool:
        yield from pool.imap(_train, work)


def _train(work: tuple[Variant, int, int]) -> dict[str, Any]:
    """One run: the held-out loss against the tokens trained on."""
    variant, tokens, seed = work
    torch.set_num_threads(1)
    document = variant.spec(tokens, seed)
    trained, losses, held_out = [], [], []
    interval, recent, seen = document["eval"]["interval_steps"], [], 0
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        ours = Ours(parse_spec(document), folder=Path(name))
        for step in range(1, document["steps"] + 1):
            # Of evaluations it prints a line each.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                ours.step(step)
            (record,) = ours.box.new_steps()
            seen += record.tokens
            recent.append(record.loss)
            if step % interval == 0 and record.eval_loss is not None:
                trained.append(seen)
                losses.append(statistics.fmean(recent))
                held_out.append(record.eval_loss)
                recent = []
    return {
        "variant": variant.name,
        "seed": seed,
        "lr": variant.lr,
        "tokens": trained,
        "training": losses,
        "held_out": held_out,
        "parameters": ours.num_parameters,
    }


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """The last held-out loss of each, over that of what it takes the place of: LAMB's over AdamW's
    with the same batch, too."""
    last = {
        name: statistics.fmean(row["held_out"][-1] for row in rows if row["variant"] == name)
        for name in dict.fromkeys(row["variant"] for row in rows)
    }
    num_seeds = len({row["seed"] for row in rows})
    how = f"{_HOW}; mean of {num_seeds} seeds, which differ by up to {_spread(rows):.1%}"

    def claim(name: str, of: str, goal: str) -> Claim:
        return Claim(
            claim=f"held-out loss, {name}, over {of}",
            value=last[name] / last[of],
            unit="x",
            goal=goal,
            baseline=f"{of}: {last[of]:.4f} nats per byte",
            how=how,
        )

    others = [name for name in last if name not in (BASELINE, BIG_ADAMW)]
    return [
        *(claim(name, BASELINE, "<= 1.02") for name in others),
        claim(BIG_ADAMW, BASELINE, "reported"),
        claim(LAMB, BIG_ADAMW, "<= 1.02"),
    ]


def _spread(rows: list[dict[str, Any]]) -> float:
    """Between the best and the worst seed of a variant, at most."""
    ends: dict[str, list[float]] = {}
    for row in rows:
        ends.setdefault(row["variant"], []).append(row["held_out"][-1])
    return max((max(each) - min(each)) / statistics.fmean(each) for each in ends.values())


if __name__ == "__main__":
    main()
