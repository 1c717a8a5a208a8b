"""The log of who did what."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.access.audit import (
    FILE_NAME,
    MAX_REFUSED_PER_MINUTE,
    MAX_TEXT,
    NUM_OLD_FILES,
    Audit,
    Entry,
    NoSuchPlaceError,
)


def entry(at_s: float, caller: str = "alice", why: str = "") -> Entry:
    return Entry(
        at_s=at_s,
        caller=caller,
        role="admin" if caller else "",
        peer="ipv4:10.0.0.7:40112",
        call="Jobs/CancelJob",
        about="gpt-abcde",
        outcome="PERMISSION_DENIED" if why else "OK",
        why=why,
    )


def test_what_was_written_comes_back_newest_first(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    written = [entry(float(at)) for at in range(20)]
    for each in written:
        audit.add(each)
    assert list(Audit(tmp_path).read()) == written[::-1]
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_addresses_stand_as_people_write_them(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.add(replace(entry(1.0), peer="ipv6:%5B::1%5D:4711"))
    assert next(audit.read()).peer == "ipv6:[::1]:4711"


def test_no_line_can_be_put_in_by_a_name(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.add(entry(1.0, why='line\n{"at_s": 2}\u2028\u0000'))
    (found,) = audit.read()
    assert found.why == 'line\n{"at_s": 2}\u2028\u0000'
    assert (tmp_path / FILE_NAME).read_text().count("\n") == 1


def test_it_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    audit = Audit(tmp_path, max_file_bytes=2_000)
    for at in range(1_000):
        audit.add(entry(float(at)))
    files = list(tmp_path.iterdir())
    assert len(files) <= NUM_OLD_FILES + 1
    assert sum(path.stat().st_size for path in files) < (NUM_OLD_FILES + 1) * 2_300
    found = [each.at_s for each in audit.read()]
    assert found == [float(at) for at in range(999, 999 - len(found), -1)]
    assert len(found) > 50


@pytest.mark.parametrize("caller", ["", "vera"])
def test_who_is_refused_cannot_push_out_what_others_did(tmp_path: Path, caller: str) -> None:
    now_s = 0.0
    audit = Audit(tmp_path, max_file_bytes=20_000, monotonic=lambda: now_s)
    audit.add(entry(0.0))
    for at in range(10_000):
        refused = entry(float(at), caller=caller, why="this takes operator")
        audit.add(replace(refused, about="x" * 100_000, peer="y" * 100_000, call="z" * 100_000))
    assert next(audit.read()).about == "x" * MAX_TEXT
    assert list(audit.read())[-1] == entry(0.0)
    now_s = 61.0
    audit.add(entry(70.0, caller=caller, why="this takes operator"))
    newest = next(audit.read())
    left_out = 10_000 - MAX_REFUSED_PER_MINUTE
    assert newest.at_s == 70.0
    assert newest.why == f"this takes operator ({left_out} refused before it were not written down)"


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.add(entry(1.0))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"at_s": 2.0, "cal')
    assert [each.at_s for each in Audit(tmp_path).read()] == [1.0]


def test_a_disk_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(tmp_path / "gone")
    audit.add(entry(1.0))
    assert "audit log" in caplog.text
    assert list(audit.read()) == []


def test_pages_neither_skip_nor_repeat_while_entries_come_in_and_files_are_set_aside(
    tmp_path: Path,
) -> None:
    audit = Audit(tmp_path, max_file_bytes=2_000)
    for at in range(100):
        # Many of one moment, by a clock that is set back: no time says which is older.
        audit.add(replace(entry(5.0 - at // 50), peer=f"ipv4:10.0.0.7:{at}"))
    kept = list(audit.read())
    assert len(kept) == 100
    found: list[Entry] = []
    place = ""
    for page in range(20):
        taken = list(islice(audit.older_than(place), 7))
        if not taken:
            break
        found += [each for _, each in taken]
        place = taken[-1][0]
        for at in range(3):
            audit.add(entry(100.0 * page + at, caller="olga"))
    assert [each for each in found if each.caller == "alice"] == found
    # Those that were dropped meanwhile cannot be there.
    assert found == kept[: len(found)]
    assert len(found) > 50
    # Another controller on the same files knows the places.
    place = next(islice(audit.older_than(""), 30, None))[0]
    again = Audit(tmp_path).older_than(place)
    assert [each for _, each in again] == list(audit.read())[31:]


def test_a_page_reads_no_more_than_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(tmp_path)
    for at in range(2_000):
        audit.add(entry(float(at)))
    size = (tmp_path / FILE_NAME).stat().st_size
    num_parsed = 0

    def parse(line: bytes) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        return json.loads(line)

    monkeypatch.setattr("controller.access.audit.json", SimpleNamespace(loads=parse))
    place = next(islice(audit.older_than(""), 999, None))[0]
    assert int(place.split("-")[1]) == pytest.approx(size / 2, rel=0.05)
    num_parsed = 0
    assert [each.at_s for _, each in islice(audit.older_than(place), 3)] == [999.0, 998.0, 997.0]
    assert num_parsed == 3


def test_a_place_that_is_not_in_the_log_is_refused(tmp_path: Path) -> None:
    audit = Audit(tmp_path, max_file_bytes=2_000)
    audit.add(entry(50.0))
    audit.add(entry(60.0))
    (newer, _), (oldest, _) = audit.older_than("")
    assert list(audit.older_than(oldest)) == []
    digest, start, second = newer.split("-")
    wrong = [
        *("x", "--", newer + "-", f"{digest}-{start}", f"{digest}-{int(start) + 1}-{second}"),
        *(f"{digest}-{10**6}-{second}", f"{digest}-{int(start) * 2}-{second}"),
        # Of another controller's log, and newer than what this one has dropped.
        f"{'0' * 16}-0-51",
    ]
    for place in wrong:
        with pytest.raises(NoSuchPlaceError, match="allowed: `next` of"):
            next(audit.older_than(place))
    for at in range(1_000):
        audit.add(entry(100.0 + at))
    # Deleted, as is all that was older.
    assert list(audit.older_than(newer)) == []


def test_lines_longer_than_what_is_read_at_once_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(tmp_path)
    for at in range(9):
        audit.add(entry(float(at)))
    for size in (1, 7, 64, 1_000):
        monkeypatch.setattr("controller.access.audit._BLOCK_BYTES", size)
        assert [each.at_s for each in audit.read()] == [float(at) for at in range(8, -1, -1)]
