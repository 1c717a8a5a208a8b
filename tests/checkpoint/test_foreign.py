"""Descriptions that torch has pickled are read; hostile and damaged ones are refused unrun."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.torch_format import foreign
from checkpoint.torch_format.foreign import ForeignCheckpointError, parse_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved_metadata(folder: Path, state: dict[str, object]) -> bytes:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


def test_what_torch_has_saved_is_described_in_full(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(4, 6), "half": torch.randn(3).bfloat16()},
        "count": torch.tensor(3),
        "text": "not a tensor",
    }
    found = parse_metadata(saved_metadata(tmp_path / "ckpt", state))
    assert found.others == ("text",)
    chunks = {chunk.name: chunk for chunk in found.chunks}
    assert set(chunks) == {"model.w", "model.half", "count"}
    weight = chunks["model.w"]
    assert (weight.dtype, weight.global_shape, weight.offsets) == ("float32", (4, 6), (0, 0))
    assert (weight.shape, weight.nbytes) == ((4, 6), 96)
    assert chunks["count"].shape == ()
    assert chunks["model.half"].dtype == "bfloat16"
    raw = (tmp_path / "ckpt" / weight.file).read_bytes()[weight.start : weight.stop]
    (tmp_path / "one.pt").write_bytes(raw)
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(loaded, state["model"]["w"])  # type: ignore[index]  # it is a dict


class Calls:
    """Unpickling it calls something."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


def hostile(mark: Path) -> dict[str, bytes]:
    """Pickles that would make the file `mark` if they were run."""
    command = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w')"
    calls = {
        "system": Calls(os.system, command),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "popen": Calls(subprocess.Popen, ["touch", str(mark)]),
        "getattr": Calls(getattr, "text", "upper"),
        "unpickler": Calls(pickle.loads, pickle.dumps(Calls(os.system, command))),
        "torch": Calls(torch.load, str(mark)),
        "inside": Metadata({"w": Calls(os.system, command)}),
        "key": Metadata({}, storage_data={Calls(os.system, command): 1}),
    }
    made = {name: pickle.dumps(value) for name, value in calls.items()}
    for protocol in (0, 1, 2, 3, 4, 5):
        made[f"protocol {protocol}"] = pickle.dumps(calls["system"], protocol=protocol)
    # A dotted name, which may lead from an allowed module anywhere.
    made["dotted"] = (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93"
        + b"\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R."
    )
    return made


@pytest.mark.parametrize("name", hostile(Path("/nowhere")))
def test_a_hostile_pickle_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    raw = hostile(mark)[name]
    # A pickle that is malformed would be refused for that.
    list(pickletools.genops(raw))
    with pytest.raises(ForeignCheckpointError, match="has no use for"):
        parse_metadata(raw)
    assert not mark.exists()


def test_classes_that_a_pickle_may_name_cannot_be_changed_by_it() -> None:
    """BUILD on a class instead of an instance would set attributes of it."""
    name = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for state in (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86"):
        with pytest.raises(ForeignCheckpointError):
            parse_metadata(name + state + b"b.")
    assert not hasattr(foreign._Metadata, "a")


def described(**changes: object) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [chunk])
    place = torch.distributed.checkpoint.filesystem._StorageInfo("__0_0.distcp", 0, 100)
    index = torch.distributed.checkpoint.metadata.MetadataIndex("w", [0])
    fields: dict[str, object] = {
        "state_dict_metadata": {"w": tensor},
        "storage_data": {index: place},
    }
    for path, value in changes.items():
        match path:
            case "file":
                place.relative_path = value  # type: ignore[assignment]  # wrong on purpose
            case "dtype":
                tensor.properties.dtype = value  # type: ignore[assignment]
            case "chunks":
                tensor.chunks = value  # type: ignore[assignment]
            case "transforms":
                place.transform_descriptors = value  # type: ignore[assignment]
            case _:
                fields[path] = value
    return Metadata(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (described(file="../../etc/passwd"), "is not a file of the checkpoint"),
        (described(file="/etc/passwd"), "is not a file of the checkpoint"),
        (described(file=7), "where a name belongs"),
        (described(dtype=torch.complex64), "complex64"),
        (described(chunks="many"), "no list of chunks"),
        (described(transforms=["zstd"]), "without compression"),
        (described(storage_data={}), "is in no file"),
        (described(storage_data=None), "where a mapping belongs"),
        (described(state_dict_metadata=[]), "where a mapping belongs"),
        (BytesStorageMetadata(), "belongs"),
        ({"w": 1}, "belongs"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(metadata: object, problem: str) -> None:
    with pytest.raises(ForeignCheckpointError, match=problem):
        parse_metadata(pickle.dumps(metadata))


def test_a_sound_description_is_read() -> None:
    [chunk] = parse_metadata(pickle.dumps(described())).chunks
    assert (chunk.file, chunk.start, chunk.stop) == ("__0_0.distcp", 0, 100)


def test_description_of_a_python_that_pickles_enums_by_name_is_read() -> None:
    raw = io.BytesIO()
    pickler = pickle.Pickler(raw)
    by_name = {_MEM_FORMAT_ENCODING: lambda one: (getattr, (type(one), one.name))}
    pickler.dispatch_table = copyreg.dispatch_table | by_name  # type: ignore[assignment]  # a Mapping
    pickler.dump(described())
    assert b"getattr" in raw.getvalue()
    assert parse_metadata(raw.getvalue()) == parse_metadata(pickle.dumps(described()))


def test_any_truncation_is_refused() -> None:
    raw = pickle.dumps(described())
    for length in range(len(raw)):
        with pytest.raises(ForeignCheckpointError):
            parse_metadata(raw[:length])
