"""A real agent, standby process and workers, below a controller that we play."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import Storage
from controller.agent.workers.processes import zombie_status
from controller.core.edge.operations import operation_of
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerExitCode
from tests.agent.conftest import StartAgent
from tests.agent.harness import (
    AgentProcess,
    FakeController,
    big_spec,
    start_command,
    start_job,
    stop_command,
    wait_for,
)


def test_started_workers_report_steps_and_progress(
    controller: FakeController, agent: AgentProcess
) -> None:
    wait_for(lambda: controller.hellos, "a hello")
    hello = controller.hellos[0]
    assert (hello.node_id, hello.workers, hello.address) == ("n0", 2, "127.0.0.1")
    assert hello.rendezvous_port > 0
    assert hello.incarnation
    start_job(controller)
    progress = controller.progress("job", 1)
    assert progress.resumed_step == 0
    split = progress.start_split_s
    assert set(split) == {"fork", "groups", "model", "restore", "first_step"}
    assert all(part >= 0 for part in split.values())
    wait_for(lambda: len(controller.events("step_reports")) >= 2, "two batches of steps")
    reports = [
        report
        for event in controller.events("step_reports")
        for report in event.step_reports.reports
    ]
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert reports[3].loss == 0.25
    assert not reports[0].HasField("eval_loss")


def test_heartbeat_says_where_each_rank_stands(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)

    def both_ranks() -> bool:
        beats = controller.heartbeats()
        ranks = beats[-1].ranks if beats else []
        return len(ranks) == 2 and all(
            summary.phase == "forward_backward"
            and summary.completed_step >= 1
            and summary.resumed_step == 0
            and summary.last_operation.op == "all_reduce"
            and summary.step_age_s < 5
            and summary.HasField("use")
            for summary in ranks
        )

    wait_for(both_ranks, "a heartbeat with both ranks")


def test_controller_may_change_the_heartbeat_period_during_a_session(
    controller: FakeController, start_agent: StartAgent
) -> None:
    controller.heartbeat_period_s = 600.0
    start_agent(controller.start())
    wait_for(controller.heartbeats, "the first heartbeat")
    controller.send(controller.welcome(0.05))
    wait_for(lambda: len(controller.heartbeats()) >= 5, "heartbeats at the new period")
    assert [beat.seq for beat in controller.heartbeats()[:5]] == [1, 2, 3, 4, 5]
    assert len(controller.hellos) == 1


def test_killed_worker_is_reported_at_once(controller: FakeController, agent: AgentProcess) -> None:
    start_job(controller)
    controller.progress("job", 1)
    pid = agent.worker_pid(1, 1)
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)
    exit_ = controller.exit_of("job", 1, 1)
    heard_s = next(
        at_s
        for at_s, message in controller.received
        if message.event.WhichOneof("kind") == "worker_exited"
    )
    # Some milliseconds in fact; the bound allows for a machine with other work.
    assert heard_s - killed_s < 3.0
    assert exit_.code == -signal.SIGKILL
    assert exit_.completed_step >= 1
    assert "dp all_reduce" in str(operation_of(exit_))
    assert "starts" in exit_.stderr_tail


def test_exception_reaches_the_controller_with_its_traceback(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank1="raise")
    start_job(controller)
    exit_ = controller.exit_of("job", 1, 1)
    assert exit_.code == 1
    assert exit_.exception_type == "builtins.ValueError"
    assert exit_.exception_message == "loss is not finite at step 3"
    assert "in train" in exit_.traceback
    assert "about to fail" in exit_.stderr_tail
    assert exit_.completed_step == 2
    assert str(operation_of(exit_)) == "in dp all_reduce #3"


def test_finished_workers_report_their_last_steps_before_their_end(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank0="finish:40", rank1="finish:40")
    start_job(controller)
    assert [controller.exit_of("job", 1, rank).code for rank in (0, 1)] == [0, 0]
    kinds = [
        (message.event.WhichOneof("kind"), message.event.worker_exited.rank)
        for _, message in controller.received
        if message.WhichOneof("kind") == "event"
    ]
    steps = [
        report.step
        for event in controller.events("step_reports")
        for report in event.step_reports.reports
    ]
    assert steps == list(range(1, 41))
    assert controller.events("progress")[-1].progress.completed_step == 40
    last_steps = max(at for at, (kind, _) in enumerate(kinds) if kind == "step_reports")
    assert last_steps < kinds.index(("worker_exited", 0))


def test_graceful_stop_lets_workers_finish_their_step(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    result = controller.result(controller.command(stop_command(1, graceful=True)))
    assert result.ok
    exits = [controller.exit_of("job", 1, rank) for rank in (0, 1)]
    assert [(exit_.code, exit_.stopped) for exit_ in exits] == [(WorkerExitCode.STOPPED, True)] * 2
    assert result.completed_step == max(exit_.completed_step for exit_ in exits)


def test_forced_stop_ends_a_stopped_process_and_one_that_ignores_sigterm(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank1="ignore-term")
    start_job(controller)
    controller.progress("job", 1)
    # A SIGSTOPped process takes no SIGTERM (research: torchrun waits 30 s here).
    os.kill(agent.worker_pid(1, 0), signal.SIGSTOP)
    result = controller.result(controller.command(stop_command(1, graceful=True, timeout_s=0.3)))
    assert result.ok
    assert result.completed_step >= 1
    assert [controller.exit_of("job", 1, rank).code for rank in (0, 1)] == [-9, -9]


def test_worker_that_died_just_before_the_stop_was_not_stopped(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    # The agent hears of the end through the standby process, so not before the order.
    os.kill(agent.standby_pid(), signal.SIGSTOP)
    pid = agent.worker_pid(1, 1)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: zombie_status(pid) is not None, "the worker to be dead")
    assert controller.result(controller.command(stop_command(1))).ok
    ends = [controller.exit_of("job", 1, rank) for rank in (0, 1)]
    assert [(end.code, end.stopped) for end in ends] == [(-9, True), (-9, False)]


def test_stop_leaves_newer_attempts_alone_and_stale_starts_are_refused(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller, attempt=2)
    controller.progress("job", 2)
    assert controller.result(controller.command(stop_command(1))).completed_step == -1
    stale = controller.result(controller.command(start_command(2)))
    assert (stale.ok, stale.error_kind) == (False, "stale")
    older = controller.result(controller.command(start_command(1)))
    assert (older.ok, older.error_kind) == (False, "stale")
    assert controller.result(controller.command(stop_command(2))).ok
    stopped = controller.result(controller.command(start_command(2)))
    assert "attempt 2 was already stopped" in stopped.detail
    assert len(controller.events("worker_exited")) == 2


def test_start_of_a_newer_attempt_replaces_workers_that_were_never_stopped(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller, attempt=1)
    controller.progress("job", 1)
    start_job(controller, attempt=2)
    controller.progress("job", 2)
    assert [controller.exit_of("job", 1, rank).code for rank in (0, 1)] == [-9, -9]


def test_repeated_command_is_applied_once(controller: FakeController, agent: AgentProcess) -> None:
    wait_for(lambda: controller.hellos, "a hello")
    for _ in range(3):
        controller.command(start_command(1, command_id="once"))
    wait_for(lambda: len(controller.events("command_result")) >= 1, "an answer")
    controller.command(start_command(1, command_id="once"))
    controller.progress("job", 1)
    controller.command(start_command(1, command_id="once"))
    controller.result(controller.command(stop_command(1)))
    results = {event.command_result.ok for event in controller.events("command_result")}
    assert results == {True}
    assert len(controller.events("worker_exited")) == 2


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        (start_command(job_id="j1", ranks=(0, 1, 2)), "misfit", "3 workers asked of a node"),
        (start_command(job_id="../up"), "config", "is no name"),
        (start_command(job_id="j2", spec_json="{"), "config", "Expecting"),
        (start_command(job_id="j3", spec_json='{"name": "job", "stepz": 3}'), "config", "stepz"),
        (start_command(job_id="j4", spec_json=big_spec()), "misfit", "host memory"),
        (
            start_command(job_id="j5", committed_step=-1, checkpoint_url="file:///proc/nowhere"),
            "config",
            "checkpoint storage file:///proc/nowhere",
        ),
        (
            start_command(
                job_id="j6",
                spec_json='{"name": "job", "workload": {"command": ["python", "/nowhere/x.py"]}}',
            ),
            "missing",
            "workload.command has '/nowhere/x.py', which is not there",
        ),
    ],
    ids=["ranks", "job-id", "json", "spec", "memory", "storage", "script"],
)
def test_start_that_cannot_work_here_is_refused(
    shared_agent: FakeController, command: agents_pb2.Command, kind: str, words: str
) -> None:
    result = shared_agent.result(shared_agent.command(command))
    assert (result.ok, result.error_kind) == (False, kind)
    assert words in result.detail


def test_start_in_the_folder_of_another_job_is_refused_before_it_trains(
    controller: FakeController, agent: AgentProcess, tmp_path: Path
) -> None:
    """Two controllers share a bucket and have made the same job id."""
    url = f"file://{tmp_path}/store/job"

    def start(attempt: int, owner: str) -> agents_pb2.CommandResult:
        command = start_command(attempt, committed_step=-1, checkpoint_url=url, owner=owner)
        return controller.result(controller.command(command))

    claim(Storage(url), Owner(job_id="job", mark="of another controller"))
    refused = start(1, "of this controller")
    assert (refused.ok, refused.error_kind) == (False, "config")
    assert f"checkpoint.url: {url} belongs to another job" in refused.detail
    assert start(2, "of another controller").ok
    controller.progress("job", 2)


def test_forgotten_job_frees_its_host_memory(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    folder = agent.memory_dir / "job"
    assert folder.exists()
    forget = agents_pb2.Command(job_id="job", attempt=1, forget_job=agents_pb2.ForgetJob())
    assert controller.result(controller.command(forget)).ok
    assert not folder.exists()
    controller.drop_connection()
    wait_for(lambda: len(controller.hellos) == 2, "a second hello")
    assert not controller.hellos[1].worker_statuses


def test_logs_are_followed_into_the_next_attempt(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    controller.send(log_query("q1", follow=True, rank=1))
    wait_for(lambda: "rank 1 attempt 1 starts" in logged(controller, "q1"), "the first log")
    start_job(controller, attempt=2)
    wait_for(lambda: "rank 1 attempt 2 starts" in logged(controller, "q1"), "the next log")
    assert "rank 0" not in logged(controller, "q1")
    # What is not followed is as far as it is just then.
    controller.send(log_query("q0", follow=True, rank=0))
    wait_for(lambda: "rank 0 attempt 2 starts" in logged(controller, "q0"), "that of rank 0")
    controller.send(log_query("q2", follow=False))
    wait_for(lambda: chunks(controller, "q2") and chunks(controller, "q2")[-1].end, "the end")
    assert "rank 0 attempt 2 starts" in logged(controller, "q2")
    assert "rank 1 attempt 2 starts" in logged(controller, "q2")
    controller.send(log_query("q3", follow=False, job_id="unknown"))
    wait_for(lambda: chunks(controller, "q3"), "an answer for an unknown job")
    assert chunks(controller, "q3")[0].end


def test_nobody_else_may_read_what_an_agent_and_its_workers_keep(
    controller: FakeController, agent: AgentProcess
) -> None:
    """Whatever the umask is; the folders above are closed besides."""
    start_job(controller)
    controller.progress("job", 1)
    wait_for(lambda: list(agent.state_dir.rglob("*.times")), "times of a log")
    stop = agents_pb2.StopWorkers(timeout_s=5.0, capture_stacks=True)
    command = agents_pb2.Command(job_id="job", attempt=1, stop_workers=stop)
    assert controller.result(controller.command(command)).ok
    files = [path for top in (agent.state_dir, agent.memory_dir) for path in top.rglob("*")]
    names = {path.name for path in files}
    assert {"standby.log", "rank-00000.log", "rank-00000.stacks.txt"} <= names
    opened = [path for path in files if path.is_file() and path.stat().st_mode & 0o077]
    assert not opened


def suite_command(suite: str) -> agents_pb2.Command:
    return agents_pb2.Command(
        job_id="job", attempt=1, run_suite=agents_pb2.RunSuite(suite=suite, timeout_s=60.0)
    )


def test_suite_of_a_job_answers_with_its_findings(
    controller: FakeController, agent: AgentProcess
) -> None:
    result = controller.result(controller.command(suite_command("preflight")))
    assert result.ok
    assert [finding.verdict for finding in result.findings] == ["pass", "fail"]
    crashed = controller.result(controller.command(suite_command("crashes")))
    assert (crashed.ok, crashed.error_kind) == (False, "internal")


def test_check_orders_stream_their_findings(
    controller: FakeController, agent: AgentProcess
) -> None:
    wait_for(lambda: controller.hellos, "a hello")
    for order_id, suite in (("r1/1", "preflight"), ("r1/2", "crashes")):
        asked = agents_pb2.CheckOrder(order_id=order_id, suite=suite, timeout_s=60.0)
        asked.on_this_node.SetInParent()
        controller.send(agents_pb2.ControllerMessage(check_order=asked))
    hosting = agents_pb2.CheckOrder(order_id="r1/3", suite="preflight", timeout_s=60.0)
    hosting.host.peer = "n1"
    controller.send(agents_pb2.ControllerMessage(check_order=hosting))

    def reports(order_id: str) -> list[agents_pb2.CheckReport]:
        kinds = [m for _, m in controller.received if m.WhichOneof("kind") == "check_report"]
        return [m.check_report for m in kinds if m.check_report.order_id == order_id]

    wait_for(lambda: reports("r1/3") and reports("r1/3")[-1].done, "the end of the last order")
    verdicts = {
        order_id: [found.verdict for report in reports(order_id) for found in report.findings]
        for order_id in ("r1/1", "r1/2", "r1/3")
    }
    assert verdicts == {
        "r1/1": ["pass", "fail"],
        "r1/2": ["pass", "error"],
        "r1/3": ["pass", "fail"],
    }
    assert [report.done for report in reports("r1/1")] == [False, False, False, True]
    begun, listening, *_ = reports("r1/3")
    assert begun.begun
    assert listening.listening_port == 4242


def test_stop_ends_a_suite_that_is_under_way(
    controller: FakeController, agent: AgentProcess
) -> None:
    suite = controller.command(suite_command("hangs"))
    wait_for(lambda: len(agent.pids()) >= 4, "a runner with its child")
    assert controller.result(controller.command(stop_command(1))).ok
    assert controller.result(suite).error_kind == "stale"
    wait_for(lambda: len(agent.pids()) == 2, "only agent and standby process")


def test_stop_ends_a_start_that_waits_for_the_standby_process(
    controller: FakeController, start_agent: StartAgent
) -> None:
    agent = start_agent(
        controller.start(), "--standby-argument=--preload=tests.agent.endless_import"
    )
    start = controller.command(start_command(1))
    folder = agent.state_dir / "jobs" / "job" / "a1"
    wait_for(folder.exists, "the folder of the attempt")
    assert controller.result(controller.command(stop_command(1))).ok
    result = controller.result(start)
    assert (result.ok, result.error_kind) == (False, "stale")
    assert "stopped before this was done" in result.detail


def test_metrics_page_counts_what_happened(
    controller: FakeController, start_agent: StartAgent
) -> None:
    agent = start_agent(controller.start(), "--metrics-port", "0")
    start_job(controller)
    controller.progress("job", 1)
    os.kill(agent.worker_pid(1, 1), signal.SIGKILL)
    controller.exit_of("job", 1, 1)
    address = controller.hellos[0].metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert "outlast_agent_workers_running 1.0" in text
    assert 'outlast_agent_worker_exits_total{outcome="signal"} 1.0' in text
    assert "outlast_agent_connected 1.0" in text
    assert "outlast_agent_sessions_total 1.0" in text


def log_query(
    query_id: str, *, follow: bool, rank: int | None = None, job_id: str = "job"
) -> agents_pb2.ControllerMessage:
    query = agents_pb2.LogQuery(query_id=query_id, job_id=job_id, rank=rank, follow=follow)
    return agents_pb2.ControllerMessage(log_query=query)


def chunks(controller: FakeController, query_id: str) -> list[agents_pb2.LogChunk]:
    return [
        message.log_chunk
        for _, message in controller.received
        if message.WhichOneof("kind") == "log_chunk" and message.log_chunk.query_id == query_id
    ]


def logged(controller: FakeController, query_id: str) -> str:
    return b"".join(chunk.data for chunk in chunks(controller, query_id)).decode()
