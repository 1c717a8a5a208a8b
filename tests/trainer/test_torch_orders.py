"""Our schedules compute in the order of torch.distributed.pipelining's.

torch's orders are asked of its own functions in another process, since the
import pulls in its compiler, and without running a pipeline.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from trainer.core.schedule import ActionKind, Schedule, build

# (p, v, m): every m that torch accepts, also some that p does not divide.
SINGLE = [(p, 1, m) for p in (1, 2, 3, 4, 8) for m in (8, 9, 16)]
INTERLEAVED = [
    (p, v, m) for p in (2, 3, 4, 8) for v in (2, 3) for m in range(1, 25) if m % max(1, m // p) == 0
]

# `object.__new__` goes past constructors that want stages on a process group. The plain
# schedules run with a stage that only writes down what it should compute: the order that
# torch prints for its 1F1B counts micro-batches wrongly on the last stage.
_ASK = """
import json, sys
from unittest.mock import MagicMock
from torch.distributed.pipelining import ScheduleInterleaved1F1B, Schedule1F1B, ScheduleGPipe

def single(kind, stage, p, m):
    found = []
    schedule = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches, schedule.scale_grads = p, m, False
    schedule._check_inputs = lambda *inputs: ([None] * m, [None] * m)
    for part in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, part, MagicMock())
    schedule._stage = MagicMock(stage_index=stage)
    for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(schedule._stage, f"get_{way}_ops").return_value = []
    schedule._stage.forward_one_chunk = (
        lambda number, *_, **__: found.append(("forward", stage, number))
    )
    schedule._stage.backward_one_chunk = (
        lambda number, **__: found.append(("backward", stage, number))
    )
    schedule._step_microbatches()
    return found

def interleaved(rank, p, v, m):
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    return [
        (names[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in schedule._calculate_single_rank_operations(rank)
        if action is not None
    ]

asked = json.load(sys.stdin)
found = {
    "gpipe": [[single(ScheduleGPipe, s, p, m) for s in range(p)] for p, _, m in asked["gpipe"]],
    "1f1b": [[single(Schedule1F1B, s, p, m) for s in range(p)] for p, _, m in asked["1f1b"]],
    "interleaved": [
        [interleaved(s, p, v, m) for s in range(p)] for p, v, m in asked["interleaved"]
    ],
}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def orders() -> dict[str, list[Any]]:
    asked = {"gpipe": SINGLE, "1f1b": SINGLE, "interleaved": INTERLEAVED}
    answer = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, list[Any]] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_order_is_that_of_torch(orders: dict[str, list[Any]], name: str) -> None:
    cases = INTERLEAVED if name == "interleaved" else SINGLE
    assert len(orders[name]) == len(cases)
    for (p, v, m), expected in zip(cases, orders[name], strict=True):
        assert _plain(build(name, p, m, num_chunks=v)) == expected, (p, v, m)


def _plain(schedule: Schedule) -> list[list[list[object]]]:
    """As JSON has torch's: kind, position in the model, micro-batch."""
    assert {action.kind for work in schedule.actions for action in work} == {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
    }
    return [
        [
            [action.kind.value, schedule.position(stage, action.chunk), action.micro_batch]
            for action in actions
        ]
        for stage, actions in enumerate(schedule.actions)
    ]
