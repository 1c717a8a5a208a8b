"""In which ways two sets of protos differ, as far as peers of both would notice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

_Labels, _Types = FieldDescriptorProto.Label, FieldDescriptorProto.Type


def differences(old: Iterable[FileDescriptorProto], new: Iterable[FileDescriptorProto]) -> set[str]:
    """What of `old` is not in `new`, or means something else there; each begins with its name."""
    then, now = _Protos(old), _Protos(new)
    return {
        *_of_methods(then, now),
        *(line for name in then.messages for line in _of_message(name, then, now)),
        *(line for name in then.enums for line in _of_enum(name, then, now)),
    }


class _Protos:
    """Everything in some files by its full name."""

    def __init__(self, files: Iterable[FileDescriptorProto]) -> None:
        self.methods: dict[str, str] = {}
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        for file in files:
            for service in file.service:
                for method in service.method:
                    streams = (method.client_streaming, method.server_streaming)
                    takes, gives = (("stream " if each else "") for each in streams)
                    meaning = f"({takes}{method.input_type}) returns ({gives}{method.output_type})"
                    self.methods[f"{service.name}.{method.name}"] = meaning
            self._add(file.package, file.message_type, file.enum_type)

    def _add(
        self,
        within: str,
        messages: Iterable[DescriptorProto],
        enums: Iterable[EnumDescriptorProto],
    ) -> None:
        for enum in enums:
            self.enums[f"{within}.{enum.name}"] = enum
        for message in messages:
            name = f"{within}.{message.name}"
            self.messages[name] = message
            self._add(name, message.nested_type, message.enum_type)


def _of_methods(then: _Protos, now: _Protos) -> Iterator[str]:
    for name, meaning in then.methods.items():
        found = now.methods.get(name, "gone")
        if found != meaning:
            yield f"{name}: was {meaning}, is {found}"


def _of_message(name: str, then: _Protos, now: _Protos) -> Iterator[str]:
    old, new = then.messages[name], now.messages.get(name)
    if new is None:
        yield f"{name}: gone"
        return
    present = {field.number: _meaning(field, new) for field in new.field}
    reserved = {number for each in new.reserved_range for number in range(each.start, each.end)}
    for field in old.field:
        meaning, found = _meaning(field, old), present.get(field.number)
        if found == meaning:
            continue
        is_reserved = "gone, its number is reserved"
        gone = is_reserved if field.number in reserved else "gone, its number is free"
        yield f"{name}.{field.name} = {field.number}: was {meaning}, is {found or gone}"
    for each in old.reserved_range:
        for number in sorted(set(range(each.start, each.end)) - reserved):
            yield f"{name} {number}: was reserved, is {present.get(number, 'free')}"


def _meaning(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """All that a peer must agree on besides the number."""
    words = [_Labels.Name(field.label).removeprefix("LABEL_").lower()]
    if field.proto3_optional:
        words = ["explicitly optional"]
    elif field.HasField("oneof_index"):
        words = [f"one of {message.oneof_decl[field.oneof_index].name}:"]
    kind = field.type_name or _Types.Name(field.type).removeprefix("TYPE_").lower()
    return " ".join((*words, kind, field.name))


def _of_enum(name: str, then: _Protos, now: _Protos) -> Iterator[str]:
    old, new = then.enums[name], now.enums.get(name)
    if new is None:
        yield f"{name}: gone"
        return
    present = {value.number: value.name for value in new.value}
    for value in old.value:
        found = present.get(value.number, "gone")
        if found != value.name:
            yield f"{name}.{value.name} = {value.number}: is {found}"
