"""Where a rank's micro-batches come from: text that is prepared here, or files of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from outlast.remote.files import files_of_node
from outlast.spec import JobSpec
from outlast.tokens.files import TokenFile, TokenSource, open_source
from outlast.tokens.holdout import Holdout
from outlast.tokens.packing import Packing
from outlast.tokens.remote_file import OpenRemote
from trainer.core.batch import BatchPlan, BlendPlan
from trainer.core.blend import Blend, blend_of
from trainer.data.dataset import TokenDataset
from trainer.data.loader import Loader, Source, Split
from trainer.data.masking import Masking
from trainer.data.node import NodeLoader, NodeSource, SplitId
from trainer.data.packed import PackedSequences
from trainer.data.prepare import prepare
from trainer.data.sentences import SentenceOrder
from trainer.data.step_batch import Wanted
from trainer.data.tokens import BlendDataset, Rows, Sequences
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import MicroBatch
from trainer.worker import configure

Transform = Callable[[MicroBatch, int, Sequence[int | tuple[int, int]]], MicroBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a job's data is."""

    name: str
    """The field that names the data, and what it says."""
    digest: str
    left_out: tuple[str, ...]
    """What of the source is not read, in words."""
    num_samples: int
    """In one pass over the data of training, all sources together."""
    blend: Blend | None
    """Of training on tokens."""
    has_unpredicted: bool = False
    """Whether some tokens have no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(Facts):
    """All splits, for whoever reads them."""

    train: Split
    evaluations: Mapping[str, Split]
    """By the name of the held-out set; "" where there is but one without a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding(Facts):
    """All splits, as one rank takes them."""

    train: Loader
    evaluations: Mapping[str, Loader]


def numbered(splits: Splits) -> dict[int, Split]:
    """What is read, by the number under which a rank asks its node's loader for it."""
    return dict(enumerate((splits.train, *splits.evaluations.values()), SplitId.TRAIN))


def open_data(spec: JobSpec, mesh: Mesh, data_dir: Path, node: NodeLoader | None = None) -> Feeding:
    """The data that `spec` names, as a rank of `mesh` takes it; `node` reads it where there is one.

    Raises:
        ValueError: it is not there, or cannot feed this model.
        StorageUnavailableError: it is in a store that does not answer.
    """
    splits = open_splits(spec, data_dir)
    wanted = Wanted(
        tokens=mesh.is_first_stage,
        targets=mesh.has_loss,
        starts=spec.documents_reach_every_stage
        or (spec.data.resets_positions and mesh.is_first_stage),
        part=mesh.cp.index,
        num_parts=mesh.cp.size,
        in_ring=spec.parallel.context == "ring",
    )

    def loader(split: int, alone: Split) -> Loader:
        source: Source = alone if node is None else NodeSource(node, split, alone)
        return Loader(source, replica=mesh.replica, device=mesh.device, wanted=wanted)

    own, sets = numbered(splits), enumerate(splits.evaluations, SplitId.EVALUATION)
    return Feeding(
        **{each.name: getattr(splits, each.name) for each in fields(Facts)},
        train=loader(SplitId.TRAIN, splits.train),
        evaluations={name: loader(number, own[number]) for number, name in sets},
    )


def open_splits(spec: JobSpec, data_dir: Path) -> Splits:
    """The data that `spec` names.

    Raises:
        ValueError: it is not there, or cannot feed this model.
        StorageUnavailableError: it is in a store that does not answer.
    """
    if spec.data.tokens is not None:
        return _of_tokens(spec, files_of_node(data_dir, spec.data.cache_bytes).open)
    files = prepare(data_dir, configure.data_options(spec))
    train, num_samples = _text(spec, files.train, trains=True)
    return Splits(
        train=train,
        evaluations={"": _text(spec, files.validation, trains=False)[0]},
        name=f"data.source {spec.data.source!r}",
        digest=files.digest,
        left_out=files.left_out,
        num_samples=num_samples,
        blend=None,
        has_unpredicted=spec.data.masked.fraction > 0,
    )


def _text(spec: JobSpec, path: Path, *, trains: bool) -> tuple[Split, int]:
    """A split of text, and how many samples it has."""
    dataset = TokenDataset(path, seq_len=spec.model.seq_len)
    plan = BatchPlan(
        num_samples=dataset.num_samples,
        global_batch=spec.data.global_batch,
        micro_batch=spec.parallel.micro_batch,
        num_replicas=spec.parallel.dp,
        seed=spec.seed,
    )
    return Split(dataset, plan, _transform(spec, varies=trains)), dataset.num_samples


def _transform(spec: JobSpec, *, varies: bool) -> Transform | None:
    """What is done to what was read; the order of sentences first, as tokens move for it."""
    order, masking = _sentence_order(spec, varies=varies), _masking(spec, varies=varies)
    if order is None or masking is None:
        return None if masking is None else masking.hide

    def transform(
        batch: MicroBatch, step: int, samples: Sequence[int | tuple[int, int]]
    ) -> MicroBatch:
        return masking.hide(order.arrange(batch, step, samples), step, samples)

    return transform


def _sentence_order(spec: JobSpec, *, varies: bool) -> SentenceOrder | None:
    given = spec.data.sentence_order
    if given.cls_token is None or given.sep_token is None:
        return None
    return SentenceOrder(
        cls_token=given.cls_token,
        sep_token=given.sep_token,
        ends=given.ends,
        seed=spec.seed,
        varies=varies,
    )


def _masking(spec: JobSpec, *, varies: bool) -> Masking | None:
    given = spec.data.masked
    if given.mask_token is None:
        return None
    return Masking(
        fraction=given.fraction,
        mask_token=given.mask_token,
        random=given.random,
        kept=given.kept,
        never=given.never,
        vocab_size=spec.model.vocab_size,
        seed=spec.seed,
        varies=varies,
    )


def _of_tokens(spec: JobSpec, open_remote: OpenRemote) -> Splits:
    weights = spec.data.weights
    sources = [_opened("data.tokens", name, open_remote) for name in weights]
    changes = [(each.from_step, each.tokens) for each in spec.data.blend_changes]
    blend = blend_of(weights, changes, global_batch=spec.data.global_batch)
    sets = {
        name: _opened("data.validation_tokens", path, open_remote)
        for name, path in spec.data.validation_sets.items()
    }
    files = _Files(spec)
    held_out: dict[str, tuple[list[Rows], Mapping[str, float]]] = {
        name: ([files.whole(each.train)], {each.name: 1.0}) for name, each in sets.items()
    } or {"": ([files.held_out(each) for each in sources], weights)}
    trained_on = [files.trained_on(each, has_own=bool(sets)) for each in sources]
    digests = [each.digest for each in (*sources, *sets.values())]
    return Splits(
        train=_split(spec, trained_on, blend, trains=True),
        evaluations={
            name: _split(spec, rows, blend_of(shares, [], global_batch=1), trains=False)
            for name, (rows, shares) in held_out.items()
        },
        name=f"data.tokens {', '.join(weights)}",
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        left_out=(),
        num_samples=sum(each.num_samples for each in trained_on),
        blend=blend,
        has_unpredicted=spec.data.masked.fraction > 0
        or spec.data.keeps_documents_apart
        or any(each.train.has_prompts for each in sources),
    )


def _opened(field: str, name: str, open_remote: OpenRemote) -> TokenSource:
    try:
        return open_source(name, open_remote)
    except ValueError as error:
        raise ValueError(f"{field} {name!r} {error}") from error


class _Files:
    """Which sequences of files are trained on, and which are held out."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        # A pass over the index makes one, and both splits may be of the same file.
        self._packings: dict[str, Packing] = {}

    def trained_on(self, source: TokenSource, *, has_own: bool) -> Rows:
        """`has_own`: evaluation has a source of its own, so nothing of this one is held out."""
        if has_own or source.validation is not None:
            return self.whole(source.train)
        split = self._holdout(source.train)
        return self._sequences(source.train, split.num_trained_on, split.trained_on)

    def held_out(self, source: TokenSource) -> Rows:
        """Its validation split, or sequences of the other one where it has none."""
        if source.validation is not None:
            return self.whole(source.validation)
        split = self._holdout(source.train)
        return self._sequences(source.train, split.num_held_out, split.held_out)

    def whole(self, file: TokenFile) -> Rows:
        """All of a file."""
        return self._sequences(file, self._number(file), None)

    def _holdout(self, file: TokenFile) -> Holdout:
        fraction = self._spec.data.validation_fraction
        return Holdout(num_sequences=self._number(file), fraction=fraction)

    def _number(self, file: TokenFile) -> int:
        if self._spec.data.packing == "whole":
            return self._packing(file).num_sequences
        return file.num_sequences(self._spec.model.seq_len)

    def _packing(self, file: TokenFile) -> Packing:
        if file.name not in self._packings:
            self._packings[file.name] = file.packing(self._spec.model.seq_len)
        return self._packings[file.name]

    def _sequences(self, file: TokenFile, number: int, place: Callable[[int], int] | None) -> Rows:
        seq_len, data = self._spec.model.seq_len, self._spec.data
        if number < 1:
            raise ValueError(
                f"{file.name} holds {file.num_tokens} tokens, too few for a sequence of "
                f"model.seq_len = {seq_len} in each split; give more tokens, a larger "
                "data.validation_fraction or a shorter sequence"
            )
        if data.packing == "whole":
            packing = self._packing(file)
            return PackedSequences(file, packing, seq_len=seq_len, number=number, place=place)
        return Sequences(
            file, seq_len=seq_len, number=number, place=place, documents=data.finds_documents
        )


def _split(spec: JobSpec, sources: list[Rows], blend: Blend, *, trains: bool) -> Split:
    plan = BlendPlan(
        num_samples=tuple(each.num_samples for each in sources),
        blend=blend,
        global_batch=spec.data.global_batch,
        micro_batch=spec.parallel.micro_batch,
        num_replicas=spec.parallel.dp,
        seed=spec.seed,
    )
    dataset = BlendDataset(
        sources, vocab_size=spec.model.vocab_size, apart=spec.data.keeps_documents_apart
    )
    prefetch = dataset.prefetch if dataset.is_remote else None
    starts = dataset.starts if spec.data.finds_documents else None
    transform = _transform(spec, varies=trains)
    return Split(dataset, plan, transform, starts=starts, prefetch=prefetch)
