"""A checkpoint of another model is found before a job begins with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.stage.payload import NamedTensor
from outlast.cli.errors import ExitCode
from tests.checkpoint.helpers import DEADLINE_S, make_stager, uploading
from tests.cli.running import outlast, outlast_json

HIDDEN = 64


def checkpoint_of(folder: Path, num_parameters: int) -> str:
    """A job's folder whose checkpoint of step 20 has a model of this size, and optimizer state."""
    url = f"file://{folder}/store/other-1"
    tensors = [
        NamedTensor(name=name, tensor=torch.zeros(length), global_shape=(length,), offsets=(0,))
        for name, length in (
            ("model.one", 1_000),
            ("model.two", num_parameters - 1_000),
            ("optim.one.exp_avg", 1_000),
        )
    ]
    stager = make_stager(folder / "memory", tensors)
    with uploading(url, folder / "memory") as (uploader, news):
        stager.save(20, {"step": 20}, upload=True, common_step=19)
        assert uploader.drain(DEADLINE_S), news
    stager.close()
    # A newer one that is damaged is passed over.
    (folder / "store/other-1/commits/00000021.json").write_text("damaged")
    return url


@pytest.mark.parametrize("surplus", [0, 1])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, surplus: int) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(f"name: a\nmodel: {{hidden: {HIDDEN}}}\n")
    nowhere = ("--state-dir", str(tmp_path / "none"))
    needed = outlast_json("plan", str(spec), *nowhere)["parameters"]
    url = checkpoint_of(tmp_path, needed + surplus)
    done = outlast("plan", str(spec), "--set", f"checkpoint.load={url}", *nowhere)
    assert done.returncode == ExitCode.OK, done.stderr
    said = done.stdout.replace("\n", " ")
    assert ("warning: checkpoint.load is" in said) == bool(surplus)
    if surplus:
        assert f"step 20 holds a model of {needed + 1:,} parameters, and that of" in said
        assert f"has {needed:,}; give the model section of the job that saved it" in said
