"""Specs come from outside: whatever their numbers, they are answered at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from outlast.problems import closest, divisors

# Far above what the slowest case takes, far below a scan up to one of the numbers.
DEADLINE_S = 30.0
# A prime, a product of small ones, and what no float holds exactly.
PRIME, SMOOTH, LARGE = 10**9 + 7, 10**9, 2**200 * 3**5

PROGRAM = """
import json, sys
from outlast.problems import SpecError
from outlast.spec.parse import parse_spec
for document in json.load(sys.stdin):
    try:
        parse_spec({"name": "a", **document})
    except SpecError as error:
        print(json.dumps([[p.field, len(p.message)] for p in error.problems]))
    else:
        print("[]")
"""


def documents() -> list[dict[str, Any]]:
    """Each of the numbers that rules divide, and worlds made of several."""
    numbers = (PRIME, SMOOTH, LARGE)
    degrees = ("dp", "tp", "pp", "micro_batch", "virtual_stages")
    found: list[dict[str, Any]] = [
        {"parallel": {name: number}} for name in degrees for number in numbers
    ]
    for number in numbers:
        found += [
            {"parallel": {"dp": number}, "data": {"global_batch": number}},
            {"parallel": {"dp": 3, "tp": 7, "micro_batch": 5}, "data": {"global_batch": number}},
            {"model": {"heads": number, "hidden": number}, "parallel": {"tp": number + 1}},
            {"model": {"layers": number}, "parallel": {"pp": number, "dp": number}},
            {"model": {"layers": number}, "parallel": {"pp": number - 1, "layer_split": [1]}},
            {"model": {"heads": number}, "parallel": {"tp": 3}, "resources": {"nodes": number}},
            {"parallel": {"pp": 2, "dp": number}, "resources": {"workers_per_node": number - 1}},
        ]
    return found


def test_huge_numbers_are_refused_at_once() -> None:
    asked = documents()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked)
    for document, problems in zip(asked, answers, strict=True):
        assert problems, document
        assert max(length for _, length in problems) < 2_000, document


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1, (1,)), (7, (1, 7)), (12, (1, 2, 3, 4, 6, 12)), (36, (1, 2, 3, 4, 6, 9, 12, 18, 36))],
)
def test_divisors_are_all_found(number: int, expected: tuple[int, ...]) -> None:
    assert divisors(number) == expected


def test_of_huge_numbers_small_divisors_and_their_partners_are_found() -> None:
    assert divisors(10**40)[:4] == (1, 2, 4, 5)
    assert divisors(10**40)[-3:] == (10**40 // 4, 10**40 // 2, 10**40)


def test_the_closest_are_those_that_fewest_doublings_separate() -> None:
    assert closest(range(1, 100), 10, 3) == [9, 10, 11]
    assert closest((1, 4, 32), 8, 2) == [4, 32]
    assert closest((2, 3), 8) == [2, 3]
