"""What a rank's notes cost it: by event, and as a share of a step of the trainer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.member import Rank, serve
from bench.trainer.launch import run_ranks
from bench.trainer.ours import Ours
from bench.trainer.shape import Shape
from outlast.blackbox import Group, Op, Pass, Phase, SpanRecord, StepRecord, StepUse, Writer

_EVENTS = 20_000
_ROUNDS = 5
# As many operations for so little work as any layout has: both kinds of parallelism, and chunks.
_SHAPE = Shape(
    layers=8, hidden=512, heads=8, seq_len=512, batch=8, micro_batches=8, tp=2, pp=2,
    schedule="interleaved", virtual_stages=2,
)  # fmt: skip
_STEPS = 4
_STEP = StepRecord(
    step=1, loss=1.0, grad_norm=1.0, learning_rate=1e-3, tokens=8, start_ns=1, end_ns=2,
    eval_loss=None,
)  # fmt: skip
_PASS = SpanRecord(
    phase=Phase.FORWARD_BACKWARD, work=Pass.FORWARD, start_ns=1, end_ns=2, waited_ns=0
)
_USE = StepUse(forward_ns=1, hidden_ns=dict.fromkeys(Group, 1), sent_bytes=dict.fromkeys(Group, 1))


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """Nanoseconds of each kind of event, and how many a step of rank 0 has."""
    event_ns = _event_ns(folder / "box")
    shape = _SHAPE.smaller() if small else _SHAPE
    step = run_ranks(
        "steps",
        {"shape": shape.document(), "steps": 2 if small else _STEPS},
        world_size=shape.world_size,
        program="bench.observe.boxes",
    )
    noted_ns = sum(number * event_ns[kind] for kind, number in step["events"].items())
    return {
        "event_ns": event_ns,
        "layout": shape.name,
        **step,
        "share_of_step": noted_ns / 1e9 / step["step_s"],
    }


def _event_ns(path: Path) -> dict[str, float]:
    """The medians of several rounds, without what calling something takes."""
    box = Writer(path, rank=0, world_size=1, attempt=1)

    def operation() -> None:
        box.enter(Op.ALL_REDUCE, Group.DP)
        box.leave()

    kinds: Mapping[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "operation": operation,
        "pass": lambda: box.add_span(_PASS),
        "phase": lambda: box.phase(Phase.FORWARD_BACKWARD),
        "step": lambda: box.completed(_STEP),
        "use": lambda: box.used(_USE),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(_ROUNDS):
        for kind, note in kinds.items():
            begun_ns = time.perf_counter_ns()
            for _ in range(_EVENTS):
                note()
            found[kind].append((time.perf_counter_ns() - begun_ns) / _EVENTS)
    box.close()
    nothing_ns = statistics.median(found.pop("nothing"))
    return {kind: statistics.median(each) - nothing_ns for kind, each in found.items()}


def steps(rank: Rank, *, shape: dict[str, Any], steps: int) -> dict[str, Any]:
    """How long rank 0's step takes, and what it notes in one."""
    ours = Ours.on(rank, Shape(**shape))
    times = []
    for number in range(steps + 1):
        took_s = rank.timed(lambda: ours.step(number))  # noqa: B023  # used at once
        # The first step allocates and connects.
        if number > 0:
            times.append(took_s)
    reader = ours.box
    *_, last = reader.new_steps()
    within = range(last.start_ns, last.end_ns)
    operations = sum(each.start_ns in within for each in reader.ops())
    spans = [each for each in reader.spans() if each.start_ns in within]
    passes = sum(each.work is not Pass.NONE for each in spans)
    return {
        "step_s": statistics.median(times),
        "events": {
            "operation": operations,
            "pass": passes,
            # Its checkpoint begins behind it.
            "phase": len(spans) - passes + 1,
            "step": 1,
            "use": 1,
        },
    }


if __name__ == "__main__":
    serve({"steps": steps}, pinned=True)
