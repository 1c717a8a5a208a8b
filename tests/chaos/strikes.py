"""Faults from outside: what is done to the processes of a row, and what comes after.

Only processes of the row's own cluster are touched, each by its pid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from checkpoint.core.names import memory_folder
from checkpoint.stage import slotfile
from checkpoint.stage.slot_sums import has_sums
from controller.core.edge.rules import Reason
from controller.local.processes import members_of
from tests.chaos.cluster import LAST_TIMEOUT_S, NUM_STEPS, Plant
from tests.chaos.expected import waits_for_store
from tests.chaos.matrix import (
    INSIDE,
    NODE_CLOCK_STEPS_S,
    OWN_CLOCK_STEPS_S,
    STORE,
    Fault,
    Moment,
    Row,
    is_lasting,
)
from tests.chaos.orders import NUM_STOPS, STRUCK_STEP, other_rank, stop_name, struck_rank
from tests.e2e.cluster import wait_for

# Faster than a tiny job ends, and longer than a node may be late.
AWAY_S = 6.0
RESTART_AFTER_S = 1.0
STORE_AWAY_S = 5.0
# A tenth of a core, in slices; a rank that stops for longer is not slow but stopped.
STARVED_S = 5.0
# Three windows of ten seconds, and what a busy machine adds.
STRAGGLER_WITHIN_S = 120.0
RUNS_S, WAITS_S = 0.02, 0.18
# What a busy machine adds to a deadline of the controller, which is late by a tenth at most.
LATE_S = 15.0
# All of a black box's header but its identity, and its ring of steps.
GARBAGE_FROM, GARBAGE_BYTES, GARBAGE_S = 64, 40_000, 1.0
# What is wrong with reports, by the controller's counter.
_REASONS = {
    *(Reason.NON_FINITE, Reason.OUT_OF_RANGE, Reason.TOO_LONG, Reason.BAD_NAME),
    *(Reason.UNKNOWN_WORD, Reason.UNKNOWN_KIND, Reason.UNKNOWN_JOB, Reason.UNKNOWN_ATTEMPT),
    Reason.NOT_PLACED,
}
# A machine that does much else starts a job in a minute.
REACH_S = 150.0


def ask_too_much(plant: Plant) -> None:
    """Other jobs before the row's own ask for what no node has; nodes must not suffer."""
    with plant.cluster.client as client:
        for name, demand in _DEMANDS.items():
            job = client.submit({"name": name, **demand}, wait_for_nodes=True)
            assert job.state == "QUEUED", job.reason
            assert "none fit" in job.reason, job.reason
            client.cancel(job.job_id)
        states = [node.state for node in client.nodes() if node.connected]
    assert states == ["READY"] * len(states), states


def carry_out(plant: Plant, row: Row) -> str:
    """Wait for the moment and strike; the node of the victim when it was struck."""
    desk = plant.desk
    if row.moment is Moment.DIAGNOSIS:
        job = plant.cluster.wait_state(plant.job_id, "DIAGNOSING")
        pid = 0
    else:
        if row.fault in STORE and row.moment in (Moment.RESTORE, Moment.RECOVERY):
            _lose_first_node(plant)
        if row.moment is Moment.UPLOAD:
            desk.wait_reached("upload", REACH_S)
        pid = desk.wait_reached("strike", REACH_S)
        job = plant.job()
    node = job.nodes[struck_rank(row) // plant.workers_per_node]
    if row.fault not in INSIDE:
        _strike(plant, row, node, pid)
        if row.moment is Moment.TWICE:
            plant.cluster.kill_rank(plant.job_id, job.attempt, other_rank(row))
    desk.release()
    _follow_up(plant, row, node)
    return node


# Slots of terabytes, and devices that no node of a row has.
_DEMANDS: dict[str, dict[str, Any]] = {
    "oversized": {"model": {"layers": 96, "hidden": 16384, "heads": 128}},
    "cuda-on-cpu": {"resources": {"device": "cuda"}},
}


def _strike(plant: Plant, row: Row, node: str, pid: int) -> None:
    desk = plant.desk
    match row.fault:
        case Fault.KILLED:
            os.kill(pid, signal.SIGKILL)
        case Fault.STOPPED:
            os.kill(pid, signal.SIGSTOP)
        case Fault.ZOMBIE:
            _signal_all(members_of([plant.agents[node]]), signal.SIGSTOP)
        case Fault.STANDBY:
            os.kill(_standby_of(plant.agents[node]), signal.SIGKILL)
        case Fault.AGENT:
            os.kill(plant.agents[node], signal.SIGKILL)
        case Fault.AGENT_BACK:
            os.kill(plant.agents[node], signal.SIGKILL)
            plant.join(node)
            plant.note_sessions()
        case Fault.GARBAGE:
            _spoil_box(plant, row)
        case Fault.TWIN:
            plant.note_sessions()
            older = plant.agents[node]
            plant.join(node, folder=f"{node}-twin")
            wait_for(lambda: not members_of([older]), "the end of the older agent and its workers")
            # Nobody looks after the older one's folder any more.
            shutil.rmtree(plant.folder / "memory" / node)
        case Fault.PLANNED:
            _stop_in_order(plant)
        case Fault.NODE:
            _lose(plant, node)
        case Fault.CONTROLLER:
            assert plant.controller is not None
            plant.controller.kill()
            plant.controller.wait()
        case Fault.SILENT:
            assert plant.controller is not None
            plant.controller.send_signal(signal.SIGSTOP)
        case Fault.PARTITION:
            plant.cable.cut()
        case Fault.DISK_FULL:
            _fill(plant.disk)
        case Fault.STORE_DOWN:
            desk.store("down")
        case Fault.STORE_SILENT:
            desk.store("silent")
        case fault if fault in NODE_CLOCK_STEPS_S:
            desk.jump(node, NODE_CLOCK_STEPS_S[fault])
        case fault if fault in OWN_CLOCK_STEPS_S:
            if waits_for_store(row):
                desk.store("down")
            desk.jump("controller", OWN_CLOCK_STEPS_S[fault])
        case Fault.POISON:
            _poison(plant, row, node)
        case Fault.MEMORY_FLIP:
            _flip_memory(plant.memory_dir / node / plant.job_id / memory_folder(struck_rank(row)))
        case _:
            # A starved rank is struck again and again: see `_follow_up`.
            return


def _follow_up(plant: Plant, row: Row, node: str) -> None:
    """What belongs to the fault after everybody was let go."""
    match row.fault:
        case Fault.ZOMBIE:
            session = plant.agents[node]
            job = plant.job()
            wait_for(
                lambda: plant.job().attempt > job.attempt and plant.job().state == "RUNNING",
                "the node to be replaced",
            )
            _signal_all(members_of([session]), signal.SIGCONT)
        case Fault.STARVED:
            pid = plant.desk.reached("strike")
            assert pid is not None
            if is_lasting(row):
                _starve(pid, STRAGGLER_WITHIN_S, until=lambda: _is_reported(plant, "straggler"))
            else:
                _starve(pid, STARVED_S)
        case Fault.CONTROLLER:
            time.sleep(RESTART_AFTER_S)
            plant.start_controller()
        case Fault.SILENT:
            assert plant.controller is not None
            time.sleep(AWAY_S)
            plant.controller.send_signal(signal.SIGCONT)
        case Fault.PARTITION:
            time.sleep(AWAY_S)
            plant.cable.mend()
        case Fault.DISK_FULL:
            _push_when_paused(plant, lambda: (plant.disk / "ballast").unlink())
        case fault if fault in NODE_CLOCK_STEPS_S:
            # The node's times do not follow the step, so the controller has nothing to correct.
            log = plant.state_dir / "nodes" / node / "agent.log"
            told = "the wall clock stepped by"
            wait_for(
                lambda: told in log.read_text(errors="replace"), "the step of the node's clock"
            )
        case fault if fault in OWN_CLOCK_STEPS_S:
            name = "outlast_controller_clock_steps_total"
            wait_for(lambda: plant.metrics()[name, frozenset()] == 1, "the step to be counted")
            assert "alert: the wall clock stepped by" in plant.log("controller")
            if waits_for_store(row):
                _push_when_paused(plant, lambda: plant.desk.store(""))
        case Fault.STORE_DOWN | Fault.STORE_SILENT:
            # Uploads can wait until the job waits for its last; a start cannot go on without it.
            if row.moment in (Moment.START, Moment.RESTORE, Moment.RECOVERY):
                time.sleep(STORE_AWAY_S)
            else:
                plant.cluster.wait_step(plant.job_id, NUM_STEPS)
                wait_for(lambda: _is_reported(plant, "storage"), "an incident of storage")
            plant.desk.store("")
        case _:
            return


def _push_when_paused(plant: Plant, mend: Callable[[], None]) -> None:
    """Mend the store once the job has waited in vain, and upload what host memory holds."""
    plant.cluster.wait_step(plant.job_id, NUM_STEPS)
    done_s = time.monotonic()
    job = plant.cluster.wait_state(plant.job_id, "PAUSED")
    waited_s = time.monotonic() - done_s
    assert waited_s < LAST_TIMEOUT_S + LATE_S, f"paused after {waited_s:.1f} s"
    assert "the last checkpoint is not in" in job.reason, job.reason
    mend()
    with plant.cluster.client as client:
        client.push_checkpoint(plant.job_id)
    job = plant.cluster.wait_state(plant.job_id, "SUCCEEDED")
    assert job.committed_step == job.total_steps, job.reason


def _poison(plant: Plant, row: Row, node: str) -> None:
    """Have the node's agent report what cannot be, until every kind of it is counted.

    The rank's box says such things already.
    """
    log = plant.state_dir / "nodes" / node / "agent.log"
    wait_for(lambda: "black box failed (1 so far)" in log.read_text(), "the box to be noted")
    case = {
        "job_id": plant.job_id,
        "attempt": plant.job().attempt,
        "own": struck_rank(row),
        "foreign": other_rank(row),
    }
    plant.desk.poison(node, case)

    def counted() -> set[str]:
        name = "outlast_controller_bad_reports_total"
        found = plant.metrics().items()
        return {
            dict(labels)["reason"] for (each, labels), value in found if each == name and value > 0
        }

    wait_for(lambda: counted() >= _REASONS, "every bad report to be counted", REACH_S)
    plant.desk.cure(node)
    assert f"report dropped: node={node}" in plant.log("controller")
    # Nothing of it got as far as to have the controller fail on it.
    assert plant.metrics()["outlast_controller_poisoned_events_total", frozenset()] == 0


def _spoil_box(plant: Plant, row: Row) -> None:
    """Overwrite what a rank has noted; it stands still meanwhile, so nothing mends it."""
    attempt, rank = plant.job().attempt, struck_rank(row)
    name = f"nodes/*/jobs/{plant.job_id}/a{attempt}/rank-{rank:05d}.blackbox"
    (path,) = plant.state_dir.glob(name)
    with path.open("r+b") as file:
        file.seek(GARBAGE_FROM)
        file.write(b"\xab" * GARBAGE_BYTES)
    # Many looks of the agent, which has five a second.
    looked_s = time.monotonic() + GARBAGE_S
    wait_for(lambda: time.monotonic() > looked_s, "looks of the agent")


def _stop_in_order(plant: Plant) -> None:
    """What Ctrl-C of `outlast up` does, again and again."""
    for number in range(1, NUM_STOPS + 1):
        plant.desk.wait_reached(stop_name(number), REACH_S)
        assert plant.controller is not None
        plant.controller.terminate()
        plant.controller.wait()
        plant.start_controller()
        plant.note_sessions()


def _lose_first_node(plant: Plant) -> None:
    """The first fault of a row that needs the store to come back from."""
    plant.desk.wait_reached("first", REACH_S)
    wait_for(lambda: plant.job().HasField("committed_step"), "a checkpoint to be committed")
    _lose(plant, plant.job().nodes[0])


def _lose(plant: Plant, node: str) -> None:
    """A machine that loses its power: its processes and its memory are gone."""
    _signal_all(members_of([plant.agents[node]]), signal.SIGKILL)
    shutil.rmtree(plant.memory_dir / node, ignore_errors=True)


def _flip_memory(folder: Path) -> None:
    """Change one bit of the mantissa of a number in every slot, once its agent has summed it."""
    slots = slotfile.open_existing(folder)

    def is_settled() -> bool:
        steps = [slot.read().step for slot in slots if slot.read().sealed and has_sums(slot)]
        return len(steps) == len(slots) and max(steps) == STRUCK_STEP - 1

    wait_for(is_settled, f"three slots with checksums in {folder}")
    table = slotfile.read_table(folder)
    assert table is not None
    largest = max(table.tensors, key=lambda tensor: tensor.nbytes)
    for slot in slots:
        with slot.payload as payload:
            payload[largest.byte_offset + 1] ^= 1
        slot.close()


def _standby_of(agent: int) -> int:
    # Workers and checks are forks of it, and may be the agent's, too, but have their own groups.
    beside = (c for c in psutil.Process(agent).children() if os.getpgid(c.pid) == os.getpgid(agent))
    return next(child.pid for child in beside if "trainer.worker.standby" in child.cmdline())


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _is_reported(plant: Plant, cause: str) -> bool:
    return any(incident.cause == cause for incident in plant.cluster.incidents(plant.job_id))


def _starve(pid: int, for_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
    deadline_s = time.monotonic() + for_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline_s and not until():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(WAITS_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNS_S)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
