"""Weights of Hugging Face as a checkpoint that a job begins with, and a checkpoint as such weights.

One tensor of ours is in memory at a time on the way in, and one file of theirs on the way out.
A checkpoint of weights alone is of step 0: whoever loads it has a fresh optimizer.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.core.checked_json import canonical
from checkpoint.core.manifest import Manifest
from checkpoint.core.shards import Rectangle
from checkpoint.hf import folder as folders
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.families import FAMILIES
from checkpoint.hf.family import Family
from checkpoint.hf.parts import PART_BYTES, STEP, forget_records, write_parts
from checkpoint.hf.rules import Rule
from checkpoint.hf.sections import config_of, family_of, rules_of, section_of
from checkpoint.hf.tensor_files import write_tensors
from checkpoint.restore.peers import Alone
from checkpoint.restore.restore import WEIGHTS_ONLY, load_storage, read_manifest
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import OnBytes, commit, framed
from outlast.model import ModelSpec
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec

# What checkpoints hold of a weight in every precision but fp64.
_DTYPE = torch.float32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What came of an import: the model section of a spec, and how much there is."""

    family: str
    section: dict[str, Any]
    num_tensors: int
    parameters: int
    size_bytes: int


def import_folder(
    source: Path,
    target: Storage,
    *,
    vocab_multiple: int = 1,
    part_bytes: int = PART_BYTES,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> Imported:
    """Commit the weights of a folder as the checkpoint of step 0 in `target`.

    Tables of the vocabulary are padded to a multiple of `vocab_multiple` rows. Files have
    `part_bytes` at most, but for a larger tensor; what a call that was cut off has written stays.

    Raises:
        UnsupportedModelError: it is not a model that we can train.
        DamagedFolderError: its files are not whole, or of another model than its config.
        ValueError: the target has checkpoints already.
        StorageUnavailableError: the target does not answer.
    """
    if target.committed_steps():
        raise ValueError(f"{target.url} has checkpoints already; give a folder of its own")
    family, section = _described(source, vocab_multiple)
    model = ModelSpec.model_validate(section)
    rules = rules_of(model, family)
    with folders.opened(source, family) as weights:
        weights.check_used(rules, is_tied=model.tied_embeddings)
        by_name = {f"{_MODEL}{rule.ours}": rule for rule in rules}
        rectangles = [
            _rectangle(name, _shape_of(rule, weights, source)) for name, rule in by_name.items()
        ]
        parameters = _checked_size(rectangles, model, source)
        raw, extra = partial(_converted, weights, by_name), _extra(source)
        manifest = write_parts(
            target, rectangles, raw, extra=extra, on_bytes=on_bytes, part_bytes=part_bytes
        )
    commit(target, manifest)
    forget_records(target)
    return Imported(
        family=family.name,
        section=section,
        num_tensors=len(rules),
        parameters=parameters,
        size_bytes=manifest.size_bytes,
    )


def _described(source: Path, vocab_multiple: int) -> tuple[Family, dict[str, Any]]:
    """The folder's architecture, and the model section that it becomes."""
    config = folders.read_config(source)
    family, section = family_of(config), section_of(config)
    if vocab_multiple > 1:
        section["vocab_multiple"] = vocab_multiple
    return family, section


def _extra(source: Path) -> str:
    """What the checkpoint says of itself.

    Another version may make other bytes of the same source: it does not go on with what there is.
    """
    extra = {
        "converted_from": str(source),
        "converted_by": version("outlast"),
        "source": folders.fingerprint(source),
        "step": STEP,
        WEIGHTS_ONLY: True,
    }
    return canonical(extra).decode()


def _checked_size(rectangles: Sequence[Rectangle], model: ModelSpec, source: Path) -> int:
    """Parameters in all, which are as many as the trainer's model has."""
    found = sum(math.prod(each.shape) for each in rectangles)
    document = {"name": "imported", "model": model.model_dump()}
    needed = num_parameters(JobSpec.model_validate(document))
    if found != needed:
        raise DamagedFolderError(
            f"{source} has {found:,} parameters, and its config.json describes a model of "
            f"{needed:,}"
        )
    return found


def _shape_of(rule: Rule, weights: folders.Weights, source: Path) -> tuple[int, ...]:
    try:
        return tuple(rule.to_ours(weights.outlines).shape)
    except (ValueError, RuntimeError) as error:
        raise DamagedFolderError(f"{source}: {rule.ours}: {error}") from error


def _rectangle(name: str, shape: tuple[int, ...]) -> Rectangle:
    return framed(
        name,
        str(_DTYPE).removeprefix("torch."),
        global_shape=shape,
        offsets=(0,) * len(shape),
        shape=shape,
        nbytes=math.prod(shape) * _DTYPE.itemsize,
    )


def _converted(weights: folders.Weights, by_name: Mapping[str, Rule], name: str) -> bytes:
    """The bytes of a tensor of ours."""
    return _raw_bytes(by_name[name].to_ours(weights).to(_DTYPE))


def _raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


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
    file_bytes: int = 4 << 30,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> Exported:
    """Write the weights of a checkpoint as a folder that `transformers` loads.

    `like` is a folder of the same architecture whose tokenizer is copied. Files of weights
    have `file_bytes` at most, but for a tensor that is larger.

    Raises:
        UnsupportedModelError: no architecture that we know has this model.
        DamagedFolderError: `like` is damaged, or `target` is not empty.
        LayoutMismatchError: the checkpoint is of another model.
    """
    if target.exists() and any(target.iterdir()):
        raise DamagedFolderError(f"{target} is not empty")
    family, config = _config(model, like)
    config["dtype"] = str(dtype).removeprefix("torch.")
    manifest = read_manifest(source, step)
    target.mkdir(parents=True, exist_ok=True)
    groups = list(_files(rules_of(model, family), manifest, dtype, file_bytes))
    reads = (_read(source, manifest, group, dtype) for group in groups)
    files, size_bytes = _write_files(target, reads, len(groups), on_bytes)
    for name in folders.TOKENIZER if like is not None else ():
        if like is not None and (like / name).exists():
            shutil.copyfile(like / name, target / name)
    # Last: without it nobody takes the folder for a whole one.
    (target / folders.CONFIG).write_text(json.dumps(config, indent=2))
    return Exported(
        architecture=config["architectures"][0],
        step=step,
        dtype=config["dtype"],
        files=tuple(files),
        size_bytes=size_bytes,
    )


def _write_files(
    target: Path, reads: Iterator[dict[str, Tensor]], count: int, on_bytes: OnBytes
) -> tuple[list[str], int]:
    """Write each file's tensors, and which is where; the names of the files, and all bytes."""
    of_tensor: dict[str, str] = {}
    files, size_bytes = [], 0
    for number, tensors in enumerate(reads, start=1):
        files.append(_weights_name(number, count))
        write_tensors(target / files[-1], tensors)
        of_tensor |= dict.fromkeys(tensors, files[-1])
        written = sum(tensor.nbytes for tensor in tensors.values())
        size_bytes += written
        on_bytes(written)
    if count > 1:
        index = {"metadata": {"total_size": size_bytes}, "weight_map": of_tensor}
        (target / folders.INDEX).write_text(json.dumps(index, indent=2))
    return files, size_bytes


def _config(model: ModelSpec, like: Path | None) -> tuple[Family, dict[str, Any]]:
    """The architecture of `like`, or the first that has this model."""
    if like is not None:
        given = folders.read_config(like)
        family = family_of(given)
        # What is not the model's stays, such as the ids of special tokens.
        return family, {**given, **config_of(model, family)}
    reasons = []
    for family in FAMILIES.values():
        try:
            return family, config_of(model, family)
        except UnsupportedModelError as error:
            reasons.append(str(error))
    raise UnsupportedModelError("no architecture has this model: " + "; ".join(reasons))


def _files(
    rules: Sequence[Rule], manifest: Manifest, dtype: torch.dtype, file_bytes: int
) -> Iterator[list[Rule]]:
    """Rules whose tensors go into a file together."""
    saved = manifest.tensors
    group: list[Rule] = []
    size = 0
    for rule in rules:
        _, shape = saved.get(f"{_MODEL}{rule.ours}", ("", ()))
        nbytes = math.prod(shape) * dtype.itemsize
        if group and size + nbytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(rule)
        size += nbytes
    yield group


def _read(
    source: Storage, manifest: Manifest, rules: Sequence[Rule], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Their tensors of some rules, from a checkpoint of any layout."""
    saved = manifest.tensors
    wanted = []
    for rule in rules:
        name = f"{_MODEL}{rule.ours}"
        if name not in saved:
            raise DamagedFolderError(
                f"{source.url}: step {manifest.step} has no {name}: it is of another model"
            )
        held, shape = saved[name]
        tensor = torch.empty(shape, dtype=getattr(torch, held))
        wanted.append(NamedTensor(name, tensor, shape, (0,) * len(shape)))
    load_storage(
        source,
        manifest.step,
        wanted,
        Alone(),
        manifest_of=partial(_same, manifest),
        is_whole=False,
    )
    found: dict[str, Tensor] = {}
    for rule, named in zip(rules, wanted, strict=True):
        found |= rule.to_theirs(named.tensor.to(dtype))
    return found


def _same(manifest: Manifest, _: int) -> Manifest:
    return manifest


def _weights_name(number: int, count: int) -> str:
    return folders.WEIGHTS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
