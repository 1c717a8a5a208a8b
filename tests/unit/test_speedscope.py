"""Profiles of several ranks in one document."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.speedscope import Place, merged, own_shares


def document(*threads: tuple[str, list[list[str]]]) -> dict[str, Any]:
    """Of samples of 10 ms; names of frames are those of functions."""
    names = sorted({name for _, samples in threads for stack in samples for name in stack})
    return {
        "shared": {"frames": [{"name": name, "file": f"{name}.py"} for name in names]},
        "profiles": [
            {
                "type": "sampled",
                "name": f'Thread 12 "{thread}"',
                "samples": [[names.index(name) for name in stack] for stack in samples],
                "weights": [0.01] * len(samples),
            }
            for thread, samples in threads
        ],
    }


def stacks(found: dict[str, Any], number: int) -> list[list[str]]:
    frames = found["shared"]["frames"]
    return [[frames[at]["name"] for at in stack] for stack in found["profiles"][number]["samples"]]


def test_threads_keep_their_stacks_and_main_threads_are_first() -> None:
    one = document(("reader", [["z"]]), ("MainThread", [["a", "b"], ["a"]]))
    other = document(("MainThread", [["c", "a"]]))
    found = merged({"rank 3": one, "rank 0": other})
    assert [each["name"] for each in found["profiles"]] == [
        'rank 3: Thread 12 "MainThread"',
        'rank 0: Thread 12 "MainThread"',
        'rank 3: Thread 12 "reader"',
    ]
    assert [stacks(found, number) for number in range(3)] == [
        [["a", "b"], ["a"]],
        [["c", "a"]],
        [["z"]],
    ]
    # What they were made of stays as it was.
    assert one["profiles"][1]["name"] == 'Thread 12 "MainThread"'


def test_shares_are_those_of_innermost_functions_of_the_main_thread() -> None:
    found = own_shares(
        document(("reader", [["z"]] * 9), ("MainThread", [["a", "b"], ["a"], ["a", "b"], []]))
    )
    assert found == {
        Place("b", "b.py"): pytest.approx(2 / 3),
        Place("a", "a.py"): pytest.approx(1 / 3),
    }
    # Threads that no Python has begun have no name, such as those of autograd.
    assert own_shares(document(("", [["z"]]), ("reader", [["z"]]))) == {}
    found = own_shares(document(("", [["z"]]), ("MainThread", [["a"]])))
    assert found == {Place("a", "a.py"): 1.0}
    # A program without threads does not name its only one.
    assert own_shares(document(("", [["z"]]))) == {Place("z", "z.py"): 1.0}
