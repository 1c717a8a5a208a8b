"""A checkpoint of any layout as a folder of Hugging Face, which goes on where it was cut off.

One file of theirs is in memory at a time. A file has its name when it is whole. What is being
exported is written down first, and `config.json`, without which nobody takes the folder for a whole
one, last.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.core.checked_json import canonical, sha256
from checkpoint.core.manifest import Manifest
from checkpoint.hf import folder as folders
from checkpoint.hf.convert import MODEL
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.families import FAMILIES
from checkpoint.hf.family import Family
from checkpoint.hf.rules import Rule
from checkpoint.hf.sections import config_like, config_of, rules_of
from checkpoint.hf.tensor_files import TensorFile, write_tensors
from checkpoint.restore.peers import Alone
from checkpoint.restore.restore import load_storage, read_manifest
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import OnBytes
from outlast.model import ModelSpec
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 4 << 30
# Weights are saved in a larger type than most are exported in: of a file's, so many are in memory
# in both at once.
_READS_PER_FILE = 8
# What is being exported: in the folder until it is whole.
RECORD = ".outlast-export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What came of an export."""

    architecture: str
    step: int
    dtype: str
    files: tuple[str, ...]
    size_bytes: int


def export_folder(
    source: Storage,
    step: int,
    model: ModelSpec,
    target: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> Exported:
    """Write the weights of a checkpoint as a folder that `transformers` loads.

    `like` is a folder of the same architecture whose tokenizer is copied. Files of weights
    have `file_bytes` at most, but for a tensor that is larger. Files that a call with the same
    arguments has left, which was cut off, stay as they are.

    Raises:
        UnsupportedModelError: no architecture that we know has this model.
        DamagedFolderError: `like` is damaged, or `target` has files of something else.
        LayoutMismatchError: the checkpoint is of another model.
    """
    family, config = _config(model, like)
    config["dtype"] = str(dtype).removeprefix("torch.")
    saved = _Saved(source, read_manifest(source, step))
    groups = _grouped(rules_of(model, family), saved, file_bytes // dtype.itemsize)
    files: dict[str, dict[str, int]] = {}
    with _begun(target, _record(saved.manifest, config, file_bytes)):
        for number, group in enumerate(groups, start=1):
            name = _weights_name(number, len(groups))
            sizes = _written(target / name)
            if not sizes:
                sizes = _write(target / name, _read(saved, dtype, group))
            files[name] = sizes
            on_bytes(sum(sizes.values()))
        size_bytes = _write_index(target, files)
        _end(target, config, like)
    return Exported(
        architecture=config["architectures"][0],
        step=step,
        dtype=config["dtype"],
        files=tuple(files),
        size_bytes=size_bytes,
    )


def export_bytes(job: JobSpec, type_name: str) -> int:
    """How much an export of the job's model writes; padding of the vocabulary is left out."""
    model = job.model.model_copy(update={"vocab_multiple": 1})
    unpadded = job.model_copy(update={"model": model})
    return num_parameters(unpadded) * DTYPES[type_name].itemsize


def type_of(like: Path | None, precision: str) -> str:
    """The type in which weights are exported unless one is asked for: that of `like`, or the
    one that the job computes in.

    Raises:
        DamagedFolderError: `like` has no config.
    """
    config = {} if like is None else folders.read_config(like)
    # Older versions of `transformers` have called it the other.
    said = config.get("dtype", config.get("torch_dtype"))
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    return names.get(str(said)) or (precision if precision in DTYPES else "fp32")


def begun_step(target: Path) -> int | None:
    """The step of the export that was cut off in a folder, or is being done; None without one."""
    try:
        record = json.loads((target / RECORD).read_bytes() or b"{}")
    except (FileNotFoundError, ValueError):
        return None
    step = record.get("step")
    return step if isinstance(step, int) else None


def _record(manifest: Manifest, config: dict[str, Any], file_bytes: int) -> bytes:
    """The same for calls that write the same files; another version may write others."""
    return canonical(
        {
            "exported_by": version("outlast"),
            "step": manifest.step,
            "checkpoint": sha256(manifest.to_json()),
            "config": config,
            "file_bytes": file_bytes,
        }
    )


@contextmanager
def _begun(target: Path, record: bytes) -> Iterator[None]:
    """A new folder, or one in which the same was begun; no other process works in it meanwhile."""
    path = target / RECORD
    if not path.exists() and target.exists() and any(target.iterdir()):
        raise DamagedFolderError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DamagedFolderError(f"another process exports into {target}") from error
        file.seek(0)
        found = file.read()
        # One that was cut off within its first line has written nothing else.
        if found != record and not record.startswith(found):
            raise DamagedFolderError(
                f"{target} has the beginning of another export, of step {begun_step(target)}; "
                "delete it, or give another folder"
            )
        file.write(record[len(found) :])
        file.flush()
        yield


def _write_index(target: Path, files: Mapping[str, Mapping[str, int]]) -> int:
    """Say which tensor is in which file, where there are several; the bytes of all of them."""
    size_bytes = sum(sum(sizes.values()) for sizes in files.values())
    if len(files) > 1:
        of_tensor = {tensor: name for name, sizes in files.items() for tensor in sizes}
        index = {"metadata": {"total_size": size_bytes}, "weight_map": of_tensor}
        (target / folders.INDEX).write_text(json.dumps(index, indent=2))
    return size_bytes


def _end(target: Path, config: dict[str, Any], like: Path | None) -> None:
    for name in folders.TOKENIZER if like is not None else ():
        if like is not None and (like / name).exists():
            shutil.copyfile(like / name, target / name)
    (target / folders.CONFIG).write_text(json.dumps(config, indent=2))
    (target / RECORD).unlink(missing_ok=True)


def _written(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a file that an earlier call has written; none where it has not."""
    if not path.exists():
        return {}
    try:
        file = TensorFile(path)
    except DamagedFolderError:
        return {}
    try:
        return {name: file.outline(name).nbytes for name in file.names}
    finally:
        file.close()


def _write(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    write_tensors(path, tensors)
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _config(model: ModelSpec, like: Path | None) -> tuple[Family, dict[str, Any]]:
    """The architecture of `like`, or the first that has this model."""
    if like is not None:
        return config_like(folders.read_config(like), model)
    reasons = []
    for family in FAMILIES.values():
        try:
            return family, config_of(model, family)
        except UnsupportedModelError as error:
            reasons.append(str(error))
    raise UnsupportedModelError("no architecture has this model: " + "; ".join(reasons))


class _Saved:
    """What a checkpoint has of a model."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage, self.manifest = storage, manifest
        self._tensors = manifest.tensors

    def outline(self, rule: Rule) -> tuple[str, tuple[int, ...]]:
        """The type and the shape of a tensor of ours."""
        name = f"{MODEL}{rule.ours}"
        if name not in self._tensors:
            raise DamagedFolderError(
                f"{self.storage.url}: step {self.manifest.step} has no {name}: it is of another "
                "model"
            )
        return self._tensors[name]

    def values(self, rule: Rule) -> int:
        """How many a tensor of ours has."""
        return math.prod(self.outline(rule)[1])

    def load(self, rules: Sequence[Rule], dtype: torch.dtype) -> list[Tensor]:
        """Tensors that were saved on any layout."""
        wanted = [self._rows(rule, slice(None)) for rule in rules]
        self._fill(wanted)
        return [named.tensor.to(dtype) for named in wanted]

    def load_large(self, rule: Rule, dtype: torch.dtype, most_values: int) -> Tensor:
        """One tensor, of which so many values, or one row, are in memory as they were saved."""
        _, shape = self.outline(rule)
        loaded = torch.empty(shape, dtype=dtype)
        at_once = max(1, most_values // math.prod(shape[1:]))
        for first in range(0, shape[0], at_once):
            rows = slice(first, first + at_once)
            loaded[rows] = self._loaded_rows(rule, rows)
        return loaded

    def _loaded_rows(self, rule: Rule, rows: slice) -> Tensor:
        part = self._rows(rule, rows)
        self._fill([part])
        return part.tensor

    def _rows(self, rule: Rule, rows: slice) -> NamedTensor:
        """Memory for some rows of a tensor of ours."""
        held, shape = self.outline(rule)
        first, last, _ = rows.indices(shape[0])
        tensor = torch.empty((last - first, *shape[1:]), dtype=getattr(torch, held))
        offsets = (first, *(0 for _ in shape[1:]))
        return NamedTensor(f"{MODEL}{rule.ours}", tensor, shape, offsets)

    def _fill(self, wanted: Sequence[NamedTensor]) -> None:
        load_storage(
            self.storage,
            self.manifest.step,
            wanted,
            Alone(),
            manifest_of=lambda _: self.manifest,
            is_whole=False,
        )


def _grouped(rules: Sequence[Rule], saved: _Saved, most_values: int) -> list[list[Rule]]:
    """Rules whose tensors have `most_values` together, or a single one that has more."""
    groups: list[list[Rule]] = [[]]
    size = 0
    for rule in rules:
        values = saved.values(rule)
        if groups[-1] and size + values > most_values:
            groups.append([])
            size = 0
        groups[-1].append(rule)
        size += values
    return groups


def _read(saved: _Saved, dtype: torch.dtype, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Their tensors of a file's rules."""
    most_values = sum(map(saved.values, rules)) // _READS_PER_FILE
    found: dict[str, Tensor] = {}
    for few in _grouped(rules, saved, most_values):
        if saved.values(few[0]) > most_values:
            found |= few[0].to_theirs(saved.load_large(few[0], dtype, most_values))
            continue
        for rule, tensor in zip(few, saved.load(few, dtype), strict=True):
            found |= rule.to_theirs(tensor)
    return found


def _weights_name(number: int, count: int) -> str:
    return folders.WEIGHTS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
