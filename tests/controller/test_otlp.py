"""Logs by OTLP: what arrives at a receiver, and what happens where there is none."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from controller.core.causes import Cause
from controller.core.changes import IncidentPut, State
from controller.core.incident_record import IncidentRecord
from controller.core.states import IncidentState
from controller.otlp import metrics
from controller.otlp.export import OtlpError, Target, start, target_of
from controller.otlp.incidents import changed, record_of, states_of
from controller.otlp.queue import MAX_BATCH, ExportQueue
from controller.otlp.records import Record
from outlast.ids import Attempt, IncidentId, JobId, NodeId
from tests.controller.otlp_receiver import Received, grpc_receiver, http_receiver
from tests.controller.processes import controller, wait_for

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _root_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what a test adds to it."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_log_of_a_service_arrives_with_what_it_names(protocol: str) -> None:
    receivers: dict[str, Callable[[], AbstractContextManager[Received]]] = {
        "http/protobuf": http_receiver,
        "grpc": grpc_receiver,
    }
    logger = logging.getLogger("controller.test")
    with receivers[protocol]() as received:
        variables = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        queue = start("outlast-agent", received.url, variables, {"outlast.node": "n7"})
        assert queue is not None
        logger.warning("node suspected: job=%s attempt=%d rank=%d", "gpt-1", 2, 5)
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("failed")
        # An export must not lead to the next.
        logging.getLogger("opentelemetry.exporter").error("not this")
        queue.close()
        (suspected,) = received.find("node suspected")
        (failed,) = received.find("failed")
        assert received.find("not this") == []
    body, severity, scope, attributes = suspected
    assert (body, severity, scope) == (
        "node suspected: job=gpt-1 attempt=2 rank=5",
        "WARNING",
        "controller.test",
    )
    assert (
        attributes.items()
        >= {
            "service.name": "outlast-agent",
            "outlast.node": "n7",
            "outlast.job": "gpt-1",
            "outlast.attempt": 2,
            "outlast.rank": 5,
        }.items()
    )
    assert "ValueError: no" in str(failed[3]["exception.stacktrace"])
    assert queue.counts() == {"exported": 2, "dropped": 0, "failed": 0}


def test_a_controller_exports_its_log(tmp_path: Path) -> None:
    with http_receiver() as received:
        with controller(tmp_path / "state", "--otlp-endpoint", received.url):
            wait_for(lambda: received.find("controller listens"), "it has arrived")
        # What was written at its end, too.
        assert received.find("controller stops")
        assert received.find("controller listens")[0][3]["service.name"] == "outlast-controller"


def record(number: int) -> Record:
    return Record(at_ns=number, body=str(number))


def test_who_puts_a_record_never_waits_and_the_oldest_are_dropped() -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    exported: list[str] = []

    def export(records: Sequence[Record]) -> bool:
        begun.set()
        may_go_on.wait(DEADLINE_S)
        exported.extend(each.body for each in records)
        return True

    queue = ExportQueue(export, max_records=1_000)
    for number in range(MAX_BATCH):
        queue.put(record(number))
    assert begun.wait(DEADLINE_S)
    # Nobody takes these meanwhile.
    for number in range(10_000, 11_500):
        queue.put(record(number))
    queue.left_out(7)
    assert queue.counts() == {"exported": 0, "dropped": 507, "failed": 0}
    may_go_on.set()
    queue.close()
    assert exported == [str(number) for number in (*range(MAX_BATCH), *range(10_500, 11_500))]
    queue.put(record(1))
    (family,) = metrics.collect(queue)
    assert {sample.labels["outcome"]: sample.value for sample in family.samples} == {
        "exported": MAX_BATCH + 1_000,
        "dropped": 507,
        "failed": 0,
    }


def test_what_is_not_taken_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([False, ConnectionError("gone"), True])

    def export(records: Sequence[Record]) -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    queue = ExportQueue(export)
    for failed, exported in ((1, 0), (2, 0), (2, 1)):
        queue.put(record(1))
        wait_for(
            lambda failed=failed, exported=exported: (  # type: ignore[misc]
                (queue.counts()["failed"], queue.counts()["exported"]) == (failed, exported)
            ),
            "it was tried",
        )
    queue.close()
    said = [each.message for each in caplog.records if "cannot be exported" in each.message]
    assert len(said) == 1


def test_where_logs_go_to() -> None:
    base = "http://collector:4318"
    assert target_of("", {}) is None
    assert target_of("", {"OTEL_EXPORTER_OTLP_ENDPOINT": base}) == Target(endpoint="")
    assert target_of(base, {}) == Target(endpoint=base, protocol="http/protobuf")
    assert target_of(base, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == Target(
        endpoint=base, protocol="grpc"
    )
    with pytest.raises(OtlpError, match="--otlp-endpoint is 'collector:4318'; allowed: http://"):
        target_of("collector:4318", {})
    with pytest.raises(OtlpError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; allowed: "):
        target_of(base, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_without_the_extra_an_option_is_refused_and_a_variable_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry._logs", None)
    with pytest.raises(OtlpError, match=r"pip install outlast\[otlp\]"):
        start("outlast-agent", "http://127.0.0.1:1", {}, {})
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert start("outlast-agent", "", variables, {}) is None
    assert "though OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text
    assert start("outlast-agent", "", {}, {}) is None


def incident(state: IncidentState, number: int = 1) -> IncidentRecord:
    return IncidentRecord(
        incident=IncidentId(f"gpt-1.i{number}"),
        job=JobId("gpt-1"),
        attempt=Attempt(2),
        state=state,
        opened_s=1.0,
        fault_s=1.0,
        fault_step=40,
        cause=Cause.WORKER_KILLED,
        culprits=(NodeId("n3"),),
        reason="rank 3 was killed",
    )


def test_an_incident_is_exported_when_it_opens_and_at_each_change_of_its_state() -> None:
    state = State()
    state.apply(IncidentPut(incident=incident(IncidentState.CLOSED, number=0)))
    known = states_of(state)
    assert changed(state, known) == []
    state.apply(IncidentPut(incident=incident(IncidentState.OPEN)))
    (opened,) = changed(state, known)
    made = record_of(opened, 5.0)
    assert made.body == "incident gpt-1.i1 is OPEN: worker_killed; rank 3 was killed"
    assert (made.level, made.at_ns) == (logging.WARNING, 5_000_000_000)
    assert made.attributes == {
        "outlast.incident": "gpt-1.i1",
        "outlast.incident.state": "OPEN",
        "outlast.incident.cause": "worker_killed",
        "outlast.incident.nodes": "n3",
        "outlast.job": "gpt-1",
        "outlast.attempt": 2,
        "outlast.step": 40,
    }
    known = states_of(state)
    assert changed(state, known) == []
    state.apply(IncidentPut(incident=incident(IncidentState.CLOSED)))
    (closed,) = changed(state, known)
    assert record_of(closed, 6.0).level == logging.INFO
