"""Patterns that logs are searched with."""

from __future__ import annotations

import time

import pytest

from outlast.patterns import MAX_CHARACTERS, LinePattern


def test_a_part_of_a_line_is_enough() -> None:
    pattern = LinePattern(r"loss=(nan|inf)\b", "grep")
    assert pattern.matches("step 3 loss=nan lr=1")
    assert not pattern.matches("step 3 loss=nano")
    assert LinePattern("", "grep").matches("anything")
    assert LinePattern("^ü$", "grep").matches("ü")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(", "--grep is '(': unclosed group; allowed: a regular expression"),
        ("a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("a{1000}{1000}{1000}", "it repeats too often"),
        ("(a{11}){ 2 , 10 }b", "it repeats too often"),
        ("a{,101}", "it repeats too often"),
        ("x" * (MAX_CHARACTERS + 1), f"--grep has {MAX_CHARACTERS + 1} characters"),
    ],
)
def test_what_is_no_pattern_is_said_with_the_option(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^--grep ") as error:
        LinePattern(text, "--grep")
    assert why in str(error.value)


def test_no_pattern_takes_long() -> None:
    # Of a backtracking engine these take years.
    line = "a" * 60_000 + "b"
    begun_s = time.process_time()
    assert not LinePattern("(a*)*(a*)*c$", "grep").matches(line)
    assert not LinePattern(".*.*.*=.*x$", "grep").matches(line)
    assert not LinePattern("a.{100}x", "grep").matches(line)
    assert time.process_time() - begun_s < 5.0
