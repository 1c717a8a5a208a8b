"""The log of who did what."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from controller.access.audit import (
    FILE_NAME,
    MAX_REFUSED_PER_MINUTE,
    MAX_TEXT,
    NUM_OLD_FILES,
    Audit,
    Entry,
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
