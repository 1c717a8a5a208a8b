"""Logs of ranks that write other letters than ASCII, cut anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from controller.web.messages import as_json
from controller.web.whole_characters import with_whole_characters
from outlast.v1 import jobs_pb2

TEXT = st.text(st.sampled_from("aé漢😀\n"), min_size=1)


def passed(chunks: Sequence[jobs_pb2.LogsResponse]) -> list[jobs_pb2.LogsResponse]:
    async def stream() -> AsyncIterator[Message]:
        for chunk in chunks:
            yield chunk

    async def gathered() -> list[jobs_pb2.LogsResponse]:
        return [chunk async for chunk in with_whole_characters(stream())]

    return asyncio.run(gathered())


def chunk(data: bytes, rank: int = 0, attempt: int = 1) -> jobs_pb2.LogsResponse:
    return jobs_pb2.LogsResponse(node="node-0", rank=rank, attempt=attempt, data=data)


@given(st.lists(TEXT, min_size=2, max_size=3), st.data())
def test_no_character_is_garbled_wherever_a_log_is_cut(
    texts: list[str], data: st.DataObject
) -> None:
    """Each rank's own, whose chunks come between those of others."""
    pieces = []
    for rank, text in enumerate(texts):
        log = text.encode()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
        for first, last in zip([0, *cuts], [*cuts, len(log)], strict=True):
            pieces.append((data.draw(st.integers(0, 99)), rank, log[first:last]))
    # Of each rank in order.
    shuffled = sorted(range(len(pieces)), key=lambda at: pieces[at][0])
    ranks = iter([pieces[at][1] for at in shuffled])
    queues = {rank: iter([each[2] for each in pieces if each[1] == rank]) for rank in range(3)}
    found = passed([chunk(next(queues[rank]), rank) for rank in ranks])
    for rank, text in enumerate(texts):
        assert "".join(as_json(each)["text"] for each in found if each.rank == rank) == text


def test_what_is_no_text_is_shown_as_such() -> None:
    found = passed([chunk(b"a\xff"), chunk(b"\xe6\xbc"), chunk(b"b"), chunk(b"c\xf0\x9f")])
    assert "".join(as_json(each)["text"] for each in found) == "a��bc�"


def test_the_attempts_of_a_rank_are_apart_and_what_is_missing_is_passed_on() -> None:
    begun = chunk("é".encode()[:1])
    missing = jobs_pb2.LogsResponse(node="node-1", missing=jobs_pb2.MissingLogs(reason="gone"))
    assert passed([begun, chunk(b"b", attempt=2), missing]) == [
        chunk(b"b", attempt=2),
        missing,
        chunk(b"\xc3"),
    ]
