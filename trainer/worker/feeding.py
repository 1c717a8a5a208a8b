"""Where a rank's micro-batches come from: text that is prepared here, or files of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from outlast.spec import JobSpec
from outlast.tokens.files import TokenFile, TokenSource, open_source
from outlast.tokens.holdout import Holdout
from trainer.core.batch import BatchPlan, BlendPlan
from trainer.core.blend import Blend, blend_of
from trainer.data.dataset import TokenDataset
from trainer.data.loader import Loader, Source, Split
from trainer.data.masking import Masking
from trainer.data.node import NodeLoader, NodeSource, SplitId
from trainer.data.prepare import prepare
from trainer.data.step_batch import Wanted
from trainer.data.tokens import BlendDataset, Sequences
from trainer.parallel.mesh import Mesh
from trainer.worker import configure


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a job's data is."""

    name: str
    """The field that names the data, and what it says."""
    digest: str
    left_out: tuple[str, ...]
    """What of the source is not read, in words."""
    blend: Blend | None
    """Of training on tokens."""
    has_unpredicted: bool = False
    """Whether some tokens have no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(Facts):
    """Both splits, for whoever reads them."""

    train: Split
    evaluation: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding(Facts):
    """Both splits, as one rank takes them."""

    train: Loader
    evaluation: Loader


def open_data(spec: JobSpec, mesh: Mesh, data_dir: Path, node: NodeLoader | None = None) -> Feeding:
    """The data that `spec` names, as a rank of `mesh` takes it; `node` reads it where there is one.

    Raises:
        ValueError: it is not there, or cannot feed this model.
    """
    splits = open_splits(spec, data_dir)
    wanted = Wanted(
        tokens=mesh.is_first_stage, targets=mesh.is_last_stage, starts=spec.data.document_mask
    )

    def loader(split: SplitId, own: Split) -> Loader:
        source: Source = own if node is None else NodeSource(node, split, own)
        counts = splits.has_unpredicted and split is SplitId.TRAIN
        return Loader(source, replica=mesh.at.dp, device=mesh.device, wanted=wanted, counts=counts)

    return Feeding(
        **{each.name: getattr(splits, each.name) for each in fields(Facts)},
        train=loader(SplitId.TRAIN, splits.train),
        evaluation=loader(SplitId.EVALUATION, splits.evaluation),
    )


def open_splits(spec: JobSpec, data_dir: Path) -> Splits:
    """The data that `spec` names.

    Raises:
        ValueError: it is not there, or cannot feed this model.
    """
    if spec.data.tokens is not None:
        return _of_tokens(spec)
    files = prepare(data_dir, configure.data_options(spec))
    return Splits(
        train=_text(spec, files.train, trains=True),
        evaluation=_text(spec, files.validation, trains=False),
        name=f"data.source {spec.data.source!r}",
        digest=files.digest,
        left_out=files.left_out,
        blend=None,
        has_unpredicted=spec.data.masked.fraction > 0,
    )


def _text(spec: JobSpec, path: Path, *, trains: bool) -> Split:
    dataset = TokenDataset(path, seq_len=spec.model.seq_len)
    plan = BatchPlan(
        num_samples=dataset.num_samples,
        global_batch=spec.data.global_batch,
        micro_batch=spec.parallel.micro_batch,
        num_replicas=spec.parallel.dp,
        seed=spec.seed,
    )
    masking = _masking(spec, varies=trains)
    return Split(dataset, plan, None if masking is None else masking.hide)


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


def _of_tokens(spec: JobSpec) -> Splits:
    weights = spec.data.weights
    sources = [_opened("data.tokens", name) for name in weights]
    changes = [(each.from_step, each.tokens) for each in spec.data.blend_changes]
    blend = blend_of(weights, changes, global_batch=spec.data.global_batch)
    given = spec.data.validation_tokens
    validation = None if given is None else _opened("data.validation_tokens", given)
    if validation is None:
        held_out, shares = [_held_out(spec, each) for each in sources], weights
    else:
        held_out = [_all(spec, validation.train)]
        shares = {validation.name: 1.0}
    trained_on = [_trained_on(spec, each, whole=validation is not None) for each in sources]
    digests = [each.digest for each in (*sources, *filter(None, [validation]))]
    return Splits(
        train=_split(spec, trained_on, blend, trains=True),
        evaluation=_split(spec, held_out, blend_of(shares, [], global_batch=1), trains=False),
        name=f"data.tokens {', '.join(weights)}",
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        left_out=(),
        blend=blend,
        has_unpredicted=spec.data.masked.fraction > 0
        or spec.data.document_mask
        or any(each.train.has_prompts for each in sources),
    )


def _opened(field: str, name: str) -> TokenSource:
    try:
        return open_source(name)
    except ValueError as error:
        raise ValueError(f"{field} {name!r} {error}") from error


def _trained_on(spec: JobSpec, source: TokenSource, *, whole: bool) -> Sequences:
    if whole or source.validation is not None:
        return _all(spec, source.train)
    split = _holdout(spec, source.train)
    return _sequences(spec, source.train, split.num_trained_on, split.trained_on)


def _held_out(spec: JobSpec, source: TokenSource) -> Sequences:
    if source.validation is not None:
        return _all(spec, source.validation)
    split = _holdout(spec, source.train)
    return _sequences(spec, source.train, split.num_held_out, split.held_out)


def _holdout(spec: JobSpec, file: TokenFile) -> Holdout:
    number = file.num_sequences(spec.model.seq_len)
    return Holdout(num_sequences=number, fraction=spec.data.validation_fraction)


def _all(spec: JobSpec, file: TokenFile) -> Sequences:
    return _sequences(spec, file, file.num_sequences(spec.model.seq_len), None)


def _sequences(
    spec: JobSpec, file: TokenFile, number: int, place: Callable[[int], int] | None
) -> Sequences:
    if number < 1:
        raise ValueError(
            f"{file.path} holds {file.num_tokens} tokens, too few for a sequence of "
            f"model.seq_len = {spec.model.seq_len} in each split; give more tokens, a larger "
            "data.validation_fraction or a shorter sequence"
        )
    return Sequences(
        file,
        seq_len=spec.model.seq_len,
        number=number,
        place=place,
        document_mask=spec.data.document_mask,
    )


def _split(spec: JobSpec, sources: list[Sequences], blend: Blend, *, trains: bool) -> Split:
    plan = BlendPlan(
        num_samples=tuple(each.num_samples for each in sources),
        blend=blend,
        global_batch=spec.data.global_batch,
        micro_batch=spec.parallel.micro_batch,
        num_replicas=spec.parallel.dp,
        seed=spec.seed,
    )
    dataset = BlendDataset(sources, vocab_size=spec.model.vocab_size)
    masking = _masking(spec, varies=trains)
    return Split(dataset, plan, None if masking is None else masking.hide)
