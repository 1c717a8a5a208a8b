"""What a spec says that predicts hidden tokens, or the order of two parts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.test_rules import problems

_BOTH_WAYS = {"attention": "bidirectional"}
_HIDDEN = {"fraction": 0.2, "mask_token": 5}
MASKED_PROBLEMS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"fraction": 0.2, "mask_token": 5}, "data.masked.fraction", "attention = bidirectional"),
    ({}, {"mask_token": 5}, "data.masked.mask_token", r"only with data\.masked\.fraction above 0"),
    (_BOTH_WAYS, {"fraction": 0.2}, "data.masked.mask_token", "is required"),
    (_BOTH_WAYS, {**_HIDDEN, "mask_token": 256}, "data.masked.mask_token", "0 to .* = 255"),
    (_BOTH_WAYS, {**_HIDDEN, "never": [3, 256]}, "data.masked.never", "0 to .* = 255"),
    (_BOTH_WAYS, {**_HIDDEN, "random": 0.7, "kept": 0.4}, "data.masked.random", "1 at most"),
    ({**_BOTH_WAYS, "window": 8}, _HIDDEN, "model.window", "attention = causal"),
    ({**_BOTH_WAYS, "positions": "alibi"}, _HIDDEN, "model.positions", "attention = causal"),
]


@pytest.mark.parametrize(("model", "masked", "field", "message"), MASKED_PROBLEMS)
def test_what_is_wrong_with_hidden_tokens_is_said(
    model: dict[str, Any], masked: dict[str, Any], field: str, message: str
) -> None:
    found = problems(model=model, data={"masked": masked})
    assert list(found) == [field]
    assert re.search(message, found[field])


def test_padding_may_not_be_hidden() -> None:
    data = {"tokens": "/a", "packing": "whole", "masked": _HIDDEN}
    found = problems(model=_BOTH_WAYS, data=data)
    assert found == {
        "data.masked.never": "lacks 0, the id of the padding that data.packing = whole makes"
    }


_ORDERED = {**_BOTH_WAYS, "segments": 2, "sentence_order": True}
_CUT = {"cls_token": 6, "sep_token": 7}
_ORDERED_DATA = {"masked": {**_HIDDEN, "never": [6, 7]}, "sentence_order": _CUT}
ORDER_PROBLEMS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({**_ORDERED, "segments": 1}, {}, "model.sentence_order", "model.segments of 2 or more, not 1"),
    ({**_ORDERED, "seq_len": 4}, {}, "model.sentence_order", "model.seq_len of 5 or more, not 4"),
    (
        _ORDERED,
        {"tokens": "/a", "document_mask": True},
        "model.sentence_order",
        "only with data.document_mask = false",
    ),
    (
        _ORDERED,
        {"tokens": "/a", "reset_positions": True},
        "model.sentence_order",
        "only with data.reset_positions = false, not true",
    ),
    (
        _ORDERED,
        {"tokens": "/a", "packing": "whole", "masked": {**_HIDDEN, "never": [0, 6, 7]}},
        "model.sentence_order",
        "only with data.packing = stream, not whole",
    ),
    (
        _ORDERED,
        {"sentence_order": {"cls_token": 6}},
        "data.sentence_order.sep_token",
        "is required with model.sentence_order = true",
    ),
    (
        _ORDERED,
        {"sentence_order": {**_CUT, "sep_token": 256}},
        "data.sentence_order.sep_token",
        "0 to .* = 255",
    ),
    (
        _ORDERED,
        {"sentence_order": {"cls_token": 7, "sep_token": 7}},
        "data.sentence_order.sep_token",
        "is 7, as data.sentence_order.cls_token; they must differ",
    ),
    (
        _ORDERED,
        {"masked": {**_HIDDEN, "mask_token": 6, "never": [6, 7]}},
        "data.masked.mask_token",
        "is 6, which .* they must differ",
    ),
    (
        _ORDERED,
        {"masked": {}},
        "model.attention",
        r"data\.masked\.fraction above 0",
    ),
    (
        _ORDERED,
        {"sentence_order": {**_CUT, "ends": [9, 256]}},
        "data.sentence_order.ends",
        "has 256; allowed: 0 to .* = 255",
    ),
    (
        _ORDERED,
        {"masked": {**_HIDDEN, "never": [6]}},
        "data.masked.never",
        r"lacks 7, which is data\.sentence_order\.sep_token",
    ),
    (
        {**_BOTH_WAYS, "segments": 2},
        {"sentence_order": {"cls_token": 6}},
        "data.sentence_order.cls_token",
        "only with model.sentence_order, not false",
    ),
]


@pytest.mark.parametrize(("model", "data", "field", "message"), ORDER_PROBLEMS)
def test_what_is_wrong_with_the_order_of_sentences_is_said(
    model: dict[str, Any], data: dict[str, Any], field: str, message: str
) -> None:
    found = problems(model=model, data={**_ORDERED_DATA, **data})
    assert list(found) == [field]
    assert re.search(message, found[field])
