"""What observing costs: the program itself, at sizes that take seconds."""

from __future__ import annotations

from pathlib import Path

from bench.observe import pages
from bench.observe.claims import claims_of


def test_what_a_page_loads_is_a_small_part_of_what_ranks_have_noted(tmp_path: Path) -> None:
    found = pages.measure(tmp_path, small=True)
    noted = found["noted_bytes"] * found["ranks"]
    assert found["heat_map"]["sent_bytes"] < noted / 100
    assert found["timeline"]["sent_bytes"] < noted / 10
    claims = claims_of({"pages": found})
    assert [each.claim for each in claims] == [
        "heat map of 64 ranks: bytes, compressed",
        "heat map of 64 ranks: a processor of the controller, in threads",
        "timeline of 64 ranks: bytes, compressed",
    ]
