"""Whether what a spec trains on is there, is of its vocabulary, and is enough: from its files.

Submission and a node's preflight both look here, so that both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import SettingError
from outlast.problems import FieldProblem, shown
from outlast.rules.data import PYTHON_STDLIB, check_tokens, wrong_with_tokens
from outlast.rules.places import scheme_of
from outlast.sources import Source, check_first, survey

if TYPE_CHECKING:
    from outlast.spec import JobSpec
    from outlast.tokens.files import TokenFile, TokenSource
    from outlast.tokens.id_range import IdRange
    from outlast.tokens.packing import Packing
    from outlast.tokens.remote_file import OpenRemote


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSources:
    """The files of tokens that a spec names."""

    sources: tuple[TokenSource, ...]
    validation: tuple[TokenSource, ...]
    """For evaluation alone."""
    packings: Mapping[str, Packing] = field(default_factory=dict)
    """Of each file, where documents are packed whole."""

    def num_sequences(self, file: TokenFile, seq_len: int) -> int:
        """Of one of the files."""
        packing = self.packings.get(file.name)
        return file.num_sequences(seq_len) if packing is None else packing.num_sequences

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(source.train.num_tokens for source in self.sources)

    def left_out(self) -> list[str]:
        return []


def look_at_data(
    spec: JobSpec, open_remote: OpenRemote
) -> tuple[list[FieldProblem], Source | TokenSources | None]:
    """What is wrong with the data of `spec` here, and what was found.

    Raises:
        StorageUnavailableError: tokens are at a URL, and its store does not answer.
        OccupiedError: this machine's disk has no room for their index.
        OSError: this machine's disk fails.
    """
    if spec.data.tokens is not None:
        try:
            return _look_at_tokens(spec, open_remote)
        except SettingError as error:
            message = f"cannot be read: {str(error).removeprefix('data: ')}"
            return [FieldProblem(field="data.tokens", message=message)], None
    source = spec.data.source
    if not (source.startswith("/") or source == PYTHON_STDLIB):
        return [], None
    try:
        held = survey(source, spec.data.max_bytes)
    except ValueError as error:
        message = f"is {shown(source)}, which {error}; give a text file or a folder with some"
        return [FieldProblem(field="data.source", message=message)], None
    try:
        check_first(held)
    except (OSError, ValueError) as error:
        message = f"is {shown(source)}, and {error}"
        return [FieldProblem(field="data.source", message=message)], None
    if held.max_bytes is not None and held.nbytes >= held.max_bytes:
        # That many tokens are a rule of the spec.
        return [], held
    return check_tokens(spec, held.nbytes, f"all of data.source = {source}"), held


def token_places(spec: JobSpec) -> list[tuple[str, str]]:
    """The paths and URLs of tokens that `spec` names, each with its field."""
    named = [("data.tokens", name) for name in spec.data.weights]
    named += [("data.validation_tokens", name) for name in spec.data.validation_sets.values()]
    return named


def is_on_node(spec: JobSpec) -> bool:
    """Whether any of the data lies in a node's own file system, which another may not have."""
    schemes = [scheme_of(name) for _, name in token_places(spec)]
    return not schemes or any(scheme in (None, "file", "local") for scheme in schemes)


def _look_at_tokens(
    spec: JobSpec, open_remote: OpenRemote
) -> tuple[list[FieldProblem], TokenSources | None]:
    problems: list[FieldProblem] = []
    named = token_places(spec)
    opened = [
        _open(field, name, open_remote, problems)
        for field, name in named
        if wrong_with_tokens(name) is None
    ]
    found = [each for each in opened if each is not None]
    if problems or len(found) < len(named):
        return problems, None
    num_sources = len(spec.data.weights)
    sources, validation = tuple(found[:num_sources]), tuple(found[num_sources:])
    files = []
    are_read = _read_whole(found)
    for (name, _), source in zip(named, found, strict=True):
        problems += [*_vocabulary(spec, name, source, are_read), *_documents(spec, name, source)]
        problems += _prompts(spec, name, source)
        files.append((name, source.train))
        if name == "data.tokens" and source.validation is not None and not validation:
            files.append((name, source.validation))
    packings: dict[str, Packing] = {}
    if spec.data.packing == "whole":
        packings, wrong = _packed(spec, [each for each in files if each[1].num_documents])
        problems += wrong
    held = TokenSources(sources=sources, validation=validation, packings=packings)
    problems += [each for file in files for each in _length(spec, held, *file)]
    if not validation:
        alone = [source for source in sources if source.validation is None]
        problems += [each for source in alone for each in _holdout(spec, held, source)]
    problems += _tokenizers(found)
    return problems, held


def _packed(
    spec: JobSpec, files: Sequence[tuple[str, TokenFile]]
) -> tuple[dict[str, Packing], list[FieldProblem]]:
    """The packing of each file, and what is wrong with it."""
    packings, problems = {}, []
    for name, file in files:
        try:
            packing = packings[file.name] = file.packing(spec.model.seq_len)
        except ValueError as error:
            problems.append(FieldProblem(field=name, message=f"has {file.name}, whose {error}"))
            continue
        if 0 < packing.num_documents == packing.num_without_loss:
            message = (
                f"is {spec.model.seq_len}; in none of the {packing.num_documents:,} documents of "
                f"{file.name}, packed whole, a token is predicted: prompts alone fill a sequence, "
                f"or documents are of one token; give a longer sequence or other {name}"
            )
            problems.append(FieldProblem(field="model.seq_len", message=message))
    return packings, problems


def _open(
    field: str, name: str, open_remote: OpenRemote, problems: list[FieldProblem]
) -> TokenSource | None:
    from outlast.tokens.files import open_source

    try:
        return open_source(name, open_remote)
    except ValueError as error:
        problems.append(FieldProblem(field=field, message=f"is {shown(name)}, which {error}"))
        return None


def _read_whole(sources: Iterable[TokenSource]) -> frozenset[str]:
    """Files of which nobody has noted the ids, and that are read before a start."""
    from outlast.tokens.whole import read_whole

    return read_whole(each.train for each in sources if each.vocab_size is None and not each.ids)


def _vocabulary(
    spec: JobSpec, field: str, source: TokenSource, are_read: Collection[str]
) -> list[FieldProblem]:
    if source.vocab_size is not None:
        what = f"the tokenizer of {field} = {source.name} has"
        return _vocabulary_of(spec, what, source.vocab_size)
    if (ids := _ids(spec, source, are_read)) is None:
        message = (
            f"is {shown(source.name)}, {source.train.nbytes / 2**30:.1f} GiB of ids that nobody "
            f"has read; give `outlast data describe {source.name}` once, which notes their range "
            "beside them, or data.check_ids: sampled"
        )
        return [FieldProblem(field=field, message=message)]
    if ids.smallest < 0:
        message = f"is {shown(source.name)}, which has the id {ids.smallest}; allowed: 0 or more"
        return [FieldProblem(field=field, message=message)]
    first = ""
    if ids.largest_at is not None:
        first = f" ({ids.largest} is token {ids.largest_at}, counted from 0)"
    what = f"ids in {field} = {source.name}{first} are of"
    return _vocabulary_of(spec, what, 1 + ids.largest)


def _vocabulary_of(spec: JobSpec, what: str, needed: int) -> list[FieldProblem]:
    size = spec.model.vocab_size
    if needed <= size:
        return []
    message = f"is {size}; {what} a vocabulary of {needed}; allowed: {needed} or more"
    return [FieldProblem(field="model.vocab_size", message=message)]


def _ids(spec: JobSpec, source: TokenSource, are_read: Collection[str]) -> IdRange | None:
    """The range of ids of a file without a manifest; None where it would take long to find."""
    from outlast.tokens.whole import range_of, range_of_samples

    if source.ids is not None:
        return source.ids
    if source.train.name in are_read:
        return range_of(source.train)
    return range_of_samples(source.train) if spec.data.check_ids == "sampled" else None


def _documents(spec: JobSpec, field: str, source: TokenSource) -> list[FieldProblem]:
    data = spec.data
    if not data.finds_documents or source.train.num_documents is not None:
        return []
    is_packed = data.packing == "whole"
    message = (
        f"is {'whole' if is_packed else 'true'}; {field} = {source.name} does not say where "
        "documents end; allowed: a folder of `outlast data prepare`, or a pair NAME.bin and "
        "NAME.idx"
    )
    name = "document_mask" if data.document_mask else "reset_positions"
    field = f"data.{'packing' if is_packed else name}"
    return [FieldProblem(field=field, message=message)]


def _prompts(spec: JobSpec, field: str, source: TokenSource) -> list[FieldProblem]:
    if not spec.data.masked.fraction or not source.train.has_prompts:
        return []
    message = (
        f"is {spec.data.masked.fraction:g}; {field} = {source.name} has prompts, behind which a "
        "causal model is trained to go on; allowed: 0, or tokens without prompts"
    )
    return [FieldProblem(field="data.masked.fraction", message=message)]


def _length(spec: JobSpec, held: TokenSources, field: str, file: TokenFile) -> list[FieldProblem]:
    if held.num_sequences(file, spec.model.seq_len):
        return []
    allowed = (
        f"1 to {file.num_tokens - 1}, or more tokens" if file.num_tokens > 1 else "more tokens"
    )
    return [
        FieldProblem(
            field="model.seq_len",
            message=f"is {spec.model.seq_len}; {file.name} of {field} has {file.num_tokens} "
            f"tokens, fewer than one sequence and its next token; allowed: {allowed}",
        )
    ]


def _holdout(spec: JobSpec, held: TokenSources, source: TokenSource) -> list[FieldProblem]:
    from outlast.tokens.holdout import Holdout

    number = held.num_sequences(source.train, spec.model.seq_len)
    fraction = spec.data.validation_fraction
    split = Holdout(num_sequences=number, fraction=fraction)
    if number == 0 or min(split.num_held_out, split.num_trained_on) > 0:
        return []
    return [
        FieldProblem(
            field="data.validation_fraction",
            message=f"is {fraction:g}; of {number} sequences in {source.name} that holds out "
            f"{split.num_held_out}; {_more(number)}give {_smaller(spec, held, source.train)}"
            "data.validation_tokens",
        )
    ]


def _smaller(spec: JobSpec, held: TokenSources, file: TokenFile) -> str:
    """What cuts the same tokens into more sequences, if anything does."""
    packing = held.packings.get(file.name)
    if packing is None or packing.num_sequences < packing.num_documents:
        return "a shorter model.seq_len or "
    # Each document has a sequence of its own, of any length, and loses its end where that is short.
    is_more = file.num_sequences(spec.model.seq_len) > packing.num_sequences
    return "data.packing: stream or " if is_more else ""


def _more(number: int) -> str:
    """The smallest share that holds out one sequence of so many, if there are two."""
    return f"allowed: {math.ceil(10_000 / number) / 10_000:g} or more; or " if number > 2 else ""


def _tokenizers(found: list[TokenSource]) -> list[FieldProblem]:
    named = [source for source in found if source.tokenizer]
    others = [source for source in named[1:] if not _is_same_tokenizer(named[0], source)]
    if not others:
        return []
    words = ", ".join(f"{each.name} of {each.tokenizer}" for each in (named[0], *others))
    message = f"has ids of different tokenizers: {words}; prepare all of it with one"
    return [FieldProblem(field="data.tokens", message=message)]


def _is_same_tokenizer(one: TokenSource, other: TokenSource) -> bool:
    """By its files, wherever they lie; by its name where they are not known."""
    if one.tokenizer_digest and other.tokenizer_digest:
        return one.tokenizer_digest == other.tokenizer_digest
    return one.tokenizer == other.tokenizer
