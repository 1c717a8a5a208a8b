"""What the previous release, 0.1.0, says over gRPC, and nothing that came after it.

`outlast_0_1_0.binpb` has its protos as a FileDescriptorSet. At the next release it is made again,
under that version's name, in a checkout of the commit that is released:

    python -m grpc_tools.protoc -Iproto --include_imports \\
        --descriptor_set_out=outlast_X_Y_Z.binpb proto/outlast/v1/*.proto
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

VERSION = "0.1.0"
_RECORD = Path(__file__).with_name("outlast_0_1_0.binpb")


def recorded() -> FileDescriptorSet:
    """The protos of the previous release, with what they import."""
    return FileDescriptorSet.FromString(_RECORD.read_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The messages of a method of the previous release."""

    request: type[Message]
    response: type[Message]


@lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Every method of the previous release by its path, such as /outlast.v1.Agents/Session."""
    files = recorded().file
    # Of its own: the default pool has today's messages of the same names.
    pool = DescriptorPool()
    for file in files:
        pool.Add(file)  # type: ignore[no-untyped-call]
    services = [
        pool.FindServiceByName(f"{file.package}.{service.name}")  # type: ignore[no-untyped-call]
        for file in files
        for service in file.service
    ]
    return {
        f"/{service.full_name}/{method.name}": Method(
            request=GetMessageClass(method.input_type),
            response=GetMessageClass(method.output_type),
        )
        for service in services
        for method in service.methods
    }


def as_of_then(data: bytes, kind: type[Message]) -> bytes | None:
    """A message without what the previous release did not know, wherever it is inside.

    None where it is a choice and nothing of it is left: its sender would not have sent it.
    """
    message = kind.FromString(data)
    message.DiscardUnknownFields()  # type: ignore[attr-defined]
    choices = kind.DESCRIPTOR.oneofs
    is_choice = any(len(each.fields) == len(kind.DESCRIPTOR.fields) for each in choices)
    if is_choice and not message.ListFields():
        return None
    return message.SerializeToString()
