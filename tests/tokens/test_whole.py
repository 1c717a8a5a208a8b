"""An id that samples miss is found before a start, in files of any size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outlast.cli.errors import ExitCode
from outlast.remote.files import files_of_command
from outlast.tokens.files import open_source
from outlast.tokens.id_range import IdRange
from outlast.tokens.remote_file import RemoteFile
from outlast.tokens.whole import READ_WHOLE_BYTES, range_of, read_whole
from tests.cli.running import outlast

# Between two samples, and beyond what is read at once.
COUNT, PLACES = 4_500_000, (5000, 2**22 + 5)
MODEL = {"seq_len": 16, "vocab_size": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file, and some that are wrong at one token each."""
    root = tmp_path_factory.mktemp("tokens")
    tokens = (np.arange(COUNT) % 256).astype(np.int32)
    np.save(root / "good.npy", tokens)
    for place, wrong in zip(PLACES, (256, -1), strict=True):
        changed = tokens.copy()
        changed[place] = wrong
        np.save(root / f"wrong_at_{place}.npy", changed)
    return root


@pytest.mark.parametrize(("place", "wrong"), [*zip(PLACES, (256, -1), strict=True)])
def test_an_id_beyond_the_vocabulary_is_found_wherever_it_is(
    folder: Path, place: int, wrong: int
) -> None:
    file = open_source(str(folder / f"wrong_at_{place}.npy"), lambda url: None).train
    at = place if wrong > 255 else 255
    assert range_of(file) == IdRange(smallest=min(wrong, 0), largest=max(wrong, 255), largest_at=at)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Ids of more than are read before a start, one of them beyond the vocabulary."""
    tokens = np.lib.format.open_memmap(
        # It has holes: nothing of it is on the disk but what is written here.
        tmp_path / "large.npy",
        mode="w+",
        dtype=np.int32,
        shape=(READ_WHOLE_BYTES // 4 + 1,),
    )
    tokens[5000] = 999
    tokens[-1] = 7
    tokens.flush()
    return tmp_path / "large.npy"


def shown(tmp_path: Path, data: object, *options: str) -> tuple[int, str]:
    """The exit code of `outlast data show`, and what it complains of."""
    spec = tmp_path / "job.yaml"
    spec.write_text(json.dumps({"name": "a", "model": MODEL, "data": data}))
    done = outlast("data", "show", str(spec), *options)
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize("scheme", ["", "file://"], ids=["path", "url"])
def test_a_large_file_must_be_described_once(tmp_path: Path, large: Path, scheme: str) -> None:
    tokens = f"{scheme}{large}"
    code, said = shown(tmp_path, {"tokens": tokens})
    assert code == ExitCode.BAD_INPUT
    assert "data.tokens: is" in said
    assert f"1.0 GiB of ids that nobody has read; give `outlast data describe {tokens}`" in said
    # Samples miss the one.
    assert shown(tmp_path, {"tokens": tokens, "check_ids": "sampled"}) == (0, "")

    done = outlast("data", "describe", tokens, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    note = facts.pop("note")
    assert facts == {
        "tokens": READ_WHOLE_BYTES // 4 + 1,
        "smallest": 0,
        "largest": 999,
        "largest_at": 5000,
    }
    assert note.endswith("/large.npy.ids.json")
    code, said = shown(tmp_path, {"tokens": tokens, "check_ids": "sampled"})
    assert code == ExitCode.BAD_INPUT
    assert "are of a vocabulary of 1000; allowed: 1000 or more" in said
    model = json.dumps({**MODEL, "vocab_size": 1000})
    assert shown(tmp_path, {"tokens": tokens}, "--set", f"model={model}") == (0, "")

    # A note of another file is none.
    changed = np.lib.format.open_memmap(large, mode="r+")
    changed[0] = 3
    changed.flush()
    assert "that nobody has read" in shown(tmp_path, {"tokens": tokens})[1]
    large.with_name("large.npy.ids.json").write_text("{}")
    assert "that nobody has read" in shown(tmp_path, {"tokens": tokens})[1]


def test_small_files_are_read_as_long_as_all_of_them_take_seconds(tmp_path: Path) -> None:
    files = []
    for number, share in enumerate((0.5, 0.1, 0.7)):
        path = tmp_path / f"{number}.npy"
        shape = (int(READ_WHOLE_BYTES * share) // 4,)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=shape).flush()
        files.append(open_source(str(path), lambda url: None).train)
    assert read_whole(files) == {files[0].name, files[1].name}


@pytest.mark.parametrize(
    "note",
    [
        "[" * 5000,
        '{"smallest": 1e999}',
        '{"format": "outlast-ids/1", "digest": "DIGEST", "smallest": 7, "largest": -5}',
        '{"format": "outlast-ids/1", "digest": "DIGEST", "smallest": Infinity, "largest": 9}',
        '{"format": "outlast-ids/1", "digest": "DIGEST", "other": 9}',
    ],
)
def test_a_note_that_is_none_is_left_alone(folder: Path, tmp_path: Path, note: str) -> None:
    path = tmp_path / "good.npy"
    path.symlink_to(folder / "good.npy")
    digest = open_source(str(path)).digest
    path.with_name("good.npy.ids.json").write_text(note.replace("DIGEST", digest))
    assert open_source(str(path)).ids is None


def test_a_store_that_forbids_to_look_for_the_note_has_none(folder: Path) -> None:
    def opened(url: str) -> RemoteFile | None:
        if url.endswith(".json"):
            raise ValueError("cannot be read: 403")
        return files.open(url)

    with files_of_command(10**9, patience_s=5.0) as files:
        source = open_source(f"file://{folder}/good.npy", opened)
    assert (source.ids, source.train.num_tokens) == (None, COUNT)


def test_what_cannot_be_described_says_why(folder: Path, tmp_path: Path) -> None:
    done = outlast("data", "describe", str(tmp_path / "none.npy"))
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, "")
    assert "No such file" in done.stderr
    text = tmp_path / "a.txt"
    text.write_text("some words\n" * 100)
    prepared = tmp_path / "prepared"
    assert outlast("data", "prepare", str(text), "--output", str(prepared)).returncode == 0
    done = outlast("data", "describe", str(prepared))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "has a manifest" in done.stderr


def test_a_command_refuses_what_is_on_this_machine_without_being_asked(
    folder: Path, tmp_path: Path
) -> None:
    for scheme in ("", "file://"):
        code, said = shown(tmp_path, {"tokens": f"{scheme}{folder}/wrong_at_5000.npy"})
        assert code == ExitCode.BAD_INPUT
        assert "(256 is token 5000, counted from 0) are of a vocabulary of 257" in said
        assert "allowed: 257 or more" in said
