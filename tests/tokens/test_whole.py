"""An id that samples miss is found where it is: on demand, and by whoever trains on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outlast.cli.errors import ExitCode
from outlast.tokens.files import open_source
from outlast.tokens.whole import first_beyond
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
def test_the_first_id_beyond_the_vocabulary_is_found_wherever_it_is(
    folder: Path, place: int, wrong: int
) -> None:
    file = open_source(str(folder / f"wrong_at_{place}.npy"), lambda url: None).train
    assert file.range_sampled() == (0, 255)
    assert first_beyond(file, 256) == (place, wrong)
    assert first_beyond(open_source(str(folder / "good.npy"), lambda url: None).train, 256) is None


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_command_reads_all_tokens_on_demand(folder: Path, tmp_path: Path, prefix: str) -> None:
    good, wrong = f"{prefix}{folder}/good.npy", f"{prefix}{folder}/wrong_at_5000.npy"
    spec = tmp_path / "job.yaml"

    def shown(data: object, *options: str) -> tuple[int, str]:
        spec.write_text(json.dumps({"name": "a", "model": MODEL, "data": data}))
        done = outlast("data", "show", str(spec), *options)
        return done.returncode, done.stderr

    assert shown({"tokens": good, "validation_tokens": {"a": good}}, "--check")[0] == 0
    assert shown({"tokens": wrong})[0] == 0
    assert "--check is for files of tokens" in shown({}, "--check")[1]
    said = "wrong_at_5000.npy has the id 256 as token 5000 (counted from 0), beyond"
    for field, data in (
        ("data.tokens", {"tokens": wrong}),
        ("data.validation_tokens", {"tokens": good, "validation_tokens": {"a": good, "b": wrong}}),
    ):
        code, stderr = shown(data, "--check")
        assert code == ExitCode.BAD_INPUT
        words = " ".join(stderr.split())
        assert (said in words, f"{field}: " in words) == (True, True), stderr
