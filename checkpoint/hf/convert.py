"""Weights of Hugging Face as a checkpoint that a job begins with.

One tensor of ours is in memory at a time, in the type of theirs. A checkpoint of weights alone is
of step 0: a job that loads it starts with a fresh optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from checkpoint.core.checked_json import canonical
from checkpoint.core.shards import Rectangle
from checkpoint.hf import folder as folders
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.family import Family
from checkpoint.hf.parts import PART_BYTES, STEP, forget_records, write_parts
from checkpoint.hf.rules import Rule
from checkpoint.hf.sections import family_of, rules_of, section_of
from checkpoint.loading import TOKENIZER
from checkpoint.restore.restore import WEIGHTS_ONLY
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import OnBytes, commit, framed
from outlast.model import ModelSpec
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec
from outlast.spec.parse import read_spec
from outlast.spec.saved import described

# What checkpoints hold of a weight in every precision but fp64.
_DTYPE = torch.float32
# Values that are in memory in both types: 4 MiB of them.
_CONVERTED_AT_ONCE = 1 << 20
# What names of tensors in a checkpoint begin with.
MODEL = "model."


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
    model = _model_of(section)
    rules = rules_of(model, family)
    with folders.opened(source, family) as weights:
        weights.check_used(rules, is_tied=model.tied_embeddings)
        by_name = {f"{MODEL}{rule.ours}": rule for rule in rules}
        rectangles = [
            _rectangle(name, _shape_of(rule, weights, source)) for name, rule in by_name.items()
        ]
        parameters = _checked_size(rectangles, model, source)
        raw, extra = partial(_converted, weights, by_name), _extra(source, model)
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


def import_bytes(source: Path) -> int:
    """How much an import writes; padding of the vocabulary is not counted.

    Raises:
        UnsupportedModelError: it is not a model that we can train.
        DamagedFolderError: it has no config.
    """
    model = _model_of(_described(source, 1)[1])
    return _num_parameters(model) * _DTYPE.itemsize


def _described(source: Path, vocab_multiple: int) -> tuple[Family, dict[str, Any]]:
    """The folder's architecture, and the model section that it becomes."""
    config = folders.read_config(source)
    family, section = family_of(config), section_of(config)
    if vocab_multiple > 1:
        section["vocab_multiple"] = vocab_multiple
    return family, section


def _model_of(section: dict[str, Any]) -> ModelSpec:
    """The model that a section is."""
    spec, problems = read_spec({"name": "imported", "model": section})
    if spec is None or problems:
        said = "; ".join(f"{problem.field} {problem.message}" for problem in problems)
        raise UnsupportedModelError(f"config.json describes no model that a spec can have: {said}")
    return spec.model


def _extra(source: Path, model: ModelSpec) -> str:
    """What the checkpoint says of itself.

    Another version may make other bytes of the same source: it does not go on with what there is.
    """
    extra = {
        "converted_from": str(source.absolute()),
        "converted_by": version("outlast"),
        "source": folders.fingerprint(source),
        "step": STEP,
        WEIGHTS_ONLY: True,
        # Whose ids the weights read; bytes where there is none.
        TOKENIZER: any((source / name).exists() for name in folders.VOCABULARIES),
        **described(_job_of(model)),
    }
    return canonical(extra).decode()


def _checked_size(rectangles: Sequence[Rectangle], model: ModelSpec, source: Path) -> int:
    """Parameters in all, which are as many as the trainer's model has."""
    found = sum(math.prod(each.shape) for each in rectangles)
    needed = _num_parameters(model)
    if found != needed:
        raise DamagedFolderError(
            f"{source} has {found:,} parameters, and its config.json describes a model of "
            f"{needed:,}"
        )
    return found


def _num_parameters(model: ModelSpec) -> int:
    return num_parameters(_job_of(model))


def _job_of(model: ModelSpec) -> JobSpec:
    return JobSpec.model_validate({"name": "imported", "model": model.model_dump()})


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


def _converted(weights: folders.Weights, by_name: Mapping[str, Rule], name: str) -> Iterator[bytes]:
    """The bytes of a tensor of ours, which is in memory in theirs' type only."""
    every = by_name[name].to_ours(weights).view(-1)
    for values in torch.split(every, _CONVERTED_AT_ONCE):
        yield values.to(_DTYPE).view(torch.uint8).numpy().tobytes()
