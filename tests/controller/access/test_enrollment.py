"""Who gets a certificate, and who may speak for a node: the decisions."""

from __future__ import annotations

import pytest

from controller.access.enrollment import (
    Certified,
    renewal_due_s,
    why_not_enrolled,
    why_not_heard,
    why_not_renewed,
)

NOW_S = 1000.0
HELD = Certified(key="ours", expires_s=NOW_S + 1)
EXPIRED = Certified(key="ours", expires_s=NOW_S - 1)


@pytest.mark.parametrize(
    ("record", "key", "is_refused"),
    [
        (None, "ours", False),
        (HELD, "ours", False),
        (HELD, "theirs", True),
        (EXPIRED, "theirs", False),
        (Certified(key="ours", expires_s=NOW_S), "theirs", True),
    ],
)
def test_a_join_token_is_good_for_one_key_until_its_certificate_expires(
    record: Certified | None, key: str, is_refused: bool
) -> None:
    why = why_not_enrolled("n0", record, key, NOW_S)
    assert bool(why) is is_refused
    if why:
        assert why == (
            "node n0 has a certificate for another key; `outlast nodes rejoin n0` lets it get "
            "another one"
        )


@pytest.mark.parametrize(
    ("record", "key", "shown_name", "why"),
    [
        (HELD, "ours", "n0", ""),
        # What a node shows holds; its record may be of before a clock was set.
        (EXPIRED, "ours", "n0", ""),
        (HELD, "ours", "n1", "the certificate is that of node n1, not of n0"),
        (HELD, "theirs", "n0", "node n0 renews the certificate of another key than it shows"),
        (Certified(key="new", expires_s=NOW_S), "ours", "n0", "enrolled with another key since"),
        (None, "ours", "n0", "is not on record"),
    ],
)
def test_a_certificate_is_renewed_for_its_own_key_and_node(
    record: Certified | None, key: str, shown_name: str, why: str
) -> None:
    found = why_not_renewed("n0", record, key, HELD, shown_name)
    assert why in found
    assert bool(found) is bool(why)


@pytest.mark.parametrize(
    ("record", "key", "is_refused"),
    [
        (None, None, False),
        (None, "by hand", False),
        (HELD, "ours", False),
        (HELD, "theirs", True),
        (HELD, None, True),
        (EXPIRED, None, False),
        (EXPIRED, "theirs", False),
    ],
)
def test_a_node_that_has_a_certificate_is_heard_with_it_only(
    record: Certified | None, key: str | None, is_refused: bool
) -> None:
    assert bool(why_not_heard("n0", record, key, NOW_S)) is is_refused


def test_a_certificate_is_renewed_after_two_thirds_of_its_time() -> None:
    assert renewal_due_s(100.0, 400.0) == pytest.approx(300.0)
    assert renewal_due_s(100.0, 400.0, 0.05) == pytest.approx(315.0)
