"""Models of Hugging Face are the same to the bit behind a job on several ranks.

Each is imported, loaded by the workers of tp 2 and pp 2, saved by them, uploaded and exported.
`test_hf_convert` has the same without a job, `test_hf_training` with training in between.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.hf.families import FAMILIES
from checkpoint.hf.sections import compared, section_of
from checkpoint.storage.storage import Storage
from outlast.model import ModelSpec
from outlast.worker_contract import WorkerExitCode
from tests.checkpoint import hf_folders
from tests.trainer.hf_jobs import spec_of, write_tokens
from tests.trainer.hf_models import CONFIGS
from tests.trainer.jobs_families import save_what_is_loaded
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import upload_all

# The first test waits for all models.
pytestmark = pytest.mark.timeout(1200)

SEQUENCES, LAYOUT = 4, {"tp": 2, "pp": 2, "micro_batch": 2}
# A quarter of the rows is padding, all of it on the second tensor rank.
VOCAB_MULTIPLE = 128
# What others than the model read of a config.
KEPT = ("model_type", "architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="module")
def passed_on(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of each model: `before`, as `transformers` wrote it, and `after` our jobs."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "before").symlink_to(hf_folders.saved(tmp_path_factory))
    write_tokens(folder, sequences=SEQUENCES)
    jobs: dict[Path, dict[str, Any]] = {}
    models: dict[str, ModelSpec] = {}
    for name in CONFIGS:
        job = folder / "jobs" / name
        job.mkdir(parents=True)
        root = str(job / "root")
        source = folder / "before" / name
        section = import_folder(source, Storage(root), vocab_multiple=VOCAB_MULTIPLE).section
        models[name] = ModelSpec.model_validate(section)
        jobs[job] = spec_of(
            folder,
            section,
            sequences=SEQUENCES,
            steps=1,
            parallel=LAYOUT,
            checkpoint={"load": root, "storage_interval_steps": 1},
        )
    for codes in ranks.run(save_what_is_loaded, 4, jobs):
        assert dict(zip(CONFIGS, codes, strict=True)) == dict.fromkeys(CONFIGS, WorkerExitCode.DONE)
    for job, spec in jobs.items():
        upload_all(job, spec)
        source, out = folder / "before" / job.name, folder / "after" / job.name
        export_folder(Storage(str(job / "store" / "job-1")), 1, models[job.name], out, like=source)
    return folder


def test_there_is_a_model_of_every_family(passed_on: Path) -> None:
    assert {_config(passed_on / "before" / name)["model_type"] for name in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_the_same_behind_a_job_of_several_ranks(passed_on: Path, name: str) -> None:
    before, after = (passed_on / kind / name for kind in ("before", "after"))
    saved, found = _weights(before), _weights(after)
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key].view(torch.int16), tensor.view(torch.int16)), key
    was, is_now = _config(before), _config(after)
    assert [is_now.get(key) for key in KEPT] == [was.get(key) for key in KEPT]
    assert _compared(is_now) == _compared(was)


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return compared(ModelSpec.model_validate(section_of(config)))


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
