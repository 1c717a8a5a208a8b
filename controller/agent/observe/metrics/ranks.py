"""Where the time of each rank goes, from its black box.

Counters, so that any window can be asked for: the rate of a phase over the rate
of steps is its mean time per step. A rank that is started anew begins at zero.
Only a node's own ranks are here, so that no page has ten thousand of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from prometheus_client.core import Metric

from controller.agent.observe.metrics.reading import RankReading
from controller.agent.workers.worker import Worker
from controller.families import Counter, Family, Gauge, Info
from outlast.blackbox import Op, Phase, Reader

_BY_RANK = ("job_id", "rank", "stage")

STEP = Gauge("outlast_rank_step", "Last step that the rank completed", _BY_RANK)
PHASE = Info(
    "outlast_rank_phase_info", "The phase that the rank is in, as a label", (*_BY_RANK, "phase")
)
IN_OPERATION = Gauge(
    "outlast_rank_in_operation",
    "1 while the rank is inside an operation with others: of ranks that hang, one that is not "
    "holds up those that are",
    _BY_RANK,
)
SEQUENCE = Gauge(
    "outlast_rank_last_op_sequence", "Number of its last operation within its group", _BY_RANK
)
PHASES = Counter(
    "outlast_rank_phase_seconds_total",
    "Time in each phase of its steps; checkpoint is the stall of stage 1, garbage_collection that "
    "of Python's collector",
    (*_BY_RANK, "phase"),
)
OPERATIONS = Counter(
    "outlast_rank_communication_seconds_total",
    "Time within a phase that was spent in operations of a group, waiting for peers included",
    (*_BY_RANK, "phase", "group"),
)
WORK = Counter(
    "outlast_rank_work_seconds_total",
    "Time of forward and backward that was not spent in operations: the rank's own work",
    _BY_RANK,
)
COMPUTE = Counter(
    "outlast_rank_compute_seconds_total",
    "Time in forward and in backward passes, what they waited for others left out",
    (*_BY_RANK, "direction"),
)
HIDDEN = Counter(
    "outlast_rank_communication_hidden_seconds_total",
    "Time that messages of a group were under way while the rank did something else; what it "
    "waited for is in outlast_rank_communication_seconds_total",
    (*_BY_RANK, "group"),
)
SENT = Counter(
    "outlast_rank_sent_bytes_total", "Sent to the other ranks of a group", (*_BY_RANK, "group")
)
PIPELINE = Counter(
    "outlast_rank_pipeline_seconds_total",
    "Time of the pipeline's actions (busy), and of what they waited for in between (waiting); "
    "what a rank idles after its last action is in neither. The bubble is 1 - sum(busy) / (ranks "
    "x the largest busy + waiting of a rank)",
    (*_BY_RANK, "state"),
)
BUBBLE = Gauge(
    "outlast_rank_expected_bubble_ratio", "The bubble that its schedule has in theory", _BY_RANK
)
DATA_WAIT = Counter(
    "outlast_rank_data_wait_seconds_total",
    "Time that the rank stood still because its batch was not read yet",
    _BY_RANK,
)
DATA_WAITS = Counter(
    "outlast_rank_data_waits_total", "Steps in which the rank waited for its batch", _BY_RANK
)
MEMORY = Gauge(
    "outlast_rank_memory_peak_bytes",
    "Most memory the rank has used on its device; on a CPU, by how much the process has grown",
    _BY_RANK,
)
EXPECTED_MEMORY = Gauge(
    "outlast_rank_expected_memory_bytes", "The same as `outlast plan` estimates it", _BY_RANK
)
FAMILIES: tuple[Family, ...] = (
    *(STEP, PHASE, IN_OPERATION, SEQUENCE),
    *(PHASES, OPERATIONS, WORK, COMPUTE, HIDDEN, SENT),
    *(PIPELINE, BUBBLE, DATA_WAIT, DATA_WAITS, MEMORY, EXPECTED_MEMORY),
)


def read(workers: Iterable[Worker]) -> tuple[RankReading, ...]:
    """What the boxes of these workers say now; call it where the workers are looked after."""
    found = (worker.look(partial(_read, worker)) for worker in workers)
    return tuple(reading for reading in found if reading is not None)


def _read(worker: Worker, box: Reader) -> RankReading:
    present = box.present()
    return RankReading(
        job_id=worker.job_id,
        rank=worker.rank,
        stage=worker.stage,
        completed_step=present.completed_step,
        phase=present.phase,
        is_in_operation=present.op is not Op.NONE and present.op_left_ns == 0,
        op_seq=present.op_seq,
        time_use=box.time_use(),
        step_use=box.step_use(),
        expected=box.expected(),
    )


def collect(ranks: Sequence[RankReading]) -> Iterator[Metric]:
    """The families of this subject."""
    named = [((rank.job_id, str(rank.rank), str(rank.stage)), rank) for rank in ranks]
    yield STEP.of((labels, rank.completed_step) for labels, rank in named)
    yield PHASE.of((*labels, rank.phase.name.lower()) for labels, rank in named)
    yield IN_OPERATION.of((labels, rank.is_in_operation) for labels, rank in named)
    yield SEQUENCE.of((labels, rank.op_seq) for labels, rank in named)
    yield PHASES.of(
        ((*labels, phase.name.lower()), seconds)
        for labels, rank in named
        for phase, seconds in rank.time_use.phases_s.items()
    )
    yield OPERATIONS.of(
        ((*labels, phase.name.lower(), group.name.lower()), seconds)
        for labels, rank in named
        for (phase, group), seconds in rank.time_use.operations_s.items()
    )
    yield WORK.of((labels, _own_work_s(rank)) for labels, rank in named)
    yield from _step_use(named)


def _step_use(named: Sequence[tuple[tuple[str, str, str], RankReading]]) -> Iterator[Metric]:
    used = [(labels, rank.step_use) for labels, rank in named]
    yield COMPUTE.of(
        ((*labels, direction), ns / 1e9)
        for labels, use in used
        for direction, ns in (("forward", use.forward_ns), ("backward", use.backward_ns))
    )
    yield HIDDEN.of(
        ((*labels, group.name.lower()), ns / 1e9)
        for labels, use in used
        for group, ns in use.hidden_ns.items()
    )
    yield SENT.of(
        ((*labels, group.name.lower()), num_bytes)
        for labels, use in used
        for group, num_bytes in use.sent_bytes.items()
    )
    yield PIPELINE.of(
        ((*labels, state), ns / 1e9)
        for labels, use in used
        for state, ns in (("busy", use.busy_ns), ("waiting", use.waited_ns))
    )
    yield DATA_WAIT.of((labels, use.data_wait_ns / 1e9) for labels, use in used)
    yield DATA_WAITS.of((labels, use.data_waits) for labels, use in used)
    yield MEMORY.of((labels, use.peak_memory_bytes) for labels, use in used)
    expected = [(labels, rank.expected) for labels, rank in named]
    yield BUBBLE.of((labels, found.bubble) for labels, found in expected if found)
    yield EXPECTED_MEMORY.of((labels, found.memory_bytes) for labels, found in expected if found)


def _own_work_s(rank: RankReading) -> float:
    use = rank.time_use
    computing = Phase.FORWARD_BACKWARD
    waited_s = sum(s for (phase, _), s in use.operations_s.items() if phase is computing)
    return max(0.0, use.phases_s.get(computing, 0.0) - waited_s)
