"""Takes over a checkpoint of `torch.distributed.checkpoint`: into ours, to go on from.

Every chunk is read as it lies, loaded by torch as weights only, and written into the
payload of a single part; no more than one of them is in memory at a time. Names are
translated: torch's helpers put optimizer state under `optim.state.NAME.exp_avg`, we under
`optim.NAME.exp_avg`. What we have no use for is left behind, and said.

What does not belong here: parsing their description (`foreign.py`).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.core import names
from checkpoint.core.checked_json import canonical
from checkpoint.core.manifest import Manifest
from checkpoint.core.ownership import check_owned_once
from checkpoint.core.shards import Rectangle, ShardTable, lay_out
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.foreign import ForeignCheckpointError, ForeignChunk, parse_metadata
from checkpoint.torch_format.framed import OnBytes, PartDraft, commit, framed, write_part

# Both as torch's helpers and as we name what an optimizer keeps of a parameter.
_MOMENT = re.compile(r"optim(?:izer)?\.(?:state\.)?(.+)\.(exp_avg|exp_avg_sq)")
_OF_OPTIMIZER = ("optim.", "optimizer.")
# Nobody else writes into the folder of a step that does not exist.
_ATTEMPT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """Names that begin with `before` begin with `after` instead."""

    before: str
    after: str

    @staticmethod
    def parse(text: str) -> Rename:
        """`BEFORE=AFTER`; raises ValueError for anything else."""
        before, equals, after = text.partition("=")
        if not equals:
            raise ValueError(f"rename {text!r}: write BEFORE=AFTER")
        return Rename(before=before, after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What came of a conversion; `left_behind` are names of the source."""

    step: int
    num_tensors: int
    size_bytes: int
    left_behind: tuple[str, ...]


def convert(
    source: Storage,
    target: Storage,
    *,
    step: int,
    renames: Sequence[Rename] = (),
    on_bytes: OnBytes = lambda num_bytes: None,
) -> Converted:
    """Commit the checkpoint in `source` as that of `step` in `target`.

    `on_bytes` hears of every so many bytes that are done.

    Raises:
        ForeignCheckpointError: the source is damaged, incomplete, or not to be trusted.
        ValueError: the target has a checkpoint of this step already.
        StorageUnavailableError: either place does not answer.
    """
    if step in target.committed_steps():
        raise ValueError(f"{target.url} has a checkpoint of step {step} already")
    chunks, left_behind = _chosen(source, renames)
    table = _table(chunks)
    by_place = {(named, chunk.offsets): chunk for named, chunk in chunks}
    folder = names.attempt_folder(step, _ATTEMPT)
    draft = PartDraft(
        step=step,
        attempt=_ATTEMPT,
        num_parts=1,
        extra=canonical({"converted_from": source.url, "step": step}).decode(),
    )
    part = write_part(
        target,
        folder,
        table,
        lambda shard: [_raw_bytes(_load(source, by_place[shard.name, shard.offsets]))],
        draft,
        on_bytes,
    )
    manifest = Manifest(step=step, attempt=_ATTEMPT, world_size=1, parts=(part,))
    commit(target, manifest)
    return Converted(
        step=step,
        num_tensors=len({shard.name for shard in table.tensors}),
        size_bytes=manifest.size_bytes,
        left_behind=left_behind,
    )


def _chosen(
    source: Storage, renames: Sequence[Rename]
) -> tuple[list[tuple[str, ForeignChunk]], tuple[str, ...]]:
    """What is taken over under our names, as it lies in the files; what is not by theirs."""
    try:
        metadata = parse_metadata(source.read_bytes(names.METADATA))
    except FileNotFoundError as error:
        raise ForeignCheckpointError(
            f"{source.url} has no {names.METADATA}: it is not a folder of torch's checkpoints"
        ) from error
    named = [(_our_name(chunk.name, renames), chunk) for chunk in metadata.chunks]
    taken = [(name, chunk) for name, chunk in named if name is not None]
    if not taken:
        raise ForeignCheckpointError(
            f"{source.url}: none of its tensors is model.NAME or optimizer state, the first is "
            f"{metadata.chunks[0].name if metadata.chunks else 'missing'}; give --rename"
        )
    left = dict.fromkeys(chunk.name for name, chunk in named if name is None)
    return sorted(taken, key=lambda each: (each[1].file, each[1].start)), (*left, *metadata.others)


def _our_name(name: str, renames: Sequence[Rename]) -> str | None:
    """What we call a tensor; None for one that we have no use for."""
    moment = _MOMENT.fullmatch(name)
    if moment is not None:
        parameter = _renamed(moment[1], renames).removeprefix("model.")
        return f"optim.{parameter}.{moment[2]}"
    name = _renamed(name, renames) if not name.startswith(_OF_OPTIMIZER) else name
    return name if name.startswith("model.") else None


def _renamed(name: str, renames: Sequence[Rename]) -> str:
    for rename in renames:
        if name.startswith(rename.before):
            return rename.after + name.removeprefix(rename.before)
    return name


def _table(chunks: Sequence[tuple[str, ForeignChunk]]) -> ShardTable:
    try:
        table = lay_out(0, 1, [_rectangle(name, chunk) for name, chunk in chunks])
        check_owned_once(table.tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        # Shapes are a stranger's: some are larger than any memory, or than any number.
        raise ForeignCheckpointError(str(error)) from error
    return table


def _rectangle(name: str, chunk: ForeignChunk) -> Rectangle:
    return framed(
        name,
        chunk.dtype,
        global_shape=chunk.global_shape,
        offsets=chunk.offsets,
        shape=chunk.shape,
        nbytes=chunk.nbytes,
    )


def _load(source: Storage, chunk: ForeignChunk) -> Tensor:
    """One chunk's tensor; nothing but a tensor is ever unpickled."""
    try:
        raw = source.read_range(chunk.file, chunk.start, chunk.stop)
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ForeignCheckpointError(f"{source.url}/{chunk.file} is missing") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ForeignCheckpointError(
            f"{source.url}/{chunk.file}, tensor {chunk.name}: {error}"
        ) from error
    if (
        not isinstance(tensor, Tensor)
        or tuple(tensor.shape) != chunk.shape
        or str(tensor.dtype) != f"torch.{chunk.dtype}"
    ):
        raise ForeignCheckpointError(
            f"{source.url}/{chunk.file}, tensor {chunk.name}: not the {chunk.dtype} {chunk.shape} "
            "that .metadata says"
        )
    return tensor


def _raw_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
