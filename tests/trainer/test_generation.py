"""`outlast generate` goes on as `transformers` does, and says what it cannot do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoint.hf.convert import import_folder
from checkpoint.storage.storage import Storage
from outlast.cli.errors import ExitCode
from outlast.spec.parse import accepted_spec
from tests.checkpoint import hf_folders
from tests.cli.running import outlast, outlast_json
from tests.trainer.hf_models import CAUSAL
from trainer.generation import Model, Sampling


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.saved(tmp_path_factory)


def model_of(source: Path, root: Storage) -> Model:
    section = import_folder(source, root, vocab_multiple=64).section
    model = Model(accepted_spec({"name": "a", "model": section, "data": {"tokens": "/a"}}))
    model.load(root, 0)
    return model


def test_the_likeliest_tokens_are_those_of_transformers(saved: Path, tmp_path: Path) -> None:
    expected = json.loads((saved / hf_folders.GOES_ON).read_text())
    how = Sampling(max_tokens=hf_folders.GENERATED)
    for name in CAUSAL:
        model = model_of(saved / name, Storage(str(tmp_path / name)))
        found = list(model.go_on(hf_folders.PROMPT, how, until_s=math.inf))
        assert found == expected[name], name


def test_what_is_drawn_follows_from_the_seed_and_ends(saved: Path, tmp_path: Path) -> None:
    model = model_of(saved / "gemma2", Storage(str(tmp_path)))

    def drawn(**how: Any) -> list[int]:
        given = Sampling(max_tokens=20, **{"temperature": 50.0, **how})
        return list(model.go_on([1, 2], given, until_s=math.inf))

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    first = drawn(seed=1)
    end = next(each for each in first if first.index(each) > 0)
    assert drawn(seed=1, stop=end) == first[: first.index(end)]
    with pytest.raises(TimeoutError, match="0 tokens in the time"):
        next(model.go_on([1], Sampling(max_tokens=1), until_s=0.0))
    with pytest.raises(ValueError, match=r"a prompt of 2 and 79 more tokens; allowed: 1 to 80"):
        next(model.go_on([1, 2], Sampling(max_tokens=79), until_s=math.inf))
    with pytest.raises(ValueError, match=r"the id 96, beyond model\.vocab_size = 96"):
        next(model.go_on([96], Sampling(max_tokens=1), until_s=math.inf))


def test_the_command_takes_a_checkpoint_and_a_tokenizer(saved: Path, tmp_path: Path) -> None:
    root, path = tmp_path / "root", tmp_path / "job.yaml"
    done = import_folder(saved / "qwen2", Storage(str(root)))
    document = {"name": "a", "model": done.section, "data": {"tokens": "/a"}}
    path.write_text(yaml.safe_dump(document))
    given = ("generate", str(root), "--spec", str(path), "--prompt", "  ", "--max-tokens", "3")
    found = outlast_json(*given, "--tokenizer", "byte")
    assert (found["step"], len(found["tokens"])) == (0, 3)
    assert found["text"] == "  " + bytes(found["tokens"]).decode()
    # The folder that was imported has a tokenizer, though none that works.
    refused = outlast(*given)
    assert refused.returncode == ExitCode.BAD_INPUT
    assert f"tokenizer {saved / 'qwen2'}" in refused.stderr
    missing = outlast(*given, "--tokenizer", "byte", "--step", "7")
    assert "no checkpoint of step 7 (there: 0)" in missing.stderr
