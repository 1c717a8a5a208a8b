"""Whole documents in sequences: none that fits is cut, none is left out, all have a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.tokens.index import Index
from outlast.tokens.packing import STRIDE, Packing

# Of each document, the lengths of its parts: a prompt and a completion, one part, or none at all.
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=40).filter(
    lambda documents: any(map(sum, documents))
)


def index_of(documents: Sequence[Sequence[int]]) -> Index:
    lengths = [part for document in documents for part in document]
    return Index(
        token_type="uint16",
        lengths=np.array(lengths, dtype=np.int32),
        places=2 * np.cumsum([0, *lengths[:-1]]),
        documents=np.cumsum([0, *map(len, documents)]),
    )


def oracle(documents: Sequence[Sequence[int]], row_tokens: int) -> list[list[int]]:
    """Token numbers of each sequence, by putting documents into boxes one after the other."""
    boxes: list[list[int]] = [[]]
    at = 0
    for document in documents:
        tokens = list(range(at, at + sum(document)))
        at += len(tokens)
        kept = tokens[:row_tokens]
        if len(boxes[-1]) + len(kept) > row_tokens:
            boxes.append([])
        boxes[-1] += kept
    return boxes


def spans(packing: Packing) -> list[list[int]]:
    found = map(packing.span, range(packing.num_sequences))
    return [list(range(first, first + count)) for first, count in found]


@given(DOCUMENTS, st.integers(2, 20), st.integers(1, 7))
def test_sequences_are_those_of_documents_put_into_boxes(
    documents: list[list[int]], row_tokens: int, chunk: int
) -> None:
    packing = Packing(index_of(documents), row_tokens=row_tokens, chunk_documents=chunk)
    expected = oracle(documents, row_tokens)
    assert spans(packing) == expected
    lengths = list(map(sum, documents))
    cut = [length - row_tokens for length in lengths if length > row_tokens]
    assert (packing.num_cut, packing.num_tokens_cut) == (len(cut), sum(cut))
    # Each token is in one sequence unless it was cut off.
    assert sum(map(len, expected)) + sum(cut) == sum(lengths)
    room = row_tokens * len(expected)
    assert packing.padding_share == pytest.approx(1 - sum(map(len, expected)) / room)


@given(DOCUMENTS, st.integers(2, 12), st.integers(1, 7))
@example([[2, 3], [], []], 4, 7)
def test_documents_of_which_nothing_is_predicted_are_counted(
    documents: list[list[int]], row_tokens: int, chunk: int
) -> None:
    """Documents without any sequence, too: at the end of the file they have none to look up."""
    index = index_of(documents)
    packing = Packing(index, row_tokens=row_tokens, has_prompts=True, chunk_documents=chunk)
    predicted = [
        # The first token of a document has none before it.
        [place for place in range(1, min(sum(parts), row_tokens)) if place >= parts[0]]
        for parts in documents
    ]
    assert packing.num_without_loss == predicted.count([])


@pytest.mark.parametrize("chunk", [5, 10**6])
def test_any_sequence_of_many_is_found_by_its_number(chunk: int) -> None:
    lengths = np.random.default_rng(1).integers(0, 60, 5000).tolist()
    lengths[1000:1300] = [0] * 300
    documents = [[each] for each in lengths]
    packing = Packing(index_of(documents), row_tokens=50, chunk_documents=chunk)
    assert packing.num_sequences > 40 * STRIDE
    assert spans(packing) == oracle(documents, 50)
    with pytest.raises(ValueError, match="is not in 0"):
        packing.span(packing.num_sequences)


def test_an_index_whose_documents_go_back_is_refused() -> None:
    index = index_of([[5], [6], [7], [8]])
    index.places[1:3] = index.places[2:0:-1].copy()
    with pytest.raises(ValueError, match="documents 0 to 4 do not lie one after the other"):
        Packing(index, row_tokens=10)
