"""What a path of tokens means, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.problems import SpecError
from outlast.remote.files import RemoteFiles
from outlast.spec.parse import parse_spec
from outlast.tokens.files import open_source
from outlast.tokens.fit import look_at_data
from tests.tokens.corpora import counted, prepared, write


def problems(tokens: object, **changes: dict[str, Any]) -> list[str]:
    """What a look at the files of a spec finds."""
    data = {"tokens": tokens, **changes.pop("data", {})}
    model = {"seq_len": 16, **changes.pop("model", {})}
    spec = parse_spec({"name": "a", "data": data, "model": model})
    return [f"{each.field} {each.message}" for each in look_at_data(spec, RemoteFiles().open)[0]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [{"from_step": 10, "tokens": {"/a": 0, "/b": 0}}],
            "data.blend_changes[0].tokens: has weights that sum to nothing",
        ),
        (
            [{"from_step": 10, "tokens": {"/a": -1}}],
            "data.blend_changes[0].tokens: has the weight -1.0 for /a; allowed: a number, 0",
        ),
        (
            [{"from_step": 10, "tokens": {"/c": 1}}],
            "data.blend_changes[0].tokens: has /c, which data.tokens has not",
        ),
        (
            [{"from_step": 10, "tokens": {"/a": 1}}, {"from_step": 10, "tokens": {"/b": 1}}],
            "data.blend_changes[1].from_step: is 10, not after step 10; give changes in the order",
        ),
    ],
)
def test_a_blend_that_changes_to_what_it_cannot_be_is_refused(
    changes: list[dict[str, Any]], expected: str
) -> None:
    data = {"tokens": {"/a": 1, "/b": 1}, "blend_changes": changes}
    with pytest.raises(SpecError) as refused:
        parse_spec({"name": "a", "data": data})
    assert expected in " ".join(str(refused.value).split())


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_pair_is_found_by_either_name_or_none(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "corpus.v1", [[1, 2, 3], [4, 5]])
    source = open_source(f"{tmp_path / 'corpus.v1'}{ending}")
    assert source.train.tokens().tolist() == [1, 2, 3, 4, 5]
    assert source.train.num_documents == 2
    assert source.validation is source.vocab_size is None


def test_an_array_is_one_row_of_tokens(tmp_path: Path) -> None:
    for kind in ("uint8", "uint16", "uint32", "int64"):
        path = tmp_path / f"{kind}.npy"
        np.save(path, np.arange(40, dtype=kind))
        source = open_source(str(path))
        assert source.train.tokens().tolist() == list(range(40))
        assert source.train.num_documents is None
    assert open_source(str(tmp_path / "uint8.npy")).digest != source.digest


def test_a_prepared_folder_brings_its_own_split_and_vocabulary(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "p", {"train": [counted(100)], "validation": [counted(40)]})
    source = open_source(str(folder))
    assert source.validation is not None
    assert source.validation.num_tokens == 40
    assert problems(str(folder), data={"validation_fraction": 0.001}) == []
    (said,) = problems(str(folder), model={"vocab_size": 200})
    assert said.startswith("model.vocab_size is 200; the tokenizer of data.tokens = ")
    assert said.endswith("has a vocabulary of 256; allowed: 256 or more")


def _without_index(name: Path) -> None:
    name.with_suffix(".idx").unlink()


def _without_tokens(name: Path) -> None:
    name.with_suffix(".bin").unlink()


def _cut_index(name: Path) -> None:
    path = name.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:-9])


def _cut_tokens(name: Path) -> None:
    path = name.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])


def _all_gone(name: Path) -> None:
    _without_index(name)
    _without_tokens(name)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_without_index, "has corpus.bin and no corpus.idx beside it; copy both"),
        (_without_tokens, "has corpus.idx and no corpus.bin beside it; copy both"),
        (_cut_index, "corpus.idx is truncated"),
        (_cut_tokens, "one of them is truncated or of another corpus; copy both again"),
        (_all_gone, "is neither a folder of `outlast data prepare` nor a .npy file"),
    ],
)
def test_files_that_are_missing_or_cut_are_named(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    name = write(tmp_path / "corpus", [counted(2000)])
    assert problems(str(name)) == []
    damage(name)
    (said,) = problems(str(name))
    assert said.startswith("data.tokens is '/")
    assert why in said


def test_ids_beyond_the_vocabulary_are_found_without_a_manifest(tmp_path: Path) -> None:
    name = write(tmp_path / "corpus", [[*counted(2000), 999]])
    assert problems(str(name), model={"vocab_size": 1000}) == []
    (said,) = problems(str(name), model={"vocab_size": 999})
    assert said.endswith("are of a vocabulary of 1000; allowed: 1000 or more")


def test_too_little_for_a_sequence_of_each_split_is_said(tmp_path: Path) -> None:
    name = write(tmp_path / "corpus", [counted(17)])
    (said,) = problems(str(name))
    assert said.startswith("data.validation_fraction is 0.02; of 1 sequences in ")
    (said,) = problems(str(name), model={"seq_len": 17})
    assert "has 17 tokens, fewer than one sequence and its next token" in said
    own = write(tmp_path / "held_out", [counted(17)])
    assert problems(str(name), data={"validation_tokens": str(own)}) == []


def test_sources_of_different_tokenizers_do_not_blend(tmp_path: Path) -> None:
    one = prepared(tmp_path / "one", {"train": [counted(900)], "validation": [counted(40)]})
    two = prepared(tmp_path / "two", {"train": [counted(900)], "validation": [counted(40)]})
    assert problems({str(one): 1, str(two): 2}) == []
    manifest = two / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"byte"', '"gpt2"'))
    (said,) = problems({str(one): 1, str(two): 2})
    assert said.endswith("prepare all of it with one")
