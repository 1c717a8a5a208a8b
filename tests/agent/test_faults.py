"""Every system call of the agent's tasks fails once or for a while; what it keeps is bounded.

Both work on an agent in a process of its own: they put themselves between Python and its
system calls, and walk all objects. `python -m tests.agent.faults` tries the whole matrix.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.agent.harness import REPOSITORY

# Each waits for processes most of the time, and finds all places for itself first.
NUM_PARTS = 2
SEED = 1
# Alone on two cores they take a twentieth of this.
DEADLINE_S = 1800


@pytest.mark.timeout(DEADLINE_S)
def test_call_that_fails_ends_no_agent_and_the_node_works_afterwards() -> None:
    parts = [
        start(
            "tests.agent.faults",
            *("--running", "--sample", str(SEED), "--part", f"{number}/{NUM_PARTS}"),
        )
        for number in range(1, NUM_PARTS + 1)
    ]
    try:
        said = [part.communicate(timeout=DEADLINE_S)[0] for part in parts]
    finally:
        for part in parts:
            part.kill()
            part.wait()
    assert [part.returncode for part in parts] == [0] * NUM_PARTS, "\n".join(said)


@pytest.mark.timeout(DEADLINE_S)
def test_nothing_that_an_agent_keeps_grows_with_its_work() -> None:
    done = start("tests.agent.faults.growth")
    said, _ = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, said


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
