"""A job begins with weights of Hugging Face: at step 0, with a fresh optimizer, on any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.hf.families import FAMILIES
from checkpoint.hf.folder import opened
from checkpoint.loading import wrong_to_load
from checkpoint.storage.storage import Storage
from outlast.spec.parse import parse_spec
from outlast.tokens.manifest import Manifest
from outlast.worker_contract import WorkerExitCode
from tests.cli.running import outlast, outlast_json
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import make_text, spec_of, steps_of, train_and_upload

QWEN3 = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "head_width": 12,
    "seq_len": 16,
    "tied_embeddings": False,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": "head",
}
# Of 320 rows the last 61 are padding.
PADDED = {"vocab_size": 259, "vocab_multiple": 64}


def job(folder: Path, parallel: dict[str, Any], *, steps: int = 3, **changes: Any) -> Any:
    model = {**QWEN3, **PADDED, **changes.pop("model", {})}
    checkpoint = {"storage_interval_steps": 2, **changes}
    spec = spec_of(folder, steps=steps, parallel=parallel, model=model, checkpoint=checkpoint)
    return spec | {"eval": {"interval_steps": None}}


@pytest.fixture(scope="module")
def exported(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a job of two tensor ranks after two steps, as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("first")
    make_text(folder)
    spec = job(folder, {"tp": 2})
    train_and_upload(ranks, folder, spec, attempt=1, stop_after=2)
    root = Storage(str(folder / "store" / "job-1"))
    model = parse_spec(spec).model
    done = export_folder(root, 2, model, folder / "hf", dtype=torch.float32)
    assert done.architecture == "Qwen3ForCausalLM"
    return folder / "hf"


def write_manifest(folder: Path, *, tokenizer: str) -> None:
    folder.mkdir(exist_ok=True)
    Manifest(
        tokenizer=tokenizer,
        vocab_size=256,
        token_type="uint16",
        end_of_document=None,
        source=("text",),
        digest="",
        splits={},
    ).write(folder)


def run(ranks: RankPool, folder: Path, spec: dict[str, Any]) -> list[float]:
    """Losses of a whole run."""
    folder.mkdir()
    world_size = parse_spec(spec).layout.world_size
    results = ranks.run(train, world_size, folder, spec, 1, 0)
    assert {result["code"] for result in results} == {WorkerExitCode.DONE}
    return [record.loss for record in steps_of(folder, 1, world_size - 1)]


def test_a_job_begins_with_imported_weights_on_any_layout(
    ranks: RankPool, exported: Path, tmp_path: Path
) -> None:
    make_text(tmp_path)
    root = tmp_path / "root"
    import_folder(exported, Storage(str(root)))
    # Import knows nothing of padding, and a job on one rank needs none.
    plain = {"vocab_multiple": 1}
    spec = job(tmp_path, {}, load=str(root), model=plain)
    assert wrong_to_load(parse_spec(spec), str(root), Storage(str(root))) == []
    dense = run(ranks, tmp_path / "dense", spec)
    note = json.loads((tmp_path / "dense" / "a1-rank-0.environment.json").read_text())
    assert note["changes"] == [f"the checkpoint of step 0 is from {exported}"]

    scratch = run(ranks, tmp_path / "scratch", job(tmp_path, {}, model=plain))
    assert dense[0] < scratch[0] - 0.01
    split = job(tmp_path, {"pp": 2, "zero": {"level": 1}, "dp": 2}, load=str(root), model=plain)
    assert run(ranks, tmp_path / "split", split) == pytest.approx(dense, rel=1e-5)


def test_weights_of_a_job_are_begun_with_as_if_they_were_imported(
    ranks: RankPool, exported: Path, tmp_path: Path
) -> None:
    make_text(tmp_path)
    imported, trained = tmp_path / "imported", exported.parent / "store" / "job-1"
    import_folder(exported, Storage(str(imported)), vocab_multiple=64)
    # What was trained there so far, and on which samples, does not matter.
    loads = {"load": str(trained), "load_step": 2, "load_weights_only": True}
    layout = {"tp": 2, "zero": {"level": 1}, "dp": 2}
    spec = job(tmp_path, layout, steps=2, **loads) | {"seed": 5}
    assert wrong_to_load(parse_spec(spec), str(trained), Storage(str(trained))) == []
    losses = run(ranks, tmp_path / "tuned", spec)
    note = json.loads((tmp_path / "tuned" / "a1-rank-0.environment.json").read_text())
    assert note["changes"] == [f"the weights are those of step 2 of {trained}"]

    expected = job(tmp_path, layout, steps=2, load=str(imported)) | {"seed": 5}
    assert run(ranks, tmp_path / "expected", expected) == losses


def test_weights_of_another_model_are_not_begun_with(
    ranks: RankPool, exported: Path, tmp_path: Path
) -> None:
    make_text(tmp_path)
    loads = {"load": str(exported.parent / "store" / "job-1"), "load_weights_only": True}
    model = {"qk_norm": "none"}
    (tmp_path / "run").mkdir()
    spec = job(tmp_path, {"tp": 2}, model=model, **loads)
    results = ranks.run(train, 2, tmp_path / "run", spec, 1, 0)
    assert {result["code"] for result in results} == {WorkerExitCode.FAILED}
    said = (tmp_path / "run" / "a1-rank-1.error.json").read_text()
    assert "holds 4 tensors that this model has not" in said


def test_imported_weights_are_padded_for_tensor_ranks(
    ranks: RankPool, exported: Path, tmp_path: Path
) -> None:
    make_text(tmp_path)
    plain, padded = tmp_path / "plain", tmp_path / "padded"
    import_folder(exported, Storage(str(plain)))
    import_folder(exported, Storage(str(padded)), vocab_multiple=64)
    dense = run(
        ranks, tmp_path / "dense", job(tmp_path, {}, load=str(plain), model={"vocab_multiple": 1})
    )
    split = job(tmp_path, {"tp": 2, "pp": 2}, load=str(padded))
    assert run(ranks, tmp_path / "split", split) == pytest.approx(dense, rel=1e-5)


def test_what_was_padded_comes_out_without(exported: Path, tmp_path: Path) -> None:
    root = Storage(str(tmp_path / "root"))
    done = import_folder(exported, root, vocab_multiple=64)
    model = parse_spec({"name": "a", "model": done.section}).model
    assert (model.vocab_size, model.vocab_rows) == (259, 320)
    export_folder(root, 0, model, tmp_path / "out", dtype=torch.float32)
    llama = FAMILIES["llama"]
    with opened(exported, llama) as before, opened(tmp_path / "out", llama) as after:
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_job_that_trained_on_bytes_is_asked_in_bytes(
    ranks: RankPool, exported: Path, tmp_path: Path
) -> None:
    make_text(tmp_path)
    folder, root = tmp_path / "hf", tmp_path / "root"
    shutil.copytree(exported, folder)
    (folder / "tokenizer.json").write_text("none that works")
    import_folder(folder, Storage(str(root)))
    spec = job(tmp_path, {}, load=str(root), model={"vocab_multiple": 1})
    (problem,) = wrong_to_load(parse_spec(spec), str(root), Storage(str(root)))
    assert problem.field == "data.tokens"
    # Nor tokens that were prepared as bytes are.
    write_manifest(tmp_path / "bytes", tokenizer="byte")
    tokens = {"tokens": str(tmp_path / "bytes"), "source": "python-stdlib"}
    of_bytes = parse_spec({**spec, "data": {**spec["data"], **tokens}})
    (problem,) = wrong_to_load(of_bytes, str(root), Storage(str(root)))
    assert "whose ids are bytes, and the weights at" in problem.message
    write_manifest(tmp_path / "bytes", tokenizer=str(folder / "tokenizer.json"))
    assert wrong_to_load(of_bytes, str(root), Storage(str(root))) == []
    # A rank is not asked whether it may.
    train_and_upload(ranks, tmp_path, spec, attempt=1, stop_after=2)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    of_job = str(tmp_path / "store" / "job-1")
    given = ("--spec", str(tmp_path / "job.yaml"), "--prompt", " ", "--max-tokens", "2")
    assert outlast_json("generate", of_job, *given)["tokenizer"] == "byte"
    # What was imported reads the ids of its own.
    assert f"tokenizer {folder}" in outlast("generate", str(root), *given).stderr
