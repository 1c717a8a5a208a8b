"""Positions that begin anew, or not, whether or not documents are apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.layout import Layout
from outlast.problems import SpecError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.tokens.files import open_source
from tests.tokens.corpora import write
from tests.trainer.alone import lone_mesh
from tests.trainer.jobs_model import Run, oracle_models
from tests.trainer.jobs_numbers import losses
from tests.trainer.oracles_documents import KINDS, NAMES
from tests.trainer.ranks import RankPool
from tests.trainer.test_documents import SPEC, model_of
from tests.trainer.test_oracles import check
from trainer.worker.feeding import open_data

LAYOUTS = {
    "dense": Layout(),
    "tp2-sp": Layout(tp=2),
    "pp2": Layout(pp=2),
    "tp2-pp2": Layout(tp=2, pp=2),
    "cp2-pp2": Layout(pp=2, dp=2, cp=2),
    "cp2-tp2": Layout(tp=2, dp=2, cp=2),
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oracles")
    command = [sys.executable, "-m", "tests.trainer.oracles_documents", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=240)
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_equals_transformers_with_positions_and_a_mask(
    ranks: RankPool, oracles: Path, layout: str, kind: str, name: str
) -> None:
    """To the tolerances of `tests.trainer.test_oracles`."""
    run, path = Run(layout=LAYOUTS[layout], **KINDS[kind]), str(oracles / kind)
    found = ranks.run_once(oracle_models, run.layout.world_size, run, path, NAMES)
    check(name, [result[name] for result in found], run, path)


def test_what_positions_begin_at_counts_in_these_models(oracles: Path) -> None:
    """RoPE has differences of positions only: within a document they are the same either way."""
    for name in NAMES:
        loss = {kind: float(np.load(oracles / kind / f"{name}.npz")["loss"]) for kind in KINDS}
        assert abs(loss["across"] - loss["apart"]) > 1e-3
        is_learned = name in ("gpt2", "bert")
        assert (abs(loss["through"] - loss["apart"]) > 1e-3) == is_learned


@pytest.mark.parametrize("options", [{"alibi": True}, {}], ids=["alibi", "none"])
def test_within_a_document_nothing_but_distances_count(options: dict[str, Any]) -> None:
    """Where no position is counted from anywhere, both kinds have the same bits."""
    starts = torch.tensor([[0] * 20 + [20] * 44, [0] * 64]).t()
    tokens, targets = torch.randint(0, 32, (2, *starts.shape), generator=torch.Generator())
    found = []
    for resets in (True, False):
        chunk, _ = model_of({"learned_positions": False, **options, "resets_positions": resets})
        found.append(chunk(tokens, None, targets, starts).item())
    assert found[0] == found[1]


LENGTHS = (1, 2, 3, 40, 5, 1, 1, 90) * 9
DATA: dict[str, dict[str, Any]] = {
    "across": {"reset_positions": True},
    "through": {"document_mask": True, "reset_positions": False},
    "packed": {"packing": "whole", "reset_positions": False},
}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    generator = np.random.default_rng(5)
    return write(tmp_path / "a", [generator.integers(0, 256, length) for length in LENGTHS])


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("kind", DATA)
def test_every_layout_counts_alike(
    ranks: RankPool, tmp_path: Path, tokens: Path, kind: str, positions: str
) -> None:
    """Also in the middle of a pipeline, which reads nothing of most data."""
    model = {**SPEC["model"], "layers": 4, "positions": positions}
    data = {"tokens": str(tokens), "validation_fraction": 0.2, **DATA[kind]}
    spec = {**SPEC, "model": model, "data": data}
    (dense,) = ranks.run(losses, 1, spec, tmp_path / "dense")
    assert dense["loss"][0] == pytest.approx(dense["expected"], rel=1e-12)
    for number, layout in enumerate(
        ({"pp": 4}, {"tp": 2, "dp": 2, "micro_batch": 2}, {"cp": 2, "pp": 2})
    ):
        several = {**spec, "parallel": layout}
        found = ranks.run(losses, 4, several, tmp_path / str(number))
        assert all(each["loss"] == found[0]["loss"] for each in found)
        assert found[0]["loss"] == pytest.approx(dense["loss"], rel=1e-10)
        assert found[0]["held_out"] == pytest.approx(dense["held_out"], rel=1e-10)


def test_one_that_says_what_holds_anyway_has_the_same_bits(
    ranks: RankPool, tmp_path: Path, tokens: Path
) -> None:
    pairs = [
        ({"document_mask": True}, {"document_mask": True, "reset_positions": True}),
        ({}, {"reset_positions": False}),
    ]
    found = []
    for number, data in enumerate(each for pair in pairs for each in pair):
        common = {"tokens": str(tokens), "validation_fraction": 0.2}
        (result,) = ranks.run(
            losses, 1, {**SPEC, "data": {**common, **data}}, tmp_path / str(number)
        )
        found.append(result["loss"])
    assert found[0] == found[1] != found[2] == found[3]


def test_targets_are_left_out_only_where_documents_are_apart(tmp_path: Path, tokens: Path) -> None:
    file = open_source(str(tokens)).train
    row = file.tokens()
    for data, apart in ((DATA["across"], False), (DATA["through"], True)):
        common = {"tokens": str(tokens), "validation_fraction": 0.2}
        spec = parse_spec({**SPEC, "data": {**common, **data}})
        feeding = open_data(spec, lone_mesh(), tmp_path)
        assert feeding.has_unpredicted is apart
        begin = set(np.cumsum((0, *LENGTHS)).tolist())
        places = {row[at : at + 16].tobytes(): at for at in range(0, len(row) - 16, 16)}
        for batch in feeding.train.micro_batches(1):
            at = places[batch.tokens.flatten().numpy().astype(row.dtype).tobytes()]
            assert batch.starts is not None
            begins = [number == 0 or at + number in begin for number in range(16)]
            assert (batch.starts.flatten() == torch.arange(16)).tolist() == begins
            follows = [not apart or at + number + 1 not in begin for number in range(16)]
            assert (batch.targets.flatten() >= 0).tolist() == follows


def test_a_spec_without_the_field_means_what_it_meant() -> None:
    """As one of an older journal."""
    document = parse_spec({"name": "a", "data": {"tokens": "/a"}}).model_dump(mode="json")
    assert document["data"].pop("reset_positions") is None
    for options, resets in (
        ({}, False),
        ({"document_mask": True}, True),
        ({"packing": "whole"}, True),
    ):
        found = JobSpec.model_validate({**document, "data": {**document["data"], **options}})
        assert found.data.resets_positions is resets
        assert found.data.finds_documents is resets


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_positions_without_a_beginning_cannot_begin_anew(positions: str) -> None:
    def document(**data: Any) -> dict[str, Any]:
        model = {"positions": positions}
        return {"name": "a", "model": model, "data": {"tokens": "/a", **data}}

    with pytest.raises(SpecError) as caught:
        parse_spec(document(reset_positions=True))
    (problem,) = caught.value.problems
    assert problem.field == "data.reset_positions"
    assert problem.message == (
        "is true, which applies only with model.positions = learned or rope, or with "
        f"data.document_mask = true, not {positions}; leave it out"
    )
    for apart in ({"document_mask": True}, {"packing": "whole"}):
        for resets in (True, False, None):
            parse_spec(document(reset_positions=resets, **apart))
    parse_spec(document(reset_positions=False))
