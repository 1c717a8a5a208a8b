"""Rules of what BERT predicts, and of attention that sees what is ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.model import GATED
from outlast.problems import FieldProblem, changed, only_with
from outlast.rules.data import PADDING

if TYPE_CHECKING:
    from outlast.spec import JobSpec

_FIELD = "data.masked"
_ORDER = "data.sentence_order"
# Three tokens around two parts of one each.
_SHORTEST_ORDERED = 5


def _check_attention(spec: JobSpec) -> list[FieldProblem]:
    """A model that sees the next tokens cannot be trained to predict them."""
    model, fraction = spec.model, spec.data.masked.fraction
    if model.attention == "causal":
        if not fraction:
            return []
        needed = "model.attention = bidirectional"
        return [only_with(f"{_FIELD}.fraction", fraction, needed, "causal")]
    problems = []
    if not fraction:
        message = (
            "is bidirectional, which sees the next tokens, so these cannot be what is predicted; "
            f"allowed: causal, or {_FIELD}.fraction above 0"
        )
        problems.append(FieldProblem(field="model.attention", message=message))
    needed = "model.attention = causal"
    if model.window is not None:
        problems.append(only_with("model.window", model.window, needed, "bidirectional"))
    if model.positions == "alibi":
        problems.append(only_with("model.positions", "alibi", needed, "bidirectional"))
    return problems


def _check_masked(spec: JobSpec) -> list[FieldProblem]:
    given, size = spec.data.masked, spec.model.vocab_size
    if not given.fraction:
        needed = f"{_FIELD}.fraction above 0"
        return [
            only_with(
                f"{_FIELD}.{name}", list(value) if isinstance(value, tuple) else value, needed, 0
            )
            for name, value in changed(given).items()
        ]
    problems = []
    if given.mask_token is None:
        message = f"is required with {_FIELD}.fraction above 0: the id that hides a token"
        problems.append(FieldProblem(field=f"{_FIELD}.mask_token", message=message))
    elif given.mask_token >= size:
        problems.append(_beyond("mask_token", f"is {given.mask_token}", size))
    beyond = [each for each in given.never if not 0 <= each < size]
    problems += [_beyond("never", f"has {each}", size) for each in beyond[:1]]
    if spec.data.packing == "whole" and PADDING not in given.never:
        message = f"lacks {PADDING}, the id of the padding that data.packing = whole makes"
        problems.append(FieldProblem(field=f"{_FIELD}.never", message=message))
    if given.random + given.kept > 1:
        message = (
            f"is {given.random:g}, and {_FIELD}.kept is {given.kept:g}; together they may be 1 "
            "at most"
        )
        problems.append(FieldProblem(field=f"{_FIELD}.random", message=message))
    return problems


def _beyond(name: str, what: str, size: int, section: str = _FIELD) -> FieldProblem:
    message = f"{what}; allowed: 0 to model.vocab_size - 1 = {size - 1}"
    return FieldProblem(field=f"{section}.{name}", message=message)


def _check_order(spec: JobSpec) -> list[FieldProblem]:
    """Where sequences have two parts, and what a model that predicts their order needs."""
    model, data, on = spec.model, spec.data, "model.sentence_order"
    if not model.sentence_order:
        return [
            only_with(
                f"{_ORDER}.{name}", list(value) if isinstance(value, tuple) else value, on, "false"
            )
            for name, value in changed(data.sentence_order).items()
        ]
    problems = [
        only_with(on, "true", needed, value)
        for is_wrong, needed, value in (
            (model.attention == "causal", "model.attention = bidirectional", "causal"),
            (model.segments < 2, "model.segments of 2 or more", model.segments),
            (data.packing != "stream", "data.packing = stream", data.packing),
            (data.document_mask, "data.document_mask = false", "true"),
            (data.reset_positions, "data.reset_positions = false", "true"),
            (
                model.seq_len < _SHORTEST_ORDERED,
                f"model.seq_len of {_SHORTEST_ORDERED} or more",
                model.seq_len,
            ),
        )
        if is_wrong
    ]
    return problems + _check_ids(spec)


def _check_ids(spec: JobSpec) -> list[FieldProblem]:
    given, size, problems = spec.data.sentence_order, spec.model.vocab_size, []
    for name, value in (("cls_token", given.cls_token), ("sep_token", given.sep_token)):
        if value is None:
            message = "is required with model.sentence_order = true: an id beside the parts"
            problems.append(FieldProblem(field=f"{_ORDER}.{name}", message=message))
        elif value >= size:
            problems.append(_beyond(name, f"is {value}", size, _ORDER))
        elif spec.data.masked.fraction and value not in spec.data.masked.never:
            message = f"lacks {value}, which is {_ORDER}.{name}"
            problems.append(FieldProblem(field=f"{_FIELD}.never", message=message))
    if given.cls_token is not None and given.cls_token == given.sep_token:
        message = f"is {given.sep_token}, as {_ORDER}.cls_token; they must differ"
        problems.append(FieldProblem(field=f"{_ORDER}.sep_token", message=message))
    hides = spec.data.masked.mask_token
    if hides is not None and hides in (given.cls_token, given.sep_token):
        message = f"is {hides}, which is an id of {_ORDER}, too; they must differ"
        problems.append(FieldProblem(field=f"{_FIELD}.mask_token", message=message))
    beyond = [each for each in given.ends if not 0 <= each < size]
    return problems + [_beyond("ends", f"has {each}", size, _ORDER) for each in beyond[:1]]


def _check_head(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    if not model.head_transform or model.activation not in GATED:
        return []
    needed = "a model.activation without a gate"
    return [only_with("model.head_transform", "true", needed, model.activation)]


RULES = (_check_attention, _check_masked, _check_head, _check_order)
