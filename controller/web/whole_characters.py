"""Logs as text: chunks of bytes that end where a character ends.

An agent cuts a log into chunks of so many bytes, or where a worker had written so much by then: a
character of UTF-8 may have its bytes in two of them. Decoded alone both halves would be garbled.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator

from google.protobuf.message import Message

from outlast.v1 import jobs_pb2

_Source = tuple[str, int, int]


async def with_whole_characters(
    chunks: AsyncIterator[Message],
) -> AsyncIterator[jobs_pb2.LogsResponse]:
    """The chunks, of which each begins with what its rank's last one had of a character.

    What is left at the end comes in chunks of its own.
    """
    begun: dict[_Source, bytes] = {}
    async for chunk in chunks:
        assert isinstance(chunk, jobs_pb2.LogsResponse)
        if not chunk.data:
            yield chunk
            continue
        source = (chunk.node, chunk.attempt, chunk.rank)
        data = begun.pop(source, b"") + chunk.data
        rest = _begun_character(data)
        if rest:
            begun[source] = rest
        chunk.data = data[: len(data) - len(rest)]
        if chunk.data:
            yield chunk
    for (node, attempt, rank), rest in begun.items():
        yield jobs_pb2.LogsResponse(node=node, attempt=attempt, rank=rank, data=rest)


def _begun_character(data: bytes) -> bytes:
    """The bytes at the end that more could make a character of."""
    # Four bytes are the longest character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-4:])
    return decoder.getstate()[0]
