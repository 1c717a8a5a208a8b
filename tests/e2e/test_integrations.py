"""Training frameworks with `outlast.session`: a rank is killed, a step at most is done again."""

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
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.script_jobs import (
    EXAMPLES,
    HOLDING,
    STEP_LINE,
    log_of,
    losses,
    submit,
    succeeded,
    wait_step,
)

pytestmark = pytest.mark.timeout(300)

STEPS = 24
# Of a job whose ranks are to end by themselves, however slow the machine is.
PATIENT = {"heartbeat_late_s": 30, "heartbeat_lost_s": 60, "heartbeat_silent_s": 120}
STOP_GRACE_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    script: str
    options: tuple[str, ...] = ("--steps", f"{STEPS}")
    # Its option for a folder, if it needs one.
    folder: str = ""
    extra: str
    libraries: tuple[str, ...]
    # Imported once on a node, not by each rank.
    preload: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    # What the script prints when it has taken this.
    says: str = ""
    # In the midst of the second epoch, whose batches come in another order.
    struck: int = 19

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" where it can."""
        missing = [name for name in self.libraries if importlib.util.find_spec(name) is None]
        command = f"pip install --constraint constraints.txt --editable '.[{self.extra}]'"
        return f"{' and '.join(missing)} not installed: {command}" if missing else ""


ALL = (
    Example(
        script="data_session.py",
        extra="data",
        libraries=("torchdata",),
        preload=("torch", "torchdata.stateful_dataloader"),
    ),
    Example(
        script="hf_trainer_session.py",
        folder="--output",
        extra="hf",
        libraries=("transformers", "accelerate"),
        preload=("torch", "transformers.trainer"),
    ),
    Example(
        script="lightning_session.py",
        options=("--epochs", "2"),
        extra="lightning",
        libraries=("lightning",),
        preload=("torch", "lightning"),
    ),
    Example(
        script="accelerate_session.py",
        extra="hf,data",
        libraries=("accelerate", "torchdata"),
        preload=("torch", "accelerate"),
        env=(("ACCELERATE_MIXED_PRECISION", "bf16"),),
        says="mixed precision: bf16",
    ),
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with the nodes of two jobs."""
    state_dir = tmp_path_factory.mktemp("integrations") / "state"
    nodes = ("--local-nodes", "4", "--workers-per-node", "1")
    with controller(state_dir, *nodes, *QUICKLY_CHECKED) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(4)
    return cluster


def run(cluster: Cluster, example: Example, go: Path, **recovery: float) -> str:
    """Submit it; it waits at a step of its first attempt until the file is there."""
    script = [str(EXAMPLES / example.script), *example.options]
    if example.folder:
        script += [example.folder, str(go.with_suffix(".output"))]
    held = [str(HOLDING), f"{example.struck}", str(go), *script]
    workload = {
        "preload": list(example.preload),
        "env": dict(example.env),
        "stop_grace_s": STOP_GRACE_S,
    }
    return submit(cluster, "python", *held, name=go.name, workload=workload, recovery=recovery)


@pytest.fixture(scope="module", params=ALL, ids=lambda example: example.script)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    if found.missing:
        pytest.skip(found.missing)
    return found


@pytest.fixture(scope="module")
def expected(
    cluster: Cluster, example: Example, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, str]:
    """Losses of the script when nothing happens."""
    go = tmp_path_factory.mktemp("expected") / "undisturbed"
    go.touch()
    undisturbed = run(cluster, example, go)
    assert succeeded(cluster, undisturbed).restarts == 0
    assert example.says in log_of(cluster, undisturbed)
    found = losses(cluster, undisturbed)
    assert list(found) == list(range(1, STEPS + 1))
    return found


def test_a_framework_goes_on_from_host_memory_a_step_back_at_most(
    cluster: Cluster, tmp_path: Path, example: Example, expected: dict[int, str]
) -> None:
    struck = run(cluster, example, tmp_path / "struck")
    wait_step(cluster, struck, example.struck)
    os.kill(cluster.presents(struck, 1)[1].pid, signal.SIGKILL)
    (tmp_path / "struck").touch()
    job = succeeded(cluster, struck)
    assert (job.attempt, job.restarts, job.step) == (2, 1, STEPS)
    (incident,) = cluster.incidents(struck)
    # That step may not have been saved yet.
    assert incident.resumed_step >= example.struck - 1
    assert "from host memory" in log_of(cluster, struck)
    assert losses(cluster, struck) == expected
    # The curve is the script's own.
    assert cluster.losses(struck) == {
        step: pytest.approx(float(loss)) for step, loss in expected.items()
    }


def test_a_framework_that_is_paused_ends_soon_and_goes_on_there(
    cluster: Cluster, tmp_path: Path, example: Example, expected: dict[int, str]
) -> None:
    paused = run(cluster, example, tmp_path / "paused", **PATIENT)
    wait_step(cluster, paused, example.struck)
    with cluster.client as client:
        client.pause(paused)
    wait_for(lambda: "asked to stop" in log_of(cluster, paused), "rank 0 to be asked to stop")
    (tmp_path / "paused").touch()
    cluster.wait_state(paused, "PAUSED")
    assert not cluster.incidents(paused)
    # All ranks know of it with the save after the one in which one of them says so.
    said = "\n".join(log_of(cluster, paused, rank) for rank in range(2))
    assert max(losses(cluster, paused)) == example.struck + 1, said
    with cluster.client as client:
        client.resume(paused)
    succeeded(cluster, paused)
    assert len(STEP_LINE.findall(log_of(cluster, paused))) == STEPS, "no step was done twice"
    assert losses(cluster, paused) == expected
