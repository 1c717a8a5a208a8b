"""What an HTTP request says, as the message of a gRPC request."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import Request

from controller.web.gateway import RequestError

# Specs have at most a quarter of it.
MAX_BODY_BYTES = 1 << 20
# Of a list: unless another number is asked for, and at most.
PAGE, MOST_OF_PAGE = 100, 1000
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def from_query(
    kind: Descriptor, given: Mapping[str, str], names: Mapping[str, str], path: Mapping[str, str]
) -> Message:
    """A request with these query parameters.

    `names` are the parameters that there are, with the field of each; `path` are fields that the
    path gives.

    Raises:
        RequestError: a parameter is not one of them, or its value is not of its type.
    """
    check_names("parameter", given, names)
    message = GetMessageClass(kind)(**path)
    for name, text in given.items():
        setattr(message, names[name], _value(name, kind.fields_by_name[names[name]], text))
    return message


async def from_body(kind: Descriptor, request: Request, path: Mapping[str, str]) -> Message:
    """A request with the fields of a JSON body, and those of the path.

    Raises:
        RequestError: the body is no JSON object with fields of this request.
    """
    body = await json_body(request)
    for name in path:
        if name in body:
            raise RequestError(400, f"{name}: is given by the path", fields=((name, "is given"),))
    check_names("field", body, [field.name for field in kind.fields if field.name not in path])
    message = GetMessageClass(kind)(**path)
    try:
        return json_format.ParseDict(body, message)
    except json_format.ParseError as error:
        raise RequestError(400, f"the body is not as it should be: {error}") from error


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RequestError: there is none, or it is too large.
    """
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                413, f"the body has more than {MAX_BODY_BYTES} bytes", reason="TOO_LARGE"
            )
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(400, "the body is no JSON object")
    return value


def check_names(what: str, given: Collection[str], allowed: Collection[str]) -> None:
    """Refuse names that are not among the allowed ones."""
    unknown = [name for name in given if name not in allowed]
    if unknown:
        wrong = f"is no {what}; allowed: {', '.join(sorted(allowed)) or 'none'}"
        raise RequestError(400, f"{unknown[0]}: {wrong}", fields=((unknown[0], wrong),))


def whole_number(given: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    """A query parameter that is a whole number of a range.

    Raises:
        RequestError: it is none.
    """
    text = given.get(name)
    if text is None:
        return default
    try:
        if (value := int(text)) in allowed:
            return value
    except ValueError:
        pass
    wrong = f"is {text!r}; allowed: {allowed.start} to {allowed.stop - 1}"
    raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),))


def paged(asked: Message, field: str, given: Mapping[str, str], name: str) -> Message:
    """The request with the size of its page in a field, by the parameter of this name.

    Raises:
        RequestError: it is out of bounds.
    """
    setattr(asked, field, whole_number(given, name, PAGE, range(1, MOST_OF_PAGE + 1)))
    return asked


def number(given: Mapping[str, str], name: str, default: float) -> float:
    """A query parameter that is a number.

    Raises:
        RequestError: it is none.
    """
    text = given.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError as error:
        wrong = f"is {text!r}; allowed: a number"
        raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),)) from error


def one_of(given: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    """A query parameter that is one of these words, of which the first is the default.

    Raises:
        RequestError: it is another.
    """
    text = given.get(name, allowed[0])
    if text not in allowed:
        wrong = f"is {text!r}; allowed: {', '.join(allowed)}"
        raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),))
    return text


def _value(name: str, field: FieldDescriptor, text: str) -> Any:
    try:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                return text
            case FieldDescriptor.CPPTYPE_BOOL:
                return _BOOLS[text]
            case FieldDescriptor.CPPTYPE_INT32:
                return whole_number({name: text}, name, 0, range(2**31))
            case FieldDescriptor.CPPTYPE_INT64:
                return whole_number({name: text}, name, 0, range(2**63))
            case _:
                return float(text)
    except (KeyError, ValueError) as error:
        allowed = "true or false" if isinstance(error, KeyError) else "a number"
        wrong = f"is {text!r}; allowed: {allowed}"
        raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),)) from error
