"""What only a node can see is a problem of a field, found before a rank is started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpoint.storage import Storage
from controller.agent.launch import StartRefusedError
from controller.agent.ledger import ErrorKind
from controller.agent.preflight import Preflight
from outlast.spec import parse_spec
from outlast.v1 import agents_pb2

TEXT = "it was the best of times\n" * 4000


def check(
    folder: Path, *, attempt: int = 1, ranks: tuple[int, ...] = (0,), **sections: object
) -> None:
    """Look at a spec with these sections, whose checkpoints go to `folder / store`."""
    spec = parse_spec({"name": "job", **sections})
    url = spec.checkpoint.url or f"file://{folder}/store"
    command = agents_pb2.Command(
        job_id="job-1",
        attempt=attempt,
        start_workers=agents_pb2.StartWorkers(
            ranks=ranks, committed_step=-1, checkpoint_url=f"{url}/job-1"
        ),
    )
    asyncio.run(Preflight(20.0).check(command, spec))


def refused(folder: Path, **changes: object) -> StartRefusedError:
    with pytest.raises(StartRefusedError) as caught:
        check(folder, **changes)  # type: ignore[arg-type]
    return caught.value


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_places_that_are_there_pass(tmp_path: Path) -> None:
    check(tmp_path, data={"source": text_file(tmp_path)})


def test_every_place_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("not a folder")
    (tmp_path / "empty").mkdir()
    error = refused(
        tmp_path,
        data={"source": "/nowhere/text.txt"},
        checkpoint={"url": f"file://{blocked}", "load": f"file://{tmp_path}/empty"},
    )
    assert error.kind is ErrorKind.CONFIG
    words = str(error)
    assert "data.source is '/nowhere/text.txt'" in words
    assert "checkpoint.url is" in words
    assert "checkpoint storage file://" in words
    assert "checkpoint.load is" in words
    assert "which has no committed checkpoint" in words


def test_a_sequence_longer_than_the_data_is_found(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("only a few words")
    assert "seq_len" in str(refused(tmp_path, data={"source": str(path)}))


def test_a_step_that_the_other_job_does_not_have_is_found(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}/other")
    storage.put_if_absent("commits/00000040.json", b"{}")
    checkpoint = {"load": f"file://{tmp_path}/other", "load_step": 50}
    error = refused(tmp_path, checkpoint=checkpoint, data={"source": text_file(tmp_path)})
    assert "checkpoint.load_step is 50" in str(error)
    assert "allowed: 40" in str(error)


def test_only_the_node_of_rank_0_tries_the_store(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("not a folder")
    checkpoint = {"url": f"file://{blocked}"}
    check(tmp_path, ranks=(2, 3), checkpoint=checkpoint, data={"source": text_file(tmp_path)})


@pytest.mark.parametrize("attempt", [1, 2])
def test_whose_problem_missing_data_is_the_other_nodes_answers_tell(
    tmp_path: Path, attempt: int
) -> None:
    error = refused(tmp_path, attempt=attempt, data={"source": "/nowhere/text.txt"})
    assert error.kind is ErrorKind.MISSING
    assert "/nowhere/text.txt" in str(error)
