"""Every field of the job spec with every kind of wrong value: each message has one form."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from outlast.problems import FieldProblem, SpecError
from outlast.spec import JobSpec
from outlast.spec.data import Weight
from outlast.spec.parse import parse_spec

# What only a program, or someone who knows the parser, could make sense of.
FORBIDDEN = re.compile(
    r"NoneType|\bNone\b|\bTrue\b|\bFalse\b|\bdict\b|\bint\b|\bstr\b|\bfloat\b|\btuple\b|\bbool\b"
    r"|pydantic|Input should|valid_|_type|_parsing|literal\[|function-|Spec\b|value_error|\binf\b"
    r"|\bnan\b|Traceback|object at|datetime|<class"
)
# Numbers as YAML writes them, and text as the user wrote it.
AS_GIVEN = re.compile(r"-?\.inf|\.nan|'[^']*'")

WRONG: list[Any] = [
    *(None, True, False, "", "  ", "no such word", "\x00", "a" * 10_000),
    *([], [1], ["x"], [None], [True], {}, {"x": 1}, {"x": {"y": [1]}}),
    *(math.nan, math.inf, -math.inf, -1, 0, 0.5, -0.5, 1e308, 10**400, -(10**400), "1e400"),
    *(datetime.date(2024, 1, 1), b"bytes", {1, 2}, "1e6", "10k", "nan", "inf", "-1"),
]


def fields(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every field, sections included, with its type."""
    for name, info in section.model_fields.items():
        yield f"{above}{name}", info.annotation
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, f"{above}{name}.")


FIELDS = dict(fields(JobSpec))


def document_with(field: str, value: object) -> dict[str, Any]:
    document: dict[str, Any] = {"name": "a"}
    *sections, last = field.split(".")
    inner = document
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return document


def problems_of(document: object) -> list[tuple[str, str]]:
    found: tuple[FieldProblem, ...] = ()
    try:
        parse_spec(document)
    except SpecError as error:
        found = error.problems
    for problem in found:
        assert FORBIDDEN.search(AS_GIVEN.sub("", problem.message)) is None, problem
    return [(problem.field, problem.message) for problem in found]


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_is_wrong_with_a_field_is_said_in_plain_words(field: str) -> None:
    for value in WRONG:
        for where, message in problems_of(document_with(field, value)):
            assert len(where) < 120
            assert len(message) < 1_000, message
            assert re.match(r"(is|are|has|layouts|must|lists|[\d,]+ more) ", message), message
            if where.startswith(field):
                # What it allows, or what to do instead.
                assert re.search(r"allowed|leave it out|required|needs|must|more of", message)


@pytest.mark.parametrize("field", FIELDS)
def test_a_value_of_the_wrong_kind_names_the_field_the_value_and_what_is_allowed(
    field: str,
) -> None:
    annotation = FIELDS[field]
    kinds = set(get_args(annotation)) | {annotation}
    if dict[str, Weight] in kinds:
        # Names with a number are what it takes.
        assert dict(problems_of(document_with(field, [1])))[field].count(
            "; allowed: text, or a section"
        )
        return
    wrong = {"x": 1} if not _is_section(annotation) else "words"
    found = dict(problems_of(document_with(field, wrong)))
    if _is_section(annotation):
        assert found[field].startswith("is 'words'; allowed: a section with the fields ")
    else:
        assert found[field].startswith("is a section with x; allowed: "), found
    if bool not in kinds:
        # YAML's yes, no, on and off are no numbers and no words.
        message = dict(problems_of(document_with(field, True)))[field]
        assert message.startswith("is true; allowed: ")
    if int in kinds or float in kinds:
        for number, written in ((math.inf, ".inf"), (-math.inf, "-.inf"), (math.nan, ".nan")):
            message = dict(problems_of(document_with(field, number)))[field]
            assert message.startswith(f"is {written}; allowed: ")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@pytest.mark.parametrize(
    "field", [name for name, kind in FIELDS.items() if get_origin(kind) is Literal]
)
def test_a_misspelt_word_comes_with_the_one_that_was_meant(field: str) -> None:
    word = str(get_args(FIELDS[field])[-1])
    if len(word) < 4:
        return
    found = dict(problems_of(document_with(field, word[:-1])))
    assert found[field].startswith(f"is '{word[:-1]}'; allowed: ")
    assert "(did you mean " in found[field]


@pytest.mark.parametrize("field", [name for name in FIELDS if len(name.split(".")[-1]) > 3])
def test_a_misspelt_field_comes_with_the_one_that_was_meant(field: str) -> None:
    wrong = field[:-1] + "_"
    found = dict(problems_of(document_with(wrong, 1)))
    assert found[wrong].startswith("is not a field (did you mean ")
    assert "; allowed here: " in found[wrong]


MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({"tp": 2}, "tp", "is not a field (did you mean parallel.tp?); allowed here: apiVersion"),
    ({"parallel": {"tp": True}}, "parallel.tp", "is true; allowed: a whole number, 1 or more"),
    ({"steps": "1e6"}, "steps", "is '1e6'; allowed: a whole number, 1 or more (write 1000000)"),
    (
        {"optimizer": {"lr": math.inf}},
        "optimizer.lr",
        "is .inf; allowed: a number, more than 0",
    ),
    ({"name": 7}, "name", "is 7; allowed: text (put it in quotes)"),
    (
        {"recovery": {"ladder": ["restart", "shrink"]}},
        "recovery.ladder[1]",
        "is 'shrink'; allowed: restart, diagnose, replace or pause",
    ),
    # Not a level that version 0.1.0 could have had.
    ({"parallel": {"zero": 7}}, "parallel.zero", "is 7; allowed: a section with the fields"),
    (
        {"parallel": {"recompute": "fulll"}},
        "parallel.recompute",
        "is 'fulll'; allowed: none, selective, full or offload, or a list of none, selective, full "
        "or offload (did you mean full?)",
    ),
    (
        {"parallel": {"recompute": ["full", "x"]}},
        "parallel.recompute[1]",
        "is 'x'; allowed: none, selective, full or offload",
    ),
    (
        {"model": {"window": "wide"}},
        "model.window",
        "is 'wide'; allowed: a whole number, 1 or more, or null",
    ),
    ({"data": {"source": ""}}, "data.source", "is ''; allowed: text that is not empty"),
    (
        {"data": {"validation_fraction": 0.7}},
        "data.validation_fraction",
        "is 0.7; allowed: a number, more than 0 and less than 0.5",
    ),
    ({"model": None}, "model", "is null; allowed: a section with the fields preset, layers, "),
    ({1: 2}, "1", "is not a field: fields have names of letters"),
]


@pytest.mark.parametrize(("document", "field", "message"), MESSAGES)
def test_messages_read_as_a_person_would_say_them(
    document: dict[str, Any], field: str, message: str
) -> None:
    found = dict(problems_of({"name": "a", **document}))
    assert found[field].startswith(message), found


def test_a_field_that_cannot_be_read_hides_no_other_problem() -> None:
    found = dict(
        problems_of(
            {
                "name": 5,
                "steps": "many",
                "model": {"layers": True, "heads": 4, "hidden": 66},
                "parallel": {"tp": 3, "pp": "two"},
                "data": {"source": "s3://bucket/text", "global_batch": 7},
                "optimizer": {"lr": math.inf, "schedule": {"warmup_steps": 500}},
                "checkpoint": {"url": "s4://bucket", "load_step": 3},
                "extra": 1,
            }
        )
    )
    assert set(found) == {
        *("name", "steps", "model.layers", "parallel.pp", "optimizer.lr", "extra"),
        *("model.hidden", "model.heads", "model.vocab_size", "model.seq_len"),
        *("data.source", "checkpoint.url", "checkpoint.load_step"),
    }


def test_a_hundred_thousand_mistakes_are_one_screen_or_two() -> None:
    found = problems_of({"name": "a", **{f"field_{n}": n for n in range(100_000)}})
    assert len(found) == 51
    assert found[-1] == ("(document)", "99950 more problems are not shown")
    found = problems_of({"name": "a", "parallel": {"layer_split": ["x"] * 100_000}})
    assert len(found) == 4
