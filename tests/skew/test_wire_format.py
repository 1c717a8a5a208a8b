"""Peers of the previous release and of this one mean the same by what they send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default

from outlast.v1 import (  # noqa: F401  # their protos are in the default pool then
    access_pb2,
    agents_pb2,
    code_pb2,
    diagnostics_pb2,
    enrollment_pb2,
    incidents_pb2,
    jobs_pb2,
    nodes_pb2,
    ranks_pb2,
    trends_pb2,
)
from outlast.v1.agents_pb2 import AgentMessage, ControllerMessage, Heartbeat, RankSummary
from tests.skew.previous import as_of_then, methods, recorded
from tests.skew.wire_format import differences

# What was taken away on purpose, and why neither side misses it.
GONE = {
    # The name of the rank's last operation, for people. Controllers of 0.1.0 show none, those of
    # today read last_operation, which an agent of 0.1.0 does not have.
    "outlast.v1.RankSummary.last_op = 7: was optional string last_op, is gone, its number is "
    "reserved",
    "outlast.v1.WorkerExit.last_op = 8: was optional string last_op, is gone, its number is "
    "reserved",
}


def then() -> list[FileDescriptorProto]:
    return [file for file in recorded().file if file.package == "outlast.v1"]


def now() -> list[FileDescriptorProto]:
    files = []
    for file in then():
        found = FileDescriptorProto()
        Default().FindFileByName(file.name).CopyToProto(found)  # type: ignore[no-untyped-call]
        files.append(found)
    return files


def test_everything_of_the_previous_release_means_the_same() -> None:
    assert sorted(differences(then(), now()) ^ GONE) == []


def retyped(field: FieldDescriptorProto) -> None:
    field.type = FieldDescriptorProto.TYPE_INT64


def renamed(field: FieldDescriptorProto) -> None:
    field.name = "name"


def repeated(field: FieldDescriptorProto) -> None:
    field.label = FieldDescriptorProto.LABEL_REPEATED


def renumbered(field: FieldDescriptorProto) -> None:
    field.number = 99


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (retyped, "is optional int64 node_id"),
        (renamed, "is optional string name"),
        (repeated, "is repeated string node_id"),
        (renumbered, "is gone, its number is free"),
    ],
)
def test_a_field_that_changes_is_named(
    change: Callable[[FieldDescriptorProto], None], found: str
) -> None:
    changed = then()
    (agents,) = (file for file in changed if file.name == "outlast/v1/agents.proto")
    (hello,) = (message for message in agents.message_type if message.name == "Hello")
    change(hello.field[0])
    name = "outlast.v1.Hello.node_id = 1"
    assert differences(then(), changed) == {f"{name}: was optional string node_id, {found}"}


def test_a_method_that_changes_and_a_message_that_is_gone_are_named() -> None:
    changed = then()
    (agents,) = (file for file in changed if file.name == "outlast/v1/agents.proto")
    agents.service[0].method[0].client_streaming = False
    (place,) = (at for at, each in enumerate(agents.message_type) if each.name == "Welcome")
    del agents.message_type[place]
    takes, gives = ".outlast.v1.AgentMessage", ".outlast.v1.ControllerMessage"
    assert differences(then(), changed) == {
        f"Agents.Session: was (stream {takes}) returns (stream {gives}), "
        f"is ({takes}) returns (stream {gives})",
        "outlast.v1.Welcome: gone",
    }


def test_what_the_previous_release_did_not_know_is_left_out() -> None:
    session = methods()["/outlast.v1.Agents/Session"]
    rank = RankSummary(job_id="j", rank=3, stalled_s=4.0, process_state="T")
    message = AgentMessage(heartbeat=Heartbeat(seq=7, ranks=[rank], clock_sent_ns=5))
    left = as_of_then(message.SerializeToString(), session.request)
    assert left is not None
    old_rank = RankSummary(job_id="j", rank=3)
    assert AgentMessage.FromString(left) == AgentMessage(
        heartbeat=Heartbeat(seq=7, ranks=[old_rank])
    )
    # Of a kind that it did not have.
    echo = ControllerMessage()
    echo.clock_echo.sent_ns = 1
    assert as_of_then(echo.SerializeToString(), session.response) is None
    # All of its values are zeros, and it says something all the same.
    acked = ControllerMessage(acked_event_seq=0)
    assert as_of_then(acked.SerializeToString(), session.response) == acked.SerializeToString()
