"""Fleets and their jobs, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from controller.core.capacity import Capacity, NodeNeed
from controller.sim.attempt import DEFAULT_MODES, SimJob
from controller.sim.world import Shape, make_plan, make_size
from outlast.ids import JobId

# Of seeds, those whose jobs have `recovery.elastic` and need nearly the whole fleet.
ELASTIC_SHARE = 0.2
# Of seeds, those whose jobs have succeeded only when their last checkpoint is stored.
LAST_CHECKPOINT_SHARE = 0.5
# Of seeds, those whose nodes differ in what they have, with jobs that do not fit all of them.
MISFIT_SHARE = 0.2
# Of jobs, those with `checkpoint.replicas`; of these, those whose data-parallel ranks all hold
# the same, so that nothing needs to be copied.
REPLICAS_SHARE = 0.4
# Of jobs, those that run a script; of these, those that have no `outlast.session`.
SCRIPT_SHARE = 0.3
SILENT_SHARE = 0.5
TWINS_SHARE = 0.25
_GIB = 1 << 30
_SMALL = Capacity(cpus=8, memory_bytes=64 * _GIB, host_memory_bytes=32 * _GIB)
_LARGE = Capacity(
    gpus=8,
    gpu_model="H100",
    gpu_memory_bytes=80 * _GIB,
    cpus=96,
    memory_bytes=2048 * _GIB,
    host_memory_bytes=1024 * _GIB,
)
_HUGE = replace(_LARGE, memory_bytes=8192 * _GIB, host_memory_bytes=4096 * _GIB)


def draw_shape(random: Random) -> Shape:
    """A fleet and one to three jobs that fit into it."""
    num_nodes = random.randint(32, 48)
    workers_per_node = random.choice((1, 2, 2, 4))
    jobs = []
    for number in range(random.randint(1, 3)):
        job_id = JobId(f"job{number + 1}")
        hours = random.uniform(4.0, 22.0)
        step_s = random.uniform(2.0, 30.0)
        total_steps = int(hours * 3600 / step_s)
        plan = make_plan(
            random, random.choice((1, 2, 3, 4, 5, 8, 12)), workers_per_node, total_steps
        )
        jobs.append(
            SimJob(
                job_id=job_id,
                plan=plan,
                step_s=step_s,
                restore_s=random.uniform(2.0, 60.0),
                commit_every=max(1, int(random.uniform(600.0, 2400.0) / step_s)),
                upload_s=random.uniform(5.0, 120.0),
                error_step=random.randrange(1, total_steps) if random.random() < 0.1 else None,
            )
        )
    provisions = random.random() < 0.5
    if random.random() < ELASTIC_SHARE:
        _make_elastic(random, jobs, num_nodes)
    if random.random() < LAST_CHECKPOINT_SHARE:
        for job in jobs:
            last_checkpoint_s = random.choice((60.0, 600.0, 7200.0))
            job.plan = replace(job.plan, last_checkpoint_s=last_checkpoint_s)
    shape = Shape(
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        jobs=tuple(jobs),
        provisions=provisions,
    )
    if random.random() < MISFIT_SHARE:
        shape = _with_misfits(random, shape)
    for job in shape.jobs:
        job.modes = _draw_modes(random)
    _draw_workloads(random, shape.jobs)
    return replace(shape, rack_nodes=random.choice((0, 1, 3, 8)))


def _draw_workloads(random: Random, jobs: Sequence[SimJob]) -> None:
    """Which jobs keep copies on other nodes, and which run a script."""
    keep_copies = []
    for job in jobs:
        if random.random() < REPLICAS_SHARE:
            job.copy_steps = random.choice((1, 1, 2, 3))
            keep_copies.append((job, random.random() >= TWINS_SHARE))
    for job in jobs:
        if random.random() < SCRIPT_SHARE:
            make_script(job, is_silent=random.random() < SILENT_SHARE)
    for job, dp_is_sharded in keep_copies:
        if not job.is_silent:
            job.keep_copies(dp_is_sharded=dp_is_sharded)


def make_script(job: SimJob, *, is_silent: bool) -> None:
    """As `convert.plan_of` has it: it cannot be told to leave out batches, or to store its end."""
    job.script_steps, job.is_silent = job.plan.total_steps, is_silent
    job.plan = replace(job.plan, total_steps=None, last_checkpoint_s=0.0)
    job.modes = {**job.modes, "spike": "log", "non_finite": "log"}


def _draw_modes(random: Random) -> dict[str, str]:
    """What a job's detectors do; those of which the figures of steps say something."""
    return {
        **DEFAULT_MODES,
        "non_finite": random.choice(("act", "act", "log")),
        "spike": random.choice(("log", "log", "act")),
        "slowdown": random.choice(("log", "log", "act")),
    }


def _with_misfits(random: Random, shape: Shape) -> Shape:
    """Two kinds of nodes in two racks, and a job that fits few or none of them.

    What it needs may be known beforehand or be found out when it starts.
    """
    capacities = tuple(
        replace(random.choice((_SMALL, _LARGE)), topology=f"block/rack-{number % 2}")
        for number in range(shape.num_nodes)
    )
    memory_bytes = random.choice((100, 2000)) * _GIB
    is_known = random.random() < 0.5
    plan = make_plan(random, random.choice((1, 2, 4)), shape.workers_per_node, 100)
    if is_known and memory_bytes < _LARGE.host_memory_bytes:
        plan = replace(plan, need=NodeNeed(gpus=1, host_memory_bytes=memory_bytes))
    misfit = SimJob(
        job_id=JobId("misfit"),
        plan=plan,
        step_s=10.0,
        restore_s=5.0,
        commit_every=50,
        upload_s=5.0,
        memory_bytes=memory_bytes,
    )
    return replace(shape, jobs=(*shape.jobs, misfit), capacities=capacities, later_capacity=_HUGE)


def _make_elastic(random: Random, jobs: list[SimJob], num_nodes: int) -> None:
    """All jobs may shrink, and the last one takes what the fleet has left."""
    *others, last = jobs
    left = num_nodes - sum(job.plan.nodes for job in others)
    last.plan = replace(last.plan, nodes=left, standby=0)
    for job in jobs:
        most = job.plan.nodes
        numbers = sorted({most, *(max(1, most - cut) for cut in (1, 2, most // 2))}, reverse=True)
        job.plan = replace(
            job.plan,
            sizes=tuple(map(make_size, numbers)),
            shrink_after_s=random.choice((0.0, 60.0, 600.0)),
            grow_after_s=random.choice((0.0, 300.0, 3600.0)),
        )
