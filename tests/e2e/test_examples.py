"""Each script of `examples/` survives every kind of fault with the losses of a run without one.

The scripts know nothing of Outlast: they save and load their own checkpoints.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster
from tests.e2e.losing import lose_node
from tests.e2e.script_jobs import (
    EXAMPLES,
    HOLDING,
    RAISING,
    losses,
    submit,
    succeeded,
    wait_step,
)

pytestmark = pytest.mark.timeout(300)

STEPS = 20
# Some steps behind a checkpoint, which all ranks have written by then.
STRUCK = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    script: str
    # Its option for the place of its checkpoints.
    place: str = "--checkpoint"
    length: tuple[str, ...] = ("--steps", f"{STEPS}", "--save-every", "10")
    libraries: tuple[str, ...] = ()
    # Imported once on a node, not by each rank.
    preload: tuple[str, ...] = ("torch",)

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" where it can."""
        missing = [name for name in self.libraries if importlib.util.find_spec(name) is None]
        command = "pip install --constraint constraints.txt --editable '.[hf,lightning]'"
        return f"{' and '.join(missing)} not installed: {command}" if missing else ""


ALL = (
    Example(script="ddp.py"),
    # What torch.optim imports takes as long as torch itself.
    Example(script="fsdp2.py", place="--checkpoints", preload=("torch", "torch._dynamo")),
    Example(script="data_workers.py"),
    Example(
        script="hf_trainer.py",
        place="--output",
        libraries=("transformers", "accelerate"),
        preload=("torch", "transformers.trainer"),
    ),
    Example(
        script="lightning_fit.py",
        place="--checkpoints",
        # An epoch has ten steps.
        length=("--epochs", "2"),
        libraries=("lightning",),
        preload=("torch", "lightning"),
    ),
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with the two nodes of a job, and one for each that is lost."""
    state_dir = tmp_path_factory.mktemp("examples") / "state"
    nodes = ("--local-nodes", f"{2 + len(ALL)}", "--workers-per-node", "1")
    with controller(state_dir, *nodes, *QUICKLY_CHECKED) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2 + len(ALL))
    return cluster


@pytest.fixture(scope="module", params=ALL, ids=lambda example: example.script)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    if found.missing:
        pytest.skip(found.missing)
    return found


def run(cluster: Cluster, example: Example, folder: Path) -> str:
    """Submit it; it waits at a step of its first attempt until `let_go`."""
    place = folder / "checkpoints"
    script = [str(EXAMPLES / example.script), example.place, str(place), *example.length]
    held = [str(HOLDING), f"{STRUCK}", str(folder / "go"), str(RAISING), *script]
    workload = {"preload": list(example.preload)}
    return submit(cluster, "python", *held, workload=workload)


def let_go(folder: Path) -> None:
    (folder / "go").touch()


@pytest.fixture(scope="module")
def fault_free(
    cluster: Cluster, example: Example, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, str]:
    """Losses of the script when nothing happens."""
    folder = tmp_path_factory.mktemp("fault-free")
    let_go(folder)
    job_id = run(cluster, example, folder)
    assert succeeded(cluster, job_id).restarts == 0
    found = losses(cluster, job_id)
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "worker_killed"),
        (signal.SIGSTOP, "hang"),
        (signal.SIGUSR1, "user_error"),
    ],
    ids=["killed", "stopped", "raising"],
)
def test_an_example_goes_on_from_its_own_checkpoint_after_a_fault_of_a_rank(
    cluster: Cluster,
    tmp_path: Path,
    example: Example,
    fault_free: dict[int, str],
    number: signal.Signals,
    cause: str,
) -> None:
    job_id = run(cluster, example, tmp_path)
    wait_step(cluster, job_id, STRUCK)
    os.kill(cluster.presents(job_id, 1)[1].pid, number)
    let_go(tmp_path)
    job = succeeded(cluster, job_id)
    assert (job.attempt, job.restarts) == (2, 1)
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == cause, incident.reason
    if number is signal.SIGUSR1:
        assert "raised by the test" in incident.reason
        assert "in _raise" in incident.evidence[0].traceback
    else:
        assert "rank 1" in incident.reason
    assert losses(cluster, job_id) == fault_free


def test_an_example_goes_on_from_its_own_checkpoint_when_its_node_is_lost(
    cluster: Cluster,
    process: Controller,
    tmp_path: Path,
    example: Example,
    fault_free: dict[int, str],
) -> None:
    job_id = run(cluster, example, tmp_path)
    wait_step(cluster, job_id, STRUCK)
    # That of rank 0, which has the store.
    lost = cluster.job(job_id).nodes[0]
    lose_node(process.state_dir, lost)
    let_go(tmp_path)
    job = succeeded(cluster, job_id)
    assert lost not in job.nodes
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, list(incident.culprit_nodes)) == ("node_lost", [lost])
    assert losses(cluster, job_id) == fault_free
