"""A checkpoint that plain torch has saved becomes one of ours."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.convert import Rename, convert
from checkpoint.torch_format.foreign import ForeignCheckpointError
from outlast.cli.main import app
from tests.checkpoint.helpers import load_alone, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_as_torch_does(folder: Path) -> list[NamedTensor]:
    """Save a model and its optimizer; what they hold under our names."""
    model, optimizer = trained_model()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "note": "from elsewhere"}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    held = []
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        held += [
            (f"model.{name}", parameter),
            (f"optim.{name}.exp_avg", moments["exp_avg"]),
            (f"optim.{name}.exp_avg_sq", moments["exp_avg_sq"]),
        ]
    return [
        NamedTensor(name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
        for name, tensor in held
    ]


def blank(tensors: list[NamedTensor]) -> list[NamedTensor]:
    return [
        NamedTensor(named.name, torch.full_like(named.tensor, 7), named.global_shape, named.offsets)
        for named in tensors
    ]


def test_model_and_optimizer_of_plain_torch_are_taken_over_bitwise(
    tmp_path: Path, url: str
) -> None:
    wanted = save_as_torch_does(tmp_path / "theirs")
    done = convert(Storage(str(tmp_path / "theirs")), Storage(url), step=40)
    assert done.num_tensors == len(wanted)
    assert "note" in done.left_behind
    assert any(name.endswith("weight.step") for name in done.left_behind)

    storage = Storage(url)
    assert storage.committed_steps() == [40]
    found = blank(wanted)
    extra = load_alone(storage, 40, found)
    assert same_bits(found, wanted)
    assert extra == {"converted_from": str(tmp_path / "theirs"), "step": 40}


def test_what_is_converted_is_readable_by_torch_again(tmp_path: Path, url: str) -> None:
    wanted = save_as_torch_does(tmp_path / "theirs")
    convert(Storage(str(tmp_path / "theirs")), Storage(url), step=40)
    folder = tmp_path / "store/job-1/step-00000040.1"
    target = {named.name: torch.full_like(named.tensor, 7) for named in wanted}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(target[named.name], named.tensor) for named in wanted)


def test_tensors_larger_than_a_block_are_summed_block_by_block(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.torch_format.framed.BLOCK_BYTES", 64)
    monkeypatch.setattr("checkpoint.torch_format.framed._WRITE_BYTES", 256)
    wanted = save_as_torch_does(tmp_path / "theirs")
    convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)
    found = blank(wanted)
    load_alone(Storage(url), 1, found)
    assert same_bits(found, wanted)


def test_names_of_another_program_are_translated(tmp_path: Path, url: str) -> None:
    weight = torch.randn(3, 2)
    state = {"net": {"w": weight}, "optimizer": {"state": {"w": {"exp_avg": weight + 1}}}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    source = Storage(str(tmp_path / "theirs"))
    convert(source, Storage(url), step=1, renames=[Rename.parse("net.=model.")])
    found = blank([NamedTensor("model.w", weight, (3, 2), (0, 0))])
    found += blank([NamedTensor("optim.w.exp_avg", weight, (3, 2), (0, 0))])
    load_alone(Storage(url), 1, found)
    assert torch.equal(found[0].tensor, weight)
    assert torch.equal(found[1].tensor, weight + 1)


def test_a_model_at_the_top_of_the_state_is_moved_below_a_name(tmp_path: Path, url: str) -> None:
    """As torchtitan saves it."""
    weight = torch.randn(3, 2)
    moments = {"exp_avg": weight + 1, "step": torch.tensor(4.0)}
    state = {"w": weight, "optimizer": {"state": {"w": moments}}}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    source = Storage(str(tmp_path / "theirs"))
    done = convert(source, Storage(url), step=1, renames=[Rename.parse("=model.")])
    assert done.left_behind == ("optimizer.state.w.step",)
    _, manifest = Storage(url).read_commit(1)
    found = {tensor.name for tensor in manifest.parts[0].tensors}
    assert found == {"model.w", "optim.w.exp_avg"}


def test_a_folder_without_a_model_is_refused_with_an_example(tmp_path: Path, url: str) -> None:
    dcp.save({"net": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(ForeignCheckpointError, match=r"the first is net\.w; give --rename"):
        convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)


def test_a_folder_of_something_else_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ForeignCheckpointError, match=r"has no \.metadata"):
        convert(Storage(str(tmp_path)), Storage(url), step=1)


def test_a_step_that_exists_is_not_replaced(tmp_path: Path, url: str) -> None:
    save_as_torch_does(tmp_path / "theirs")
    convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)
    with pytest.raises(ValueError, match="checkpoint of step 1 already"):
        convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)


def describe_one(folder: Path, *, size: int, file_bytes: int) -> None:
    """A description of one tensor, `model.w`, in a file from its beginning."""
    index = metadata.MetadataIndex("model.w", [0])
    # Some of these sizes torch itself could not say.
    chunk = metadata.ChunkStorageMetadata((0,), (size,))  # type: ignore[arg-type]
    properties = metadata.TensorProperties(torch.float32)
    tensor = metadata.TensorStorageMetadata(properties, (size,), [chunk])  # type: ignore[arg-type]
    place = filesystem._StorageInfo("__0_0.distcp", 0, file_bytes)
    described = metadata.Metadata({"model.w": tensor}, storage_data={index: place})
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.parametrize("size", [1 << 61, 1 << 70])
def test_a_description_of_impossible_tensors_is_refused(
    size: int, tmp_path: Path, url: str
) -> None:
    describe_one(tmp_path / "theirs", size=size, file_bytes=100)
    with pytest.raises(ForeignCheckpointError):
        convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)
    assert Storage(url).committed_steps() == []


class Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (self.command,))


@pytest.mark.parametrize("file_format", ["torch", "plain pickle"])
def test_a_tensor_that_is_a_hostile_pickle_is_refused_and_not_run(
    file_format: str, tmp_path: Path, url: str
) -> None:
    calls = Calls(f"touch {tmp_path}/ran")
    file = io.BytesIO()
    if file_format == "torch":
        torch.save(calls, file)
    else:
        pickle.dump(calls, file)
    describe_one(tmp_path / "theirs", size=2, file_bytes=len(file.getvalue()))
    (tmp_path / "theirs/__0_0.distcp").write_bytes(file.getvalue())
    with pytest.raises(ForeignCheckpointError, match=r"__0_0\.distcp, tensor model\.w"):
        convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)
    assert not (tmp_path / "ran").exists()
    assert Storage(url).committed_steps() == []


@pytest.mark.parametrize("damage", ["missing", "short", "swapped"])
def test_damaged_tensors_are_refused_and_nothing_is_committed(
    damage: str, tmp_path: Path, url: str
) -> None:
    save_as_torch_does(tmp_path / "theirs")
    [payload] = (tmp_path / "theirs").glob("*.distcp")
    match damage:
        case "missing":
            payload.unlink()
        case "short":
            payload.write_bytes(payload.read_bytes()[:300])
        case _:
            torch.save(torch.zeros(5), payload)
    with pytest.raises(ForeignCheckpointError):
        convert(Storage(str(tmp_path / "theirs")), Storage(url), step=1)
    assert Storage(url).committed_steps() == []


def test_the_command_says_what_it_took_and_what_it_left(tmp_path: Path, url: str) -> None:
    save_as_torch_does(tmp_path / "theirs")
    command = ["ckpt", "convert", str(tmp_path / "theirs"), url, "--step", "40"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["step"], facts["num_tensors"]) == (40, 15)
    assert "note" in facts["left_behind"]
    again = CliRunner().invoke(app, command)
    assert "already" in str(again.exception)
    other = CliRunner().invoke(app, [*command[:-1], "41"])
    # A long URL has a line of its own.
    words = " ".join(other.stdout.split())
    assert f"step 41 of {url}" in words
    assert "left" in words
