"""Jobs that go on with fewer nodes when some are missing, and with all of them again."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.accounting import Part, totals
from controller.core.attempt_record import NodeStart
from controller.core.changes import fold
from controller.core.kinds import Rung
from controller.core.orders import StartWorkers
from controller.core.records import Size
from controller.core.starts import start_on
from controller.core.states import JobState, NodeState
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId
from outlast.worker_contract import WorkerExitCode
from tests.controller.core.driver import JOB, Driver

SIZES = tuple(Size(dp=dp, nodes=dp, spec_json=f'{{"dp": {dp}}}') for dp in (4, 2, 1))
AFTER_S, GROW_S = 60.0, 300.0


def elastic(spares: int = 0, sizes: tuple[Size, ...] = SIZES, **changes: object) -> Driver:
    """A job of four nodes that trains and may go on with two or one."""
    values: dict[str, object] = {
        "nodes": sizes[0].nodes,
        "sizes": sizes,
        "shrink_after_s": AFTER_S,
        "grow_after_s": GROW_S,
        **changes,
    }
    return Driver().running(spares, **values)


def lose(driver: Driver, *names: str) -> None:
    for name in names:
        driver.lose(name)
    driver.answer_all("/stop/")


def go_on(driver: Driver, resumed_step: int = 10) -> None:
    """The present attempt starts and takes a step, past the last fault."""
    driver.answer_all("/start/")
    driver.advanced(max(driver.job().high_step, resumed_step) + 1, resumed_step)


def starts(driver: Driver) -> list[NodeStart]:
    records = driver.machine.state.commands.values()
    state = driver.machine.state
    return [
        start_on(state, state.attempts[JOB], item.node)
        for item in records
        if isinstance(item.command, StartWorkers)
    ]


def test_job_goes_on_smaller_once_a_node_is_missing_for_too_long() -> None:
    driver = elastic()
    driver.commit(10)
    retry_left = driver.job().retry_left
    lose(driver, "n2")
    assert driver.job().state is JobState.PROVISIONING
    driver.wait(AFTER_S - 1.0)
    assert driver.job().state is JobState.PROVISIONING
    driver.wait(1.0)

    job = driver.job()
    assert job.state is JobState.STARTING
    assert (job.plan.nodes, job.plan.world_size) == (2, 2)
    assert job.spec_json == '{"dp": 2}'
    assert job.submitted_spec_json == '{"dp": 4}'
    assert job.nodes == ("n1", "n3")
    # Nobody needs the fourth now.
    assert driver.node("n4").state is NodeState.READY
    assert [command.ranks for command in starts(driver)] == [(0,), (1,)]
    attempt = driver.machine.state.attempts[JOB]
    assert (attempt.world_size, attempt.spec_json) == (2, '{"dp": 2}')
    assert (attempt.committed_step, attempt.rank_nodes) == (10, ("n1", "n3"))
    assert any(entry.phase == "elastic" for entry in driver.incident().timeline)
    go_on(driver)
    assert "dp=2 on 2 node(s) instead of dp=4 on 4 node(s)" in driver.job().reason
    assert driver.job().retry_left == retry_left
    # Done is when all ranks of this size are.
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    assert driver.job().state is JobState.SUCCEEDED


def test_node_that_comes_in_time_keeps_the_size() -> None:
    driver = elastic()
    lose(driver, "n2")
    driver.wait(AFTER_S / 2)
    driver.join("n5")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert driver.job().nodes == ("n1", "n5", "n3", "n4")
    driver.wait(2 * AFTER_S)
    assert driver.job().plan.nodes == 4


def test_job_without_a_smaller_size_that_fits_waits() -> None:
    driver = elastic(sizes=SIZES[:2])
    lose(driver, "n1", "n2", "n3")
    driver.wait(10 * AFTER_S)
    assert driver.job().state is JobState.PROVISIONING
    assert "needs 4" in driver.job().reason
    driver.join("n5")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert set(driver.job().nodes) == {"n4", "n5"}


def test_job_shrinks_again_from_a_smaller_size() -> None:
    driver = elastic()
    lose(driver, "n2")
    driver.wait(AFTER_S)
    go_on(driver)
    lose(driver, "n1", "n4")
    driver.wait(AFTER_S)
    assert driver.job().nodes == ("n3",)
    assert driver.job().plan.world_size == 1


def shrunk(**changes: object) -> Driver:
    """A job that trains with two nodes of four; one is free."""
    driver = elastic(**changes)
    driver.commit(10)
    lose(driver, "n2")
    driver.wait(AFTER_S)
    go_on(driver)
    driver.wait(GROW_S)
    return driver


def test_job_grows_at_a_checkpoint_once_nodes_are_free() -> None:
    driver = shrunk()
    retry_left, incidents = driver.job().retry_left, driver.job().num_incidents
    driver.join("n5")
    # Not before the next checkpoint is in storage.
    assert driver.job().state is JobState.RUNNING
    driver.commit(20)
    assert driver.job().state is JobState.SUSPENDING
    assert all(
        record.command.graceful  # type: ignore[union-attr]
        for record in driver.machine.state.commands.values()
        if "/stop/" in record.command_id
    )
    driver.answer("job/a2/stop/n1", completed_step=25)
    driver.answer("job/a2/stop/n3", completed_step=25)
    # What it trained after the checkpoint is on its way into storage.
    assert driver.job().state is JobState.SUSPENDING
    driver.now_s += 5.0
    driver.commit(25)
    assert driver.job().state is JobState.PREFLIGHT
    assert driver.job().nodes == ("n1", "n3", "n4", "n5")
    driver.answer_all("/suite/")
    job = driver.job()
    assert job.state is JobState.STARTING
    assert job.attempt == 3
    assert job.spec_json == '{"dp": 4}'
    assert driver.machine.state.attempts[JOB].committed_step == 25
    go_on(driver, resumed_step=25)
    assert "recovery.elastic" not in driver.job().reason
    assert driver.job().retry_left >= retry_left
    assert driver.job().num_incidents == incidents
    account = totals(driver.job().account, driver.now_s)
    assert account[Part.RESTORE] >= 5.0


def test_growing_waits_no_longer_for_an_upload_than_for_a_stop() -> None:
    driver = shrunk()
    driver.join("n5")
    driver.commit(20)
    driver.answer_all("/stop/n1")
    driver.answer("job/a2/stop/n3", completed_step=25)
    driver.wait(driver.job().plan.stop_timeout_s)
    assert driver.job().state is JobState.PREFLIGHT
    assert driver.job().plan.nodes == 4


def test_job_does_not_grow_more_often_than_it_may() -> None:
    driver = elastic()
    lose(driver, "n2")
    driver.wait(AFTER_S)
    go_on(driver)
    driver.join("n5")
    driver.wait(GROW_S - 1.0)
    driver.commit(20)
    assert driver.job().state is JobState.RUNNING
    driver.wait(1.0)
    driver.commit(20)
    assert driver.job().state is JobState.RUNNING, "the same checkpoint again is no boundary"
    driver.commit(30)
    assert driver.job().state is JobState.SUSPENDING


def test_job_grows_to_what_the_free_nodes_fill() -> None:
    driver = elastic(sizes=SIZES)
    lose(driver, "n1", "n2", "n3")
    driver.wait(AFTER_S)
    go_on(driver)
    driver.wait(GROW_S)
    driver.join("n5")
    driver.commit(20)
    driver.answer("job/a2/stop/n4", completed_step=20)
    assert driver.job().plan.nodes == 2
    assert driver.job().nodes == ("n4", "n5")


def test_nodes_that_are_gone_again_are_not_waited_for() -> None:
    driver = shrunk()
    driver.join("n5")
    driver.commit(20)
    driver.lose("n5")
    for node in ("n1", "n3"):
        driver.answer(f"job/a2/stop/{node}", completed_step=20)
    job = driver.job()
    assert job.state is JobState.STARTING
    assert job.nodes == ("n1", "n3")
    # And the same when they fail their checks.
    go_on(driver, resumed_step=20)
    driver.wait(GROW_S)
    driver.join("n6")
    driver.commit(30)
    for node in ("n1", "n3"):
        driver.answer(f"job/a3/stop/{node}", completed_step=30)
    assert driver.job().state is JobState.PREFLIGHT
    failed = next(node for node in driver.job().unchecked)
    suite = next(c for c in driver.machine.state.commands if c.startswith(f"{failed}/suite/"))
    driver.answer(suite, verdict="fail")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert driver.job().nodes == ("n1", "n3")
    assert driver.job().plan.nodes == 2


def test_fault_while_it_stops_to_grow_is_a_fault_like_any_other() -> None:
    driver = shrunk()
    driver.join("n5")
    driver.commit(20)
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    job = driver.job()
    assert job.incident is not None
    assert job.plan.nodes == 2
    assert job.grow_step is None
    assert job.state is JobState.STARTING


def test_a_rank_that_stops_with_the_others_before_its_agent_is_told_to_is_no_fault() -> None:
    driver = shrunk()
    driver.join("n5")
    driver.commit(20)
    code = int(WorkerExitCode.STOPPED)
    driver.send(driver.exited(0, code=code, fault_class=FailureClass.CLEAN))
    assert driver.job().incident is None
    driver.answer("job/a2/stop/n1", completed_step=25)
    driver.answer("job/a2/stop/n3", completed_step=25)
    driver.commit(25)
    assert driver.job().plan.nodes == 4


def test_pause_while_it_stops_to_grow_pauses() -> None:
    driver = shrunk()
    driver.join("n5")
    driver.commit(20)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PAUSED
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert driver.job().plan.nodes == 2


def test_resumed_job_goes_on_smaller_and_a_new_one_waits() -> None:
    driver = elastic()
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    driver.lose("n2")
    driver.send(ev.JobResumeRequested(job_id=JOB))
    assert driver.job().state is JobState.QUEUED
    driver.wait(AFTER_S)
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert driver.job().plan.nodes == 2

    fresh = Driver()
    fresh.join("n1")
    fresh.join("n2")
    fresh.submit(JobId("job"), nodes=4, sizes=SIZES, shrink_after_s=AFTER_S)
    fresh.wait(10 * AFTER_S)
    assert fresh.job().state is JobState.QUEUED


def test_controller_that_restarts_waits_until_its_agents_have_come_back() -> None:
    before = elastic()
    lose(before, "n2")
    driver = Driver(fold(before.machine.state.as_changes()))
    driver.now_s = before.now_s + 2 * AFTER_S
    driver.send(ev.ControllerStarted(term=2))
    driver.send(ev.TimePassed())
    assert driver.job().plan.nodes == 4
    for node in ("n1", "n3", "n4", "n5"):
        driver.join(node, incarnation="one" if node != "n5" else "new")
    driver.answer_all("/suite/")
    assert driver.job().plan.nodes == 4
    assert NodeId("n5") in driver.job().nodes


def test_shrinking_takes_the_nodes_that_need_no_check() -> None:
    driver = elastic(ladder=(Rung.RESTART, Rung.REPLACE))
    lose(driver, "n1", "n2")
    driver.join("n5")
    assert driver.job().unchecked == ("n5",)
    driver.wait(AFTER_S)
    assert driver.job().nodes == ("n3", "n4")
    assert driver.job().state is JobState.STARTING


def script(**changes: object) -> Driver:
    """A script that runs on two nodes of the four that it wants; one is free."""
    driver = elastic(total_steps=None, **changes)
    lose(driver, "n2")
    driver.wait(AFTER_S)
    driver.answer_all("/start/")
    driver.advanced(0, resumed_step=-1)
    return driver


def test_a_script_that_saves_by_itself_grows_once_it_has_run_for_long_enough() -> None:
    driver = script()
    retry_left = driver.job().retry_left
    assert driver.job().incident is None
    assert driver.job().reason.endswith(
        "with 2 node(s) instead of 4 node(s) (workload.min_nodes) until nodes are free"
    )
    driver.join("n5")
    driver.wait(GROW_S - 1.0)
    assert driver.job().state is JobState.RUNNING
    # Nothing else happens: the controller wakes by itself.
    assert driver.machine.wake_at() == driver.now_s + 1.0
    driver.wait(1.0)
    assert driver.job().state is JobState.SUSPENDING
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=-15, completed_step=-1, stopped=True))
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    job = driver.job()
    assert (job.state, job.plan.nodes, job.nodes) == (
        JobState.STARTING,
        4,
        ("n1", "n3", "n4", "n5"),
    )
    assert job.retry_left == retry_left


def test_a_script_grows_at_once_when_a_node_comes_late() -> None:
    driver = script()
    driver.wait(10 * GROW_S)
    assert driver.job().state is JobState.RUNNING
    driver.join("n5")
    assert driver.job().state is JobState.SUSPENDING


def test_a_script_whose_session_has_stored_a_checkpoint_grows_at_the_next() -> None:
    driver = elastic(total_steps=None)
    driver.commit(10)
    lose(driver, "n2")
    driver.wait(AFTER_S)
    go_on(driver)
    driver.join("n5")
    driver.wait(10 * GROW_S)
    assert driver.job().state is JobState.RUNNING
    driver.commit(20)
    assert driver.job().state is JobState.SUSPENDING
