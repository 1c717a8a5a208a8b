"""A checkpoint to begin with that lies in a store: compared from here, if the store answers."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.stage.payload import NamedTensor
from outlast.cli.places import Nodes, Seen, look
from outlast.cli.stored_load import look_at_load
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.checkpoint.helpers import DEADLINE_S, make_stager, uploading
from tests.cli.running import outlast


def spec_of(url: str, **checkpoint: Any) -> JobSpec:
    return parse_spec({"name": "a", "checkpoint": {"load": url, **checkpoint}})


def stored(folder: Path, num_values: int) -> str:
    """A store with a checkpoint of step 20, of a model with so many parameters."""
    url = f"memory://{uuid.uuid4().hex}/job-1"
    tensor = torch.zeros(num_values)
    named = NamedTensor(name="model.a", tensor=tensor, global_shape=(num_values,), offsets=(0,))
    stager = make_stager(folder / "memory", [named])
    with uploading(url, folder / "memory") as (uploader, news):
        stager.save(20, {"step": 20}, upload=True, common_step=19)
        assert uploader.drain(DEADLINE_S), news
    stager.close()
    return url


def seen(spec: JobSpec) -> Seen:
    """As it is where nodes are other machines."""
    return look(spec, {}, Nodes.ELSEWHERE)


def test_what_is_right_has_neither_problem_nor_warning(tmp_path: Path) -> None:
    url = stored(tmp_path, num_parameters(spec_of("/none")))
    found = seen(spec_of(url))
    assert (found.problems, found.warnings) == ((), ())


def test_what_a_store_holds_is_a_problem_wherever_nodes_are(tmp_path: Path) -> None:
    url = stored(tmp_path, 100)
    (problem,) = seen(spec_of(url)).problems
    assert problem.field == "checkpoint.load"
    assert f"is '{url}', whose step 20 holds a model of 100 parameters" in problem.message
    (problem,) = seen(spec_of(url, load_step=7)).problems
    assert problem.field == "checkpoint.load_step"
    assert f"is 7, and {url} has no checkpoint of that step; allowed: 20" in problem.message


def test_an_empty_place_may_be_another_one_for_the_nodes() -> None:
    found = seen(spec_of(f"memory://{uuid.uuid4().hex}/job-1"))
    assert not found.problems
    assert "has no committed checkpoint" in found.warnings[0]
    assert "what counts is what the nodes have" in found.warnings[0]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_that_does_not_answer_is_left_to_the_node(silent_port: int) -> None:
    spec = spec_of(f"webhdfs://127.0.0.1:{silent_port}/job-1")
    found = look_at_load(spec, str(spec.checkpoint.load), within_s=0.2)
    assert not found.problems
    assert "no answer in 0.2 s; the first node compares it before the job starts" in found.warning


def test_a_command_ends_though_the_store_is_silent(silent_port: int, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\ncheckpoint: {{load: 'webhdfs://127.0.0.1:{silent_port}/job-1'}}\n")
    done = outlast("plan", str(path), "--state-dir", str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "could not be compared with the spec from here" in said
    assert "the first node compares it before the job starts" in said
