"""Weights of Hugging Face go into a checkpoint and come out again, the same to the bit."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from checkpoint.hf.convert import import_folder
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.export import RECORD, begun_step, export_folder, type_of
from checkpoint.hf.sections import section_of
from checkpoint.hf.tensor_files import TensorFile
from checkpoint.loading import wrong_to_load
from checkpoint.storage.storage import Storage
from outlast.cli.errors import ExitCode
from outlast.model import ModelSpec
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.checkpoint import hf_folders
from tests.cli.running import outlast, outlast_json
from tests.trainer.hf_models import CONFIGS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model, as `save_pretrained` writes it."""
    return hf_folders.saved(tmp_path_factory)


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    """A copy of one of them."""
    return shutil.copytree(saved / "llama-linear", tmp_path / "llama")


def weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def model_of(folder: Path) -> ModelSpec:
    return ModelSpec.model_validate(section_of(json.loads((folder / "config.json").read_text())))


def test_what_goes_in_comes_out_to_the_bit(saved: Path, tmp_path: Path) -> None:
    for name in CONFIGS:
        source, root = saved / name, Storage(str(tmp_path / "roots" / name))
        done = import_folder(source, root)
        model = model_of(source)
        assert done.section == section_of(json.loads((source / "config.json").read_text()))
        out = tmp_path / "out" / name
        export_folder(root, 0, model, out, like=source, file_bytes=30_000)
        before, after = weights(source), weights(out)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), name
        assert (out / "tokenizer.json").read_text() == "{}"
        assert len(list(out.glob("*.safetensors"))) > 1
    # And `transformers` takes ours for theirs.
    said = hf_folders.run("compare", saved, tmp_path / "out").split()
    assert dict(zip(said[::2], said[1::2], strict=True)) == dict.fromkeys(CONFIGS, "True")


def test_an_architecture_is_found_for_a_model(llama: Path, tmp_path: Path) -> None:
    root = Storage(str(tmp_path / "root"))
    import_folder(llama, root)
    done = export_folder(root, 0, model_of(llama), tmp_path / "out", dtype=torch.float32)
    assert (done.architecture, done.dtype) == ("LlamaForCausalLM", "float32")
    assert done.files == ("model.safetensors",)
    other = ModelSpec.model_validate({**model_of(llama).model_dump(), "block": "parallel"})
    with pytest.raises(UnsupportedModelError, match="no architecture has this model"):
        export_folder(root, 0, other, tmp_path / "other")


def test_a_folder_of_another_model_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path
) -> None:
    root = Storage(str(tmp_path / "root"))
    config = json.loads((llama / "config.json").read_text())

    def refused_with(**changes: object) -> str:
        (llama / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises((DamagedFolderError, UnsupportedModelError)) as caught:
            import_folder(llama, root)
        assert not root.committed_steps()
        return str(caught.value)

    assert "rows; its config says 64" in refused_with(intermediate_size=64)
    assert "no file of weights has model.layers.4" in refused_with(num_hidden_layers=5)
    assert "has no model.layers.3." in refused_with(num_hidden_layers=3)
    assert "lm_head.weight differs from" in refused_with(tie_word_embeddings=True)
    assert "known are: llama" in refused_with(model_type="mamba")


def test_a_file_that_is_cut_off_is_refused(llama: Path, tmp_path: Path) -> None:
    path = next(llama.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFolderError, match="not a whole file of safetensors"):
        import_folder(llama, Storage(str(tmp_path / "root")))


class CutOffError(Exception):
    pass


def cut_off(source: Path, root: Path, *, behind: int) -> None:
    """An import in files of 20 kB that ends behind so many bytes."""
    num_bytes = 0

    def count(more: int) -> None:
        nonlocal num_bytes
        num_bytes += more
        if num_bytes > behind:
            raise CutOffError

    with pytest.raises(CutOffError):
        import_folder(source, Storage(str(root)), part_bytes=20_000, on_bytes=count)


def written_at(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in root.rglob("*.distcp")}


def test_an_import_that_was_cut_off_goes_on(llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    whole = import_folder(llama, Storage(str(tmp_path / "whole")))
    cut_off(llama, root, behind=whole.size_bytes // 2)
    assert Storage(str(root)).committed_steps() == []
    before = written_at(root)
    assert before
    counted: list[int] = []
    done = import_folder(llama, Storage(str(root)), part_bytes=20_000, on_bytes=counted.append)
    after = written_at(root)
    assert len(after) > len(before)
    assert {name: after[name] for name in before} == before
    assert sum(counted) == done.parameters * 4
    assert not list(root.rglob("rank-*.json"))
    out = tmp_path / "out"
    export_folder(Storage(str(root)), 0, model_of(llama), out, dtype=torch.float32)
    assert all(torch.equal(weights(out)[name], each) for name, each in weights(llama).items())


def test_a_part_whose_record_is_damaged_is_written_again(llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    cut_off(llama, root, behind=100_000)
    damaged = min(root.rglob("rank-*.json"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = written_at(root)
    import_folder(llama, Storage(str(root)), part_bytes=20_000)
    after = written_at(root)
    assert [name for name in before if after[name] != before[name]] == ["__0_0.distcp"]


def test_an_import_of_other_weights_begins_anew(llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    cut_off(llama, root, behind=100_000)
    path = next(llama.glob("*.safetensors"))
    changed = {name: each + 1 for name, each in load_file(path).items()}
    save_file(changed, path, metadata={"format": "pt"})
    import_folder(llama, Storage(str(root)), part_bytes=20_000)
    out = tmp_path / "out"
    export_folder(Storage(str(root)), 0, model_of(llama), out, dtype=torch.float32)
    assert all(torch.equal(weights(out)[name], each) for name, each in changed.items())


def begin_export(root: Storage, model: ModelSpec, out: Path) -> dict[str, int]:
    """An export in files of 30 kB that ends behind the second; when each was written."""
    num_files = 0

    def count(more: int) -> None:
        nonlocal num_files
        num_files += 1
        if num_files == 2:
            raise CutOffError

    with pytest.raises(CutOffError):
        export_folder(root, 0, model, out, file_bytes=30_000, on_bytes=count)
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}


@pytest.fixture
def imported(llama: Path, tmp_path: Path) -> tuple[Storage, ModelSpec]:
    root = Storage(str(tmp_path / "root"))
    import_folder(llama, root)
    return root, model_of(llama)


def test_an_export_that_was_cut_off_goes_on(
    imported: tuple[Storage, ModelSpec], tmp_path: Path
) -> None:
    root, model = imported
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected = export_folder(root, 0, model, whole, file_bytes=30_000)
    before = begin_export(root, model, out)
    assert len(before) == 2
    assert begun_step(out) == 0
    # Nobody takes it for a whole one, and a file that was being written has another name.
    assert not (out / "config.json").exists()
    (out / "model-00003-of-00003.safetensors.partial").write_bytes(b"half")
    counted: list[int] = []
    done = export_folder(root, 0, model, out, file_bytes=30_000, on_bytes=counted.append)
    assert done == expected
    assert sum(counted) == done.size_bytes
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    there = {path.name for path in out.iterdir()} - {"model-00003-of-00003.safetensors.partial"}
    assert there == {path.name for path in whole.iterdir()}
    for name in there:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_file_of_an_export_that_is_damaged_is_written_again(
    imported: tuple[Storage, ModelSpec], tmp_path: Path
) -> None:
    root, model = imported
    whole, out = tmp_path / "whole", tmp_path / "out"
    export_folder(root, 0, model, whole, file_bytes=30_000)
    damaged = out / min(begin_export(root, model, out))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    export_folder(root, 0, model, out, file_bytes=30_000)
    assert damaged.read_bytes() == (whole / damaged.name).read_bytes()


def test_an_export_goes_on_with_no_other(
    imported: tuple[Storage, ModelSpec], tmp_path: Path
) -> None:
    root, model = imported
    out = tmp_path / "out"
    before = begin_export(root, model, out)
    with pytest.raises(DamagedFolderError, match="has the beginning of another export"):
        export_folder(root, 0, model, out, file_bytes=30_000, dtype=torch.float32)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == before
    with (out / RECORD).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DamagedFolderError, match="another process exports into"):
            export_folder(root, 0, model, out, file_bytes=30_000)
    (out / RECORD).unlink()
    with pytest.raises(DamagedFolderError, match="is not empty"):
        export_folder(root, 0, model, out, file_bytes=30_000)


def test_type_of_an_export_is_that_of_the_original_or_of_the_job(
    llama: Path, tmp_path: Path
) -> None:
    assert type_of(None, "bf16") == "bf16"
    assert type_of(None, "fp64") == "fp32"
    config = json.loads((llama / "config.json").read_text())
    config.pop("dtype", None)
    for found, expected in (("float16", "fp16"), ("float32", "fp32"), ("float8", "bf16")):
        (llama / "config.json").write_text(json.dumps({**config, "torch_dtype": found}))
        assert type_of(llama, "bf16") == expected


def test_integers_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, dtype=torch.int32)}, path)
    file = TensorFile(path)
    with pytest.raises(DamagedFolderError, match="a is of type I32; allowed: F64, F32, BF16, F16"):
        file.read("a")
    file.close()


def test_commands_import_and_export(llama: Path, tmp_path: Path) -> None:
    root, spec, out = tmp_path / "root", tmp_path / "job.yaml", tmp_path / "out"
    done = outlast("import", "hf", str(llama), str(root), "--spec", str(spec))
    assert done.returncode == ExitCode.OK, done.stderr
    assert "step 0 of" in done.stdout
    written = yaml.safe_load(spec.read_text())
    assert written["checkpoint"] == {"load": str(root)}
    assert written["model"]["rope_scaling"] == {"kind": "linear", "factor": 4.0}
    # Its tokenizer's ids are not bytes.
    text = JobSpec.model_validate(written)
    problem, *others = wrong_to_load(text, str(root), Storage(str(root)))
    assert (problem.field, others) == ("data.tokens", [])
    assert f"`outlast data prepare --tokenizer {llama}` makes" in problem.message
    given = parse_spec({**written, "data": {"tokens": "/somewhere"}})
    assert wrong_to_load(given, str(root), Storage(str(root))) == []
    again = outlast("import", "hf", str(llama), str(root))
    assert again.returncode == ExitCode.BAD_INPUT
    assert "has checkpoints already" in again.stderr
    exported = outlast_json("export", "hf", str(root), str(out), "--spec", str(spec))
    assert exported["architecture"] == "LlamaForCausalLM"
    assert weights(out).keys() == weights(llama).keys()


def test_a_checkpoint_says_what_it_is_of_and_where_it_comes_from(
    llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    import_folder(llama, Storage(str(root)), vocab_multiple=64)
    out = tmp_path / "out"
    done = outlast("export", "hf", str(root), str(out))
    assert done.returncode == ExitCode.OK, done.stderr
    assert f"that of {llama}" in " ".join(done.stdout.split())
    assert (out / "tokenizer.json").read_text() == "{}"
    before, after = weights(llama), weights(out)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    # Of a folder that is gone nothing is copied.
    llama.rename(tmp_path / "elsewhere")
    again = outlast("export", "hf", str(root), str(tmp_path / "again"), "--type", "fp32")
    assert again.returncode == ExitCode.OK, again.stderr
    assert "none: give --like" in again.stdout
    assert not (tmp_path / "again" / "tokenizer.json").exists()
    # Without a controller to ask, either.
    refused = outlast("generate", str(root), "--prompt", "a")
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "which tokenizer the model has is not known; give --tokenizer" in refused.stderr
    made = outlast_json("generate", str(root), "--prompt", "#", "--tokenizer", "byte")
    assert made["step"] == 0
    empty = outlast("export", "hf", str(tmp_path / "elsewhere"), str(tmp_path / "never"))
    assert "no checkpoints" in empty.stderr


@pytest.fixture
def older_bert(saved: Path, tmp_path: Path) -> Path:
    """A folder as BERT was published: with heads that the model is without, and older names."""
    folder = tmp_path / "bert"
    folder.mkdir()
    shutil.copy(saved / "bert" / "config.json", folder)
    special = [{"id": 90, "content": "[MASK]", "special": True}]
    special += [{"id": 91, "content": "[CLS]", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": special}))
    found = weights(saved / "bert")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in found.items()
    }
    save_file(
        {
            **older,
            "bert.pooler.dense.weight": torch.zeros(32, 32),
            "cls.seq_relationship.bias": torch.zeros(2),
            "bert.embeddings.position_ids": torch.zeros(1, 80),
            "cls.predictions.decoder.bias": found["cls.predictions.bias"].clone(),
        },
        folder / "model.safetensors",
    )
    return folder


def test_bert_as_it_was_published_goes_in(older_bert: Path, saved: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "root")
    spec = str(tmp_path / "spec.yaml")
    done = outlast("import", "hf", str(older_bert), url, "--spec", spec)
    assert done.returncode == ExitCode.OK, done.stderr
    written = yaml.safe_load(Path(spec).read_text())
    assert written["data"] == {"masked": {"fraction": 0.15, "mask_token": 90, "never": [91]}}
    out = tmp_path / "out"
    export_folder(Storage(url), 0, model_of(older_bert), out, like=older_bert)
    before, after = weights(saved / "bert"), weights(out)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    # It does not go on with a text.
    done = outlast("generate", url, "--spec", spec, "--prompt", "a")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "predicts hidden tokens" in done.stderr


def test_bert_with_its_second_head_goes_in_and_out(saved: Path, tmp_path: Path) -> None:
    source, url, spec = tmp_path / "source", str(tmp_path / "root"), tmp_path / "spec.yaml"
    shutil.copytree(saved / "bert-with-order", source)
    special = [
        {"id": number, "content": f"[{name}]", "special": True}
        for number, name in ((90, "MASK"), (91, "CLS"), (92, "SEP"))
    ]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": special}))
    done = outlast("import", "hf", str(source), url, "--spec", str(spec))
    assert done.returncode == ExitCode.OK, done.stderr
    written = yaml.safe_load(spec.read_text())
    assert written["model"]["sentence_order"]
    assert written["data"] == {
        "masked": {"fraction": 0.15, "mask_token": 90, "never": [91, 92]},
        "sentence_order": {"cls_token": 91, "sep_token": 92},
    }
    out = str(tmp_path / "out")
    exported = outlast_json("export", "hf", url, out, "--spec", str(spec))
    assert exported["architecture"] == "BertForPreTraining"


def test_a_copy_that_differs_is_refused(older_bert: Path, tmp_path: Path) -> None:
    path = older_bert / "model.safetensors"
    save_file({**load_file(path), "cls.predictions.decoder.bias": torch.zeros(96)}, path)
    with pytest.raises(
        DamagedFolderError, match=r"decoder\.bias differs from cls\.predictions\.bias"
    ):
        import_folder(older_bert, Storage(str(tmp_path / "root")))
