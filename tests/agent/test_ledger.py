"""The ledger alone: commands at most once, attempts fenced, events kept until acknowledged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.agent.core import ledger as ledger_module
from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.ledger import CommandKind, CommandLedger, Decision, Fence, Result
from outlast.failures import ErrorKind

DONE = Result(ok=True, detail="done", completed_step=7)


def run(
    ledger: CommandLedger, command_id: str, kind: CommandKind, attempt: int, job_id: str = "job"
) -> Decision:
    """Admit a command and finish it at once if it is to run."""
    admission = ledger.admit(command_id, kind, job_id, attempt)
    if admission.decision is Decision.RUN:
        ledger.finish(command_id, DONE)
    return admission.decision


def test_repeated_command_answers_the_stored_result() -> None:
    ledger = CommandLedger()
    assert ledger.admit("c1", CommandKind.STOP, "job", 1).decision is Decision.RUN
    assert ledger.admit("c1", CommandKind.STOP, "job", 1).decision is Decision.RUNNING
    ledger.finish("c1", DONE)
    again = ledger.admit("c1", CommandKind.STOP, "job", 1)
    assert again.decision is Decision.ANSWERED
    assert again.result == DONE


@pytest.mark.parametrize("first", [CommandKind.START, CommandKind.STOP, CommandKind.FORGET])
def test_start_of_an_attempt_not_newer_than_the_fence_is_stale(first: CommandKind) -> None:
    ledger = CommandLedger()
    assert run(ledger, "c1", first, 3) is Decision.RUN
    for attempt in (1, 2, 3):
        admission = ledger.admit(f"s{attempt}", CommandKind.START, "job", attempt)
        assert admission.decision is Decision.STALE
        assert admission.result is not None
        assert admission.result.error_kind is ErrorKind.STALE
        assert f"attempt {attempt}" in admission.result.detail
        assert "attempt 3 was already" in admission.result.detail
    assert run(ledger, "s4", CommandKind.START, 4) is Decision.RUN
    assert run(ledger, "o1", CommandKind.START, 1, "other") is Decision.RUN


def test_suites_do_not_move_the_fence() -> None:
    ledger = CommandLedger()
    assert run(ledger, "c1", CommandKind.SUITE, 5) is Decision.RUN
    assert ledger.fence("job") == Fence()
    assert run(ledger, "c2", CommandKind.START, 1) is Decision.RUN


def test_attempt_stopped_by_the_agent_itself_is_fenced() -> None:
    ledger = CommandLedger()
    assert run(ledger, "c1", CommandKind.START, 2) is Decision.RUN
    ledger.stop_attempt("job", 2)
    assert ledger.fence("job") == Fence(2, 2)


def test_ledger_survives_as_json() -> None:
    ledger = CommandLedger()
    run(ledger, "c1", CommandKind.START, 1)
    run(ledger, "c2", CommandKind.START, 1)
    run(ledger, "c3", CommandKind.STOP, 1)
    ledger.admit("c4", CommandKind.START, "job", 2)
    document = json.loads(json.dumps(ledger.to_json()))
    loaded = CommandLedger.from_json(document)
    assert loaded.to_json() == ledger.to_json()
    assert loaded.admit("c3", CommandKind.STOP, "job", 1).decision is Decision.ANSWERED
    # What was running died with the agent; it must not start a second time.
    assert loaded.admit("c4", CommandKind.START, "job", 2).decision is Decision.STALE


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2, "results": {}, "fences": {}},
        {"version": 1, "results": [], "fences": {}},
        {"version": 1, "results": {"c": 1}, "fences": {}},
        {"version": 1, "results": {}, "fences": {"job": {"started": "1", "stopped": 0}}},
        {"version": 1, "results": {"c": {"error_kind": "odd"}}, "fences": {}},
    ],
)
def test_foreign_ledger_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"command ledger|ErrorKind"):
        CommandLedger.from_json(document)


def test_ledger_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_FENCES", 2)
    ledger = CommandLedger(max_results=3)
    for number in range(1, 6):
        run(ledger, f"c{number}", CommandKind.START, 1, f"job{number}")
    document = ledger.to_json()
    assert list(document["results"]) == ["c3", "c4", "c5"]  # type: ignore[call-overload]
    assert list(document["fences"]) == ["job4", "job5"]  # type: ignore[call-overload]


commands = st.tuples(
    st.sampled_from([CommandKind.START, CommandKind.STOP, CommandKind.FORGET, CommandKind.SUITE]),
    st.sampled_from(["a", "b"]),
    st.integers(1, 5),
)


@given(
    sent=st.lists(commands, max_size=12),
    order=st.lists(st.integers(0, 11), max_size=40),
    restarts=st.sets(st.integers(0, 39)),
)
def test_any_order_and_repetition_starts_each_attempt_at_most_once_and_in_order(
    sent: list[tuple[CommandKind, str, int]], order: list[int], restarts: set[int]
) -> None:
    ledger = CommandLedger()
    started: dict[str, list[int]] = {"a": [], "b": []}
    stopped = {"a": 0, "b": 0}
    answers: dict[str, Result] = {}
    for position, index in enumerate(order):
        if index >= len(sent):
            continue
        if position in restarts:
            ledger = CommandLedger.from_json(json.loads(json.dumps(ledger.to_json())))
        kind, job_id, attempt = sent[index]
        command_id = f"c{index}"
        admission = ledger.admit(command_id, kind, job_id, attempt)
        if admission.decision is Decision.RUN:
            assert command_id not in answers
            if kind is CommandKind.START:
                assert attempt > stopped[job_id]
                assert attempt > max(started[job_id], default=0)
                started[job_id].append(attempt)
            elif kind is not CommandKind.SUITE:
                stopped[job_id] = max(stopped[job_id], attempt)
            answers[command_id] = Result(ok=True, detail=str(position))
            ledger.finish(command_id, answers[command_id])
        else:
            assert admission.result is not None
            assert admission.result == answers.setdefault(command_id, admission.result)


def seqs(buffer: EventBuffer[str], after: int = 0) -> list[int]:
    return [event.seq for event in buffer.after(after)]


def test_events_are_kept_in_order_until_acknowledged() -> None:
    buffer: EventBuffer[str] = EventBuffer(10)
    for weight in (Weight.LASTING, Weight.STEPS, Weight.PROGRESS, Weight.STEPS):
        buffer.add(weight.name, weight)
    assert seqs(buffer) == [1, 2, 3, 4]
    assert seqs(buffer, after=2) == [3, 4]
    buffer.acknowledge(2)
    buffer.acknowledge(1)
    assert seqs(buffer) == [3, 4]
    assert len(buffer) == 2


def test_acknowledgement_of_another_incarnation_is_ignored() -> None:
    buffer: EventBuffer[str] = EventBuffer(10)
    buffer.add("event", Weight.LASTING)
    buffer.acknowledge(500)
    assert seqs(buffer) == [1]


def test_full_buffer_drops_step_reports_then_progress_then_the_oldest() -> None:
    buffer: EventBuffer[str] = EventBuffer(3)
    for weight in (Weight.LASTING, Weight.PROGRESS, Weight.STEPS):
        buffer.add("", weight)
    buffer.add("", Weight.LASTING)
    assert seqs(buffer) == [1, 2, 4]
    buffer.add("", Weight.LASTING)
    assert seqs(buffer) == [1, 4, 5]
    buffer.add("", Weight.LASTING)
    assert seqs(buffer) == [4, 5, 6]
    assert buffer.num_dropped == 3


def test_buffer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_events is 0"):
        EventBuffer(0)


@given(
    bound=st.integers(1, 6),
    actions=st.lists(st.one_of(st.sampled_from(list(Weight)), st.integers(0, 30)), max_size=40),
)
def test_buffer_keeps_what_weighs_most_within_its_bound(
    bound: int, actions: list[Weight | int]
) -> None:
    buffer: EventBuffer[Weight] = EventBuffer(bound)
    model: dict[int, Weight] = {}
    for action in actions:
        if isinstance(action, Weight):
            model[buffer.add(action, action)] = action
            if len(model) > bound:
                del model[min(model, key=lambda seq: (model[seq], seq))]
        else:
            buffer.acknowledge(action)
            if action <= buffer.last_seq:
                model = {seq: weight for seq, weight in model.items() if seq > action}
        assert {event.seq: event.payload for event in buffer.after(0)} == model
        assert seqs_sorted(buffer)
        assert len(buffer) <= bound


def seqs_sorted(buffer: EventBuffer[Weight]) -> bool:
    numbers = [event.seq for event in buffer.after(0)]
    return numbers == sorted(numbers)
