"""The pipe by which a worker wakes its agent."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.stage.bell import Bell, Doorkeeper

WITHIN_S = 20.0
# What `select` can name at most.
SELECT_LIMIT = 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    return folder


@pytest.fixture
def many_open() -> Iterator[None]:
    """So many descriptors that the next one has a number beyond what select takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * SELECT_LIMIT:
        pytest.skip(f"this machine allows {hard} open files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SELECT_LIMIT), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null]
    while held[-1] < SELECT_LIMIT:
        held.append(os.dup(null))
    yield
    for handle in held:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_for_ring(folder: Path) -> float:
    """Seconds until a bell that is rung again and again was heard."""
    doorkeeper, bell, done = Doorkeeper([folder]), Bell(folder), threading.Event()

    def ring() -> None:
        while not done.wait(0.01):
            bell.ring()

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        begin_s = time.monotonic()
        doorkeeper.wait(WITHIN_S)
        return time.monotonic() - begin_s
    finally:
        done.set()
        ringer.join()
        bell.close()
        doorkeeper.close()


def test_a_bell_wakes_who_waits(folder: Path) -> None:
    assert wait_for_ring(folder) < WITHIN_S / 2


@pytest.mark.usefixtures("many_open")
def test_a_bell_wakes_an_agent_with_many_open_files(folder: Path) -> None:
    assert wait_for_ring(folder) < WITHIN_S / 2


def test_nobody_rings_and_the_wait_ends(folder: Path) -> None:
    doorkeeper = Doorkeeper([folder])
    begin_s = time.monotonic()
    doorkeeper.wait(0.01)
    assert 0.005 <= time.monotonic() - begin_s < WITHIN_S
    doorkeeper.close()
