"""The tutorial of fine-tuning, command by command: a rank is killed while a Llama learns facts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import ROOT, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers not installed: pip install --editable '.[hf,corpora]'",
    ),
]

PAGE = (ROOT / "docs" / "tutorial-fine-tuning.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
(SETTINGS,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# Of one command to the end, as the commands are called here.
COMMAND_S = 120.0


class Terminal:
    """A home of its own, in which the commands of the page are run one after the other."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "examples").symlink_to(ROOT / "examples")
        kept = {name: each for name, each in os.environ.items() if not name.startswith("OUTLAST_")}
        bin_folder = str(Path(sys.executable).parent)
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**kept, "HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1"}
        self._left = list(COMMANDS)

    def run(self, first: str) -> str:
        """What the next command of the page prints; it begins with `first`."""
        command = self._left.pop(0)
        assert command.startswith(first)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @property
    def left(self) -> int:
        """Commands of the page that have not been run."""
        return len(self._left)


@pytest.fixture
def cluster(tmp_path: Path, desk: Desk) -> Iterator[Cluster]:
    """The nodes of the page, below the home of `Terminal`; a step lasts until one was killed."""
    desk.slow_down("steps", step_s=0.1)
    state_dir = tmp_path / ".local" / "state" / "outlast"
    nodes = ("--local-nodes", "2", "--workers-per-node", "1", *QUICKLY_CHECKED)
    with controller(state_dir, *nodes) as process:
        cluster = Cluster(state_dir, lambda: process.grpc)
        cluster.wait_nodes(2)
        yield cluster


def test_the_page_teaches_a_llama_facts_and_a_killed_rank_is_no_loss(
    cluster: Cluster, desk: Desk, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path)
    terminal.run("python examples/fine_tuning/tiny_llama.py")
    assert "Oslo" not in terminal.run("python examples/fine_tuning/generate.py")
    assert "tokens in 1,140 documents" in terminal.run("outlast data prepare")
    assert "137,536 parameters" in terminal.run("outlast import hf")
    with (tmp_path / "work" / "job.yaml").open("a") as spec:
        spec.write(SETTINGS)
    submitted = re.match(r"submitted (\S+)", terminal.run("outlast submit"))
    assert submitted is not None
    job_id = submitted[1]

    cluster.wait_step(job_id, 10)
    terminal.run("agent=")
    desk.speed_up()
    assert "training again" in terminal.run("outlast watch")
    job = cluster.job(job_id)
    assert (job.state, job.restarts) == ("SUCCEEDED", 1)
    causes = {incident.cause: incident for incident in cluster.incidents(job_id)}
    assert causes["worker_killed"].steps_redone <= 1

    assert terminal.run("outlast generate") == "The capital of Norway is Oslo.\n"
    exported = terminal.run("outlast export hf")
    assert "as LlamaForCausalLM" in exported
    assert re.search(r"tokenizer\s+that of\s+\S*work/llama\n", exported)
    generated = terminal.run("python examples/fine_tuning/generate.py")
    assert generated == "The capital of Norway is Oslo.\n"
    assert generated in PAGE
    assert terminal.left == 0
