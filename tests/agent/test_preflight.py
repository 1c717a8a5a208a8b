"""What only a node can see is a problem of a field, found before a rank is started."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint.errors import RootTakenError, StorageTimeoutError, StorageUnavailableError
from checkpoint.storage.root_owner import Owner
from checkpoint.storage.storage import Storage
from controller.agent.threads import HungCallsError
from controller.agent.workers import preflight as preflights
from controller.agent.workers.launch import StartRefusedError, check_storage
from controller.agent.workers.preflight import Preflight
from outlast.failures import ErrorKind
from outlast.remote.disk import BlockFolder
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.tokens.remote_file import OpenRemote
from outlast.v1 import agents_pb2
from tests.tokens.corpora import counted, write

TEXT = "it was the best of times\n" * 4000


def check(
    folder: Path,
    *,
    attempt: int = 1,
    ranks: tuple[int, ...] = (0,),
    preflight: Preflight | None = None,
    **sections: object,
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
    preflight = preflight or Preflight(20.0, lambda job_id, detail: None, data_dir=folder)
    asyncio.run(preflight.check(command, spec))


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


def test_a_store_whose_package_is_not_installed_is_named_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("s3fs", "gcsfs"):
        # As an import finds it where it is not installed.
        monkeypatch.setitem(sys.modules, module, None)
    places = {"url": "s3://bucket/jobs", "load": "gs://bucket/jobs/other"}
    error = refused(tmp_path, data={"source": text_file(tmp_path)}, checkpoint=places)
    assert str(error) == (
        "checkpoint.url is 's3://bucket/jobs'; checkpoint storage s3://bucket/jobs/job-1: s3:// "
        "URLs need the package s3fs, which is not installed; remedy: pip install s3fs; "
        "checkpoint.load is 'gs://bucket/jobs/other'; gs:// URLs need the package gcsfs, which "
        "is not installed; remedy: pip install gcsfs"
    )


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


def test_a_checkpoint_that_is_not_before_the_end_of_the_job_is_found(tmp_path: Path) -> None:
    other, source = f"file://{tmp_path}/other", {"source": text_file(tmp_path)}
    for step in (20, 240):
        Storage(other).put_if_absent(f"commits/{step:08d}.json", b"{}")
    error = refused(tmp_path, checkpoint={"load": other}, data=source, steps=240)
    assert error.kind is ErrorKind.CONFIG
    assert "checkpoint.load is 'file://" in str(error)
    assert "whose newest checkpoint is of step 240, which leaves nothing to train" in str(error)
    assert "steps = 240; allowed: more than 240 steps, or checkpoint.load_step: 20" in str(error)
    check(tmp_path, checkpoint={"load": other, "load_step": 20}, data=source, steps=240)
    check(tmp_path, checkpoint={"load": other}, data=source, steps=241)


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


def test_tokens_that_no_store_has_are_no_fault_of_the_node(tmp_path: Path) -> None:
    error = refused(tmp_path, data={"tokens": "memory://no-such-bucket/web"})
    assert error.kind is ErrorKind.CONFIG
    assert "data.tokens is 'memory://no-such-bucket/web', which is neither" in str(error)


def test_tokens_whose_store_does_not_answer_are_left_to_the_ranks(
    tmp_path: Path, silent_store: str
) -> None:
    """They wait longer for it, and end with a storage error."""
    check(
        tmp_path,
        preflight=Preflight(1.0, lambda *words: None, data_dir=tmp_path),
        data={"tokens": f"{silent_store}/web"},
    )


def test_data_that_could_not_be_looked_at_is_looked_at_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception] = [StorageUnavailableError("503 Slow Down")]
    look_at_data = preflights.look_at_data

    def look(spec: JobSpec, open_remote: OpenRemote) -> object:
        if answers:
            raise answers.pop()
        return look_at_data(spec, open_remote)

    monkeypatch.setattr(preflights, "look_at_data", look)
    preflight = Preflight(20.0, lambda *words: None, data_dir=tmp_path)
    data = {"tokens": "memory://no-such-bucket/web"}
    check(tmp_path, preflight=preflight, data=data)
    assert refused(tmp_path, preflight=preflight, data=data).kind is ErrorKind.CONFIG


@pytest.mark.parametrize(
    ("tokens", "validation", "kind"),
    [
        ("{path}", None, ErrorKind.MISSING),
        ("file://{path}", None, ErrorKind.MISSING),
        ("memory:/{path}", None, ErrorKind.CONFIG),
        ("memory:/{path}", "{path}", ErrorKind.MISSING),
        ("memory:/{path}", "file://{path}", ErrorKind.MISSING),
        ("memory:/{path}", "memory:/{path}", ErrorKind.CONFIG),
    ],
)
def test_what_another_node_may_have_is_missing_and_no_mistake_of_the_spec(
    tmp_path: Path, tokens: str, validation: str | None, kind: ErrorKind
) -> None:
    named = {"tokens": tokens, "validation_tokens": validation}
    data = {name: url.format(path=tmp_path / "no") for name, url in named.items() if url}
    assert refused(tmp_path, data=data).kind is kind


def packed(folder: Path) -> dict[str, object]:
    """Tokens at a URL whose index is fetched whole."""
    write(folder / "web", [counted(300)] * 100)
    return {"tokens": f"file://{folder}/web", "packing": "whole"}


def test_an_index_that_has_no_room_on_this_disk_is_no_mistake_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = packed(tmp_path)
    check(tmp_path / "a", data=data)
    disk = SimpleNamespace(f_bavail=4, f_blocks=100, f_frsize=1000)
    monkeypatch.setattr("outlast.remote.disk.os.statvfs", lambda path: disk)
    error = refused(tmp_path / "b", data=data)
    assert error.kind is ErrorKind.OCCUPIED
    assert "data.tokens: no room for" in str(error)
    assert "bytes of web.idx" in str(error)


def test_an_index_larger_than_the_cache_is_a_problem_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(folder: Path, *, max_bytes: int) -> BlockFolder:
        return BlockFolder(folder, max_bytes=100)

    monkeypatch.setattr(preflights, "BlockFolder", small)
    error = refused(tmp_path, data=packed(tmp_path))
    assert "data.tokens cannot be read: file://" in str(error)
    assert "data.cache_bytes is 100; allowed: " in str(error)


def test_a_disk_that_fails_is_a_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BlockFolder, "whole", fail)
    error = refused(tmp_path, data=packed(tmp_path))
    assert error.kind is ErrorKind.RESOURCE
    assert "data cannot be read on this node: [Errno 5] Input/output error" in str(error)


@pytest.fixture
def silent_store() -> Iterator[str]:
    """The URL of a store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"webhdfs://127.0.0.1:{server.getsockname()[1]}/store"


def test_storage_that_never_answers_is_no_mistake_of_the_spec(
    tmp_path: Path, silent_store: str
) -> None:
    told: list[tuple[str, str]] = []
    error = refused(
        tmp_path,
        preflight=Preflight(0.2, lambda *words: told.append(words), data_dir=tmp_path),
        checkpoint={"url": silent_store},
        data={"source": text_file(tmp_path)},
        recovery={"first_step_timeout_s": 10.0},
    )
    assert error.kind is ErrorKind.STORAGE
    silence = f"checkpoint storage {silent_store}/job-1: no answer in 0.2 s"
    assert re.fullmatch(re.escape(silence) + r"; asked [2-9] times in \d s", str(error))
    assert told[0] == ("job-1", silence), "it is known while the start waits"


def test_storage_that_answers_later_is_waited_for(tmp_path: Path) -> None:
    answers = [ErrorKind.STORAGE, ErrorKind.STORAGE, None]

    async def probe(url: str, owner: Owner | None, timeout_s: float) -> None:
        kind = answers.pop(0)
        if kind is not None:
            raise StartRefusedError(kind, "no answer")

    waiting: list[str] = []
    preflight = Preflight(
        20.0, lambda job_id, detail: waiting.append(detail), probe, data_dir=tmp_path
    )
    check(tmp_path, preflight=preflight, data={"source": text_file(tmp_path)})
    assert waiting == ["no answer"] * 2
    assert answers == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StorageUnavailableError("forbidden", lasting=True), ErrorKind.CONFIG),
        (StorageUnavailableError("503 Slow Down"), ErrorKind.STORAGE),
        (StorageTimeoutError("16 calls have not come back", lasting=True), ErrorKind.STORAGE),
        (HungCallsError("16 earlier calls have not come back"), ErrorKind.STORAGE),
        (RootTakenError("it belongs to another job"), ErrorKind.CONFIG),
    ],
)
def test_only_a_refusal_that_lasts_is_a_mistake_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: ErrorKind
) -> None:
    def refuse(storage: Storage) -> None:
        raise error

    monkeypatch.setattr(Storage, "probe", refuse)
    with pytest.raises(StartRefusedError) as caught:
        asyncio.run(check_storage(f"file://{tmp_path}", None, 5.0))
    assert caught.value.kind is kind
