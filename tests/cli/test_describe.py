"""Jobs, incidents and figures in words; messages as plain values."""

from __future__ import annotations

import io
import json
import math
import shlex
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2

from controller.core.states import TERMINAL, JobState
from outlast.cli import describe, describe_incident, output
from outlast.cli.fleet import _node_row
from outlast.cli.follow import Snapshot
from outlast.cli.loglines import MAX_LINE_BYTES, Line, Lines, Missing
from outlast.cli.view import plain_lines, render, sparkline
from outlast.durations import duration
from outlast.v1 import common_pb2, incidents_pb2, jobs_pb2, nodes_pb2

NOW_S = 10_000.0


def job(**changes: Any) -> jobs_pb2.Job:
    spec = struct_pb2.Struct()
    json_format.ParseDict({"data": {"global_batch": 8}, "model": {"seq_len": 100}}, spec)
    facts: dict[str, Any] = {
        "job_id": "gpt-abcde",
        "name": "gpt",
        "state": "RUNNING",
        "reason": "every rank completes steps",
        "state_since_s": NOW_S - 125,
        "submitted_s": NOW_S - 200,
        "attempt": 2,
        "nodes": ["node-0", "node-1"],
        "step": 50,
        "total_steps": 200,
        "loss": 2.5,
        "tokens_per_s": 1_000.0,
        "time_left_s": 120.0,
        "committed_step": 40,
        "retry_left": 9,
        "restarts": 1,
        "spec": spec,
    }
    return jobs_pb2.Job(**facts | changes)


def incident(**changes: Any) -> incidents_pb2.Incident:
    facts: dict[str, Any] = {
        "incident_id": "gpt-abcde.i1",
        "job_id": "gpt-abcde",
        "attempt": 1,
        "state": "CLOSED",
        "cause": "worker_killed",
        "action": "restart_in_place",
        "reason": "rank 3 on node-1 failed",
        "culprit_nodes": ["node-1"],
        "evidence": [
            incidents_pb2.Evidence(kind="worker_exit", node="node-1", rank=3, detail="SIGKILL")
        ],
        "timeline": [
            common_pb2.TimelineEntry(phase="fault", at_s=5.0, detail="SIGKILL"),
            common_pb2.TimelineEntry(phase="detected", at_s=5.25),
        ],
        "opened_s": 5.25,
        "detection_s": 0.25,
        "recovery_s": 1.5,
        "steps_redone": 1,
    }
    return incidents_pb2.Incident(**facts | changes)


def test_where_a_person_let_the_job_go_on_is_said() -> None:
    chosen = [
        common_pb2.ChosenStart(step=0, attempt=1, url_step=-1),
        common_pb2.ChosenStart(step=1_040, attempt=2, url_step=-1),
        common_pb2.ChosenStart(step=0, attempt=4, url="s3://saved", url_step=7),
    ]
    assert [line for _, line in describe.chosen(job(chosen_starts=chosen))] == [
        "attempt 2 began from scratch, as chosen; all before it is given up",
        "attempt 3 began from checkpoint 1,040, as chosen; what was trained beyond step 1,040 is "
        "given up",
        "attempt 5 began from checkpoint 7 in s3://saved, as chosen; all before it is given up",
    ]
    assert describe.chosen(job()) == []


def test_the_command_that_trains_on_can_be_pasted() -> None:
    ended = job(state="SUCCEEDED", committed_step=100, total_steps=100)
    ended.checkpoint_url = "file:///a/out dir/tiny"
    words = describe.how_to_continue(ended).partition(": outlast ")[2].partition(" (steps")[0]
    assert shlex.split(words) == [
        *("submit", "SPEC", "--set", "checkpoint.load=file:///a/out dir/tiny"),
        *("--set", "steps=200"),
    ]
    ended.checkpoint_url = "s3://bucket/tiny"
    assert " --set checkpoint.load=s3://bucket/tiny --set " in describe.how_to_continue(ended)


def test_what_was_left_out_is_said_and_is_no_loss() -> None:
    ranges = [common_pb2.StepRange(first=7, last=7), common_pb2.StepRange(first=1100, last=1199)]
    lines = dict(describe.job_lines(job(skipped=ranges, loss=math.nan), NOW_S))
    assert (
        lines["left out"] == "the batches of steps 7, 1,100-1,199: their loss was NaN or Inf, twice"
    )
    assert "loss" not in lines["progress"]
    assert "left out" not in dict(describe.job_lines(job(), NOW_S))


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_its_sentence(state: JobState) -> None:
    sentence = describe.headline(job(state=state.value))
    assert sentence != f"It is {state}."
    assert describe.is_training(job(state=state.value)) == (state is JobState.RUNNING)


def test_a_job_that_waits_for_its_last_checkpoint_is_not_called_training() -> None:
    waiting = job(step=200, total_steps=200)
    assert "all steps are done" in describe.headline(waiting)
    assert not describe.is_training(waiting)
    assert "rate" not in dict(describe.job_lines(waiting, NOW_S))


def test_finished_states_are_the_controllers_own() -> None:
    assert set(describe.FINISHED) == {state.value for state in TERMINAL}


def test_status_says_everything_about_a_running_job() -> None:
    lines = dict(describe.job_lines(job(), NOW_S))
    assert lines["state"] == "RUNNING for 2 min 5 s"
    assert lines["progress"] == "step 50 of 200 (25 %), training loss 2.5000"
    assert lines["rate"] == "1,000 tokens/s; done in about 2 min 0 s"
    assert lines["attempt"] == "2 (1 restart; retry budget remaining: 9)"
    assert lines["checkpoint"] == "step 40 is committed to storage, 10 steps behind"


def test_status_of_a_new_job_promises_nothing() -> None:
    new = jobs_pb2.Job(job_id="a", state="QUEUED", total_steps=10, reason="no nodes")
    lines = dict(describe.job_lines(new, NOW_S))
    assert "rate" not in lines
    assert lines["nodes"] == "none"
    assert lines["checkpoint"] == "none committed to storage yet"
    assert describe.eta_s(new) is None


@pytest.mark.parametrize("state", describe.FINISHED)
def test_status_of_an_ended_job_has_no_retry_budget(state: str) -> None:
    assert dict(describe.job_lines(job(state=state), NOW_S))["attempt"] == "2 (1 restart)"


def test_training_job_says_how_well_it_uses_its_devices() -> None:
    running = job(
        ranks=8,
        grad_norm=1.25,
        learning_rate=3e-4,
        model_flops_per_s=4e14,
        full_model_flops_per_s=5e14,
    )
    lines = dict(describe.job_lines(running, NOW_S))
    assert lines["rate"].startswith("1,000 tokens/s (125 a rank)")
    assert lines["last step"] == "gradient norm 1.25, learning rate 0.0003"
    achieved = "400 TFLOP/s (full attention counted: 500 TFLOP/s)"
    assert lines["model FLOPs"] == achieved
    running.device, running.peak_flops_per_s = "h100", 8e15
    share = f"{achieved}; MFU 5.0 % (6.2 %) of 8 x h100 at 1 PFLOP/s"
    assert describe.model_flops(running) == share
    running.device, running.peak_flops_per_s = "matmul check", 8e15
    share = f"{achieved}; MFU 5.0 % (6.2 %) of 8 x 1 PFLOP/s, as the matmul check has measured"
    assert describe.model_flops(running) == share


def test_training_job_says_where_the_time_of_a_step_goes() -> None:
    split = common_pb2.StepSplit(
        data_s=0.001, forward_s=0.25, backward_s=0.5, optimizer_s=0.02, pp_exposed_s=1.5
    )
    split.data_wait_s = 0.0005
    use = jobs_pb2.StepUse(
        split=split,
        bubble=0.351,
        expected_bubble=1 / 3,
        peak_memory_bytes=3 * 2**29,
        expected_memory_bytes=2**30,
    )
    running = job(step_use=use)
    lines = dict(describe.job_lines(running, NOW_S))
    work, waiting = lines["step time"].splitlines()
    assert work == "data 1 ms, forward 250 ms, backward 500 ms, optimizer 20 ms"
    assert waiting == "waiting for others: tp 0 ms, pp 1.5 s, dp 0 ms, other 0 ms; for data: 0.5 ms"
    running.step_use.split.garbage_collection_s = 0.0002
    lines = dict(describe.job_lines(running, NOW_S))
    assert lines["step time"].splitlines()[0] == f"{work}, garbage collection 0.2 ms"
    assert lines["bubble"] == "35.1 % of the pipeline's time, 33.3 % in theory"
    assert lines["memory"] == "1.5 GiB at most on a rank; 1.0 GiB estimated"
    found = output.facts(running)["step_use"]
    assert (found["bubble"], found["split"]["forward_s"]) == (0.351, 0.25)
    # One stage has no bubble; before the first step nothing is known.
    running.step_use.expected_bubble = 0
    assert "bubble" not in dict(describe.job_lines(running, NOW_S))
    assert "step time" not in dict(describe.job_lines(job(), NOW_S))
    assert output.facts(job())["step_use"] is None


def test_finished_job_says_how_long_it_took() -> None:
    lines = dict(describe.job_lines(job(state="SUCCEEDED", finished_s=NOW_S - 140), NOW_S))
    assert lines["took"].startswith("1 min 0 s")


def test_incident_tells_its_story() -> None:
    lines = describe_incident.incident_lines(incident(), NOW_S)
    text = "\n".join(f"{label} {line}" for label, line in lines)
    assert "node-1 rank 3: SIGKILL" in text
    assert "+   0.250 s  detected" in text
    assert "detected after 0.25 s, training again after 1.5 s, 1 step redone" in text


def test_long_evidence_is_cut_short() -> None:
    items = [incidents_pb2.Evidence(node="node-0", detail=f"{n}" * 1_000) for n in range(9)]
    lines = [line for _, line in describe_incident.incident_lines(incident(evidence=items), NOW_S)]
    assert "and 5 more (all: --json)" in lines
    assert max(len(line) for line in lines) < 200


def test_open_incident_says_what_is_not_known_yet() -> None:
    fresh = incidents_pb2.Incident(incident_id="x.i1", state="OPEN")
    text = "\n".join(line for _, line in describe_incident.incident_lines(fresh, NOW_S))
    assert "not known yet" in text
    assert "the verdict is not in yet" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.423, "0.42 s"),
        (12.34, "12.3 s"),
        (200, "3 min 20 s"),
        (59.96, "60.0 s"),
        (3_725, "1 h 2 min"),
        (200_000, "2 d 7 h"),
        (-1, "0.00 s"),
        (math.inf, "unknown"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_are_binary() -> None:
    assert describe.size(1023) == "1023 B"
    assert describe.size(1536) == "1.5 KiB"
    assert describe.size(3 * 2**40) == "3.0 TiB"


def test_message_facts_keep_integers_and_absent_fields() -> None:
    facts = output.facts(job(finished_s=None))
    assert facts["step"] == 50
    assert facts["finished_s"] is None
    assert facts["nodes"] == ["node-0", "node-1"]
    assert facts["spec"] == {"data": {"global_batch": 8}, "model": {"seq_len": 100}}
    assert json.loads(json.dumps(facts)) == facts


def test_message_facts_nest() -> None:
    facts = output.facts(incident())
    assert facts["evidence"][0]["rank"] == 3
    assert facts["timeline"][1] == {"phase": "detected", "at_s": 5.25, "detail": ""}
    assert facts["closed_s"] is None


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json_line({"loss": math.nan, "all": [math.inf, 1.0]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [None, 1.0]}


def test_table_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("A", "LONG"), [("wide cell", "x"), ("b", "y")], empty="none")
    assert capsys.readouterr().out == "A          LONG\nwide cell  x\nb          y\n"
    output.print_table(("A",), [], empty="none")
    assert capsys.readouterr().out == "none\n"


def test_log_lines_are_put_together_per_rank() -> None:
    lines = Lines()
    assert lines.take(0, b"hel") == []
    assert labelled(lines.take(1, b"other\n")) == ["[rank 1] other"]
    assert labelled(lines.take(0, b"lo\nwor")) == ["[rank 0] hello"]
    assert labelled(lines.rest()) == ["[rank 0] wor"]


def labelled(lines: list[Line]) -> list[str]:
    return [line.labelled() for line in lines]


def test_log_lines_of_several_attempts_are_kept_apart() -> None:
    lines = Lines()
    assert lines.take(0, b"hel", 1.5, attempt=1, node="n0") == []
    (line,) = lines.take(0, b"new\n", 2.0, attempt=2, node="n1")
    assert line.labelled(is_full=True) == f"{describe.clock(2.0)} [attempt 2 n1 rank 0] new"
    (rest,) = lines.rest()
    assert rest.facts("job") == {
        "time": "1970-01-01T00:00:01.500Z",
        "job_id": "job",
        "attempt": 1,
        "node": "n0",
        "rank": 0,
        "line": "hel",
    }


def test_log_lines_have_the_time_at_which_they_were_begun() -> None:
    lines = Lines()
    one, two = describe.clock(100.0), describe.clock(200.0)
    assert labelled(lines.take(0, b"a\nhel", 100.0)) == [f"{one} [rank 0] a"]
    assert labelled(lines.take(0, b"lo\nb\nc", 200.0)) == [
        f"{one} [rank 0] hello",
        f"{two} [rank 0] b",
    ]
    assert labelled(lines.rest()) == [f"{two} [rank 0] c"]


def test_log_line_without_end_is_not_held_for_ever() -> None:
    lines = Lines()
    assert len(lines.take(0, b"x" * (MAX_LINE_BYTES + 1))) == 1
    assert lines.rest() == []


def test_sparkline_goes_down_with_the_loss() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline([float(n) for n in range(1_000)], width=40)) == 40
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_plain_lines_tell_only_what_changed() -> None:
    first = Snapshot(job=job())
    assert plain_lines(first, first) == []
    later = Snapshot(job=job(state="SUSPENDING", reason="rank 3 died"), incidents=(incident(),))
    lines = plain_lines(first, later)
    assert lines[0] == "SUSPENDING (attempt 2): rank 3 died"
    assert "incident gpt-abcde.i1 opened: worker killed" in lines
    assert "incident gpt-abcde.i1: worker killed: rank 3 on node-1 failed" in lines
    away = Snapshot(job=job(), trouble="the controller does not answer")
    assert plain_lines(first, away) == ["the controller does not answer"]


def test_plain_lines_tell_what_a_job_waits_for() -> None:
    first = Snapshot(job=job(state="QUEUED", reason="waiting for 4 nodes; none is connected"))
    later = Snapshot(job=job(state="QUEUED", reason="waiting for 4 nodes; 3 are connected"))
    assert plain_lines(first, later) == ["QUEUED (attempt 2): waiting for 4 nodes; 3 are connected"]
    # What it does while it works on is no news.
    first = Snapshot(job=job(state="PREFLIGHT", reason="checking node-0, node-1 before use"))
    later = Snapshot(job=job(state="PREFLIGHT", reason="checking node-1 before use"))
    assert plain_lines(first, later) == []
    note = incidents_pb2.Incident(
        incident_id="a.i1", cause="disk", reason="node-0: 4 % left", is_note=True, state="OPEN"
    )
    noted = Snapshot(job=later.job, incidents=(note,))
    assert plain_lines(later, noted) == ["note a.i1: disk: node-0: 4 % left"]
    assert plain_lines(noted, noted) == []


def test_live_view_fits_80_columns() -> None:
    from rich.console import Console

    snapshot = Snapshot(
        job=job(job_id="a" * 60, reason="r" * 200),
        nodes=(
            nodes_pb2.Node(node_id="node-0", state="ASSIGNED", connected=True, job_id="a" * 60),
        ),
        incidents=(incident(incident_id=f"{'a' * 60}.i1"),),
    )
    page = io.StringIO()
    Console(width=80, file=page, force_terminal=True, color_system=None).print(
        render(snapshot, [], NOW_S)
    )
    text = page.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert "worker killed" in joined
    assert "1 step redone" in joined


def test_live_view_shows_job_nodes_incidents_and_trouble() -> None:
    from rich.console import Console

    snapshot = Snapshot(
        job=job(),
        nodes=(
            nodes_pb2.Node(node_id="node-0", state="ASSIGNED", connected=True, job_id="gpt-abcde"),
            nodes_pb2.Node(node_id="node-1", state="RETIRED", reason="[lost]"),
        ),
        incidents=(incident(),),
        steps=(common_pb2.StepReport(step=1, loss=2.0), common_pb2.StepReport(step=2, loss=1.0)),
        trouble="the controller does not answer",
    )
    page = io.StringIO()
    # As on a terminal, where some parts of rich draw differently.
    Console(width=120, file=page, force_terminal=True, color_system=None).print(
        render(snapshot, ["12 s: killed rank 3"], NOW_S)
    )
    text = page.getvalue()
    for word in ("gpt-abcde", "RUNNING", "step 50 of 200", "node-1", "RETIRED", "i1"):
        assert word in text
    assert "the controller does not answer" in text
    assert "killed rank 3" in text


def test_missing_logs_name_node_ranks_and_reason() -> None:
    def chunk(node: str, reason: str, first: int, num: int) -> jobs_pb2.LogsResponse:
        missing = jobs_pb2.MissingLogs(reason=reason, first_rank=first, num_ranks=num)
        return jobs_pb2.LogsResponse(node=node, missing=missing)

    missing = Missing()
    missing.take(chunk("n1", "nothing was heard of it for 6 s", 2, 2))
    missing.take(chunk("n2", "it is not connected", 4, 1))
    missing.take(chunk("n3", "it is not connected", 0, 0))
    missing.take(chunk("", "the job has no node for them at present", 6, 2))
    assert missing.messages == (
        "logs of node n1 (ranks 2-3) are missing: nothing was heard of it for 6 s",
        "logs of node n2 (rank 4) are missing: it is not connected",
        "logs of node n3 are missing: it is not connected",
        "logs of ranks 6-7 are missing: the job has no node for them at present",
    )
    assert missing.take(chunk("n1", "", 2, 2)) == "node n1 (ranks 2-3) answers again"
    assert len(missing.messages) == 3


def test_node_that_is_connected_and_silent_shows_for_how_long() -> None:
    node = nodes_pb2.Node(node_id="n1", state="READY", connected=True, last_heartbeat_s=100.0)
    assert _node_row(node, 145.0)[3] == ""
    node.late = True
    assert _node_row(node, 145.0)[3] == "45.0 s"
