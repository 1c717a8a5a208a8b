"""Write a trace of 1,000 ranks and 20 steps: `python -m tests.trace.large FILE`.

Prints the processor's time that it took and the most memory that it had, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from outlast.cli.trace import write_trace
from outlast.layout import Layout
from outlast.trace.stored import StoredRanks
from outlast.v1 import ranks_pb2

LAYOUT = Layout(tp=8, pp=5, dp=25)
STEPS, MICRO_BATCHES, RANKS_PER_NODE = 20, 2, 8
# Of each pass, two collectives of the tensor group; and of a step what replicas and all have.
TP_PER_PASS = 2
US = 1_000
STEP_US, PASS_US = 100_000, 6_000
BEGUN_NS = 1_700_000_000_000_000_000


def main() -> None:
    with StoredRanks(LAYOUT) as ranks:
        for rank in range(LAYOUT.world_size):
            ranks.put(_noted(rank))
        write_trace(ranks, LAYOUT, (), None, Path(sys.argv[1]), clocks={})
    print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Of this program. What `getrusage` says begins with the size of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


class _Rank:
    """Notes what a rank of a pipeline does in a step; the first stage begins."""

    def __init__(self, rank: int) -> None:
        self.times = ranks_pb2.RankTimes(known_since_ns=BEGUN_NS)
        self._at = LAYOUT.coordinate(rank)
        self._sequences: dict[str, int] = {}

    def step(self, number: int) -> None:
        begun_us = number * STEP_US
        backward_us = begun_us + 40_000
        for micro_batch in range(MICRO_BATCHES):
            behind_us = micro_batch * PASS_US
            down_us = begun_us + self._at.pp * PASS_US + behind_us
            up_us = backward_us + (LAYOUT.pp - 1 - self._at.pp) * PASS_US + behind_us
            self._pass("forward", micro_batch, down_us, 2 * micro_batch, self._at.pp - 1)
            self._pass("backward", micro_batch, up_us, 2 * micro_batch + 1, self._at.pp + 1)
        ended_us = begun_us + STEP_US
        self._span("forward_backward", "", -1, begun_us, ended_us - 12_000)
        self._operation("reduce_scatter", "dp", ended_us - 11_000, ended_us - 9_000)
        self._operation("all_gather", "dp", ended_us - 4_000, ended_us - 3_000)
        self._operation("all_reduce", "world", ended_us - 2_000, ended_us - 1_000)
        self._span("optimizer", "", -1, ended_us - 8_000, ended_us - 5_000)
        self.times.steps.add(step=number + 1, start_ns=_ns(begun_us), end_ns=_ns(ended_us))

    def _pass(self, work: str, micro_batch: int, at_us: int, message: int, sender: int) -> None:
        """A receive, the pass with its collectives, and the send, which is waited for later."""
        receiver = 2 * self._at.pp - sender
        if 0 <= sender < LAYOUT.pp:
            self._operation("recv", "pp", at_us - 900, at_us - 100, micro_batch, sender, message)
        for number in range(TP_PER_PASS):
            begun_us = at_us + 1_000 + 1_500 * number
            # Of a tensor group each member begins a little later than the one before.
            self._operation("all_gather", "tp", begun_us + 10 * self._at.tp, begun_us + 200)
        self._span("forward_backward", work, micro_batch, at_us, at_us + PASS_US - 1_000)
        if 0 <= receiver < LAYOUT.pp:
            left_us = at_us + PASS_US - 950
            begun_us = at_us + PASS_US + 300
            found = self._operation(
                "send", "pp", begun_us, begun_us + 50, micro_batch, receiver, message
            )
            found.departed_ns = _ns(left_us)

    def _span(self, phase: str, work: str, micro_batch: int, begun_us: int, ended_us: int) -> None:
        self.times.spans.add(
            phase=phase,
            work=work,
            micro_batch=micro_batch,
            start_ns=_ns(begun_us),
            end_ns=_ns(ended_us),
        )

    def _operation(
        self,
        op: str,
        group: str,
        begun_us: int,
        ended_us: int,
        detail: int = -1,
        peer: int | None = None,
        message: int | None = None,
    ) -> ranks_pb2.TimedOperation:
        self._sequences[group] = self._sequences.get(group, 0) + 1
        return self.times.operations.add(
            op=op,
            group=group,
            sequence=self._sequences[group],
            detail=detail,
            start_ns=_ns(begun_us),
            end_ns=_ns(ended_us),
            peer=peer,
            message=message,
        )


def _noted(rank: int) -> ranks_pb2.ReadTimesResponse:
    noted = _Rank(rank)
    for number in range(STEPS):
        noted.step(number)
    node = f"n{rank // RANKS_PER_NODE}"
    return ranks_pb2.ReadTimesResponse(node=node, rank=rank, times=noted.times)


def _ns(at_us: int) -> int:
    return BEGUN_NS + at_us * US


if __name__ == "__main__":
    main()
