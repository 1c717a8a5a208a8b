from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from checkpoint.core.names import memory_folder
from checkpoint.restore.restore import load_memory
from checkpoint.stage import slotfile
from tests.checkpoint import nursery
from tests.checkpoint.helpers import wait_for

NUM_KILLS = 10


def has_come_to(words: memoryview, step: int) -> bool:
    return words[nursery.ARRIVED] >= step


def test_sigkill_at_any_moment_leaves_the_last_common_step_whole(tmp_path: Path) -> None:
    """DESIGN: a commit word written last seals a slot; a common step always exists."""
    dice = random.Random(5)
    words = nursery.open_lockstep(tmp_path)
    states = [nursery.state_of(rank) for rank in range(nursery.NUM_RANKS)]
    num_torn = 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.nursery", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        last_common = 0
        for kill in range(NUM_KILLS):
            process.stdin.write(f"{kill + 1}\n")
            process.stdin.flush()
            victim = int(process.stdout.readline().split()[kill % nursery.NUM_RANKS])
            goal = last_common + dice.randint(2, 5)
            wait_for(partial(has_come_to, words, goal), f"step {goal} of attempt {kill + 1}")
            # Anywhere in a step, whose greater part is the copy.
            until_s = time.perf_counter() + dice.uniform(0.0, 0.005)
            while time.perf_counter() < until_s:
                pass
            os.kill(victim, signal.SIGKILL)
            process.stdin.write("end\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"

            known = max(words[nursery.KNOWN : nursery.KNOWN + nursery.NUM_RANKS])
            sealed = nursery.common_steps(tmp_path, states)[0]
            common = sealed.step
            assert common >= known >= last_common
            for rank, state in enumerate(states):
                folder = tmp_path / memory_folder(rank)
                num_torn += sum(not slot.read().sealed for slot in slotfile.open_existing(folder))
                assert load_memory(folder, sealed, state) == {"step": common}
                for named in state:
                    assert torch.all(named.tensor == common), (named.name, common)
            last_common = common
        process.stdin.close()
    assert last_common >= 2 * NUM_KILLS - 1
    # Otherwise the kills missed what they were meant to hit.
    assert num_torn > 0
