"""Preparing a corpus: units become pairs of files side by side, which are then joined in order.

What is done stays: each unit's files appear in one rename, and a run that was interrupted goes on
with the units that have none, within those that may be large (`partial.py`). The result does not
depend on how many processes there were, nor on which was first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from math import floor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagnostics.children import die_with
from outlast import __version__
from outlast.tokens.index import read_index
from outlast.tokens.join import join_pairs
from outlast.tokens.manifest import NAME, PARTS, Manifest, Split
from trainer.data.corpus import long_text
from trainer.data.corpus.counts import Counts
from trainer.data.corpus.partial import SPLITS, Partial, has_records
from trainer.data.corpus.tokenizer import digest as tokenizer_digest
from trainer.data.corpus.tokenizer import load, stamp
from trainer.data.corpus.tokenizer_type import Tokenizer
from trainer.data.corpus.units import Unit, documents, is_packed, is_small, is_text_file

_PIECE_BYTES = 1 << 22
# Between looks at how far the processes are.
_SHOW_S = 0.2
# Of text that is tokenised at once: enough for all threads, and not much memory.
_BATCH_CHARACTERS = 1 << 20
# Of this process, if it is one that tokenises.
_counts: Counts

Done = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be made of the units; it decides every byte of the result."""

    units: tuple[Unit, ...]
    tokenizer: str
    fields: Mapping[str, str]
    """Of a JSON line, by the option that names each: of the text, or of a prompt and completion."""
    validation_fraction: float

    def digest(self) -> str:
        """Changes with the corpus, the options and the tokenizer's file."""
        facts = {**asdict(self), "stamp": stamp(self.tokenizer)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def prepare(folder: Path, order: Order, *, num_processes: int, done: Done) -> Manifest:
    """Make the token files of `order` in `folder`; `done` gets bytes read and tokens made.

    Of units that an earlier call has done, tokens are not counted.

    Raises:
        ValueError: the folder has another corpus, or a document cannot be read.
        BrokenProcessPool: a process was killed; the next call goes on.
    """
    tokenizer = load(order.tokenizer)
    parts = folder / PARTS
    _claim(folder, parts, order)
    with _alone(parts):
        todo: deque[int] = deque()
        for number, unit in enumerate(order.units):
            if (parts / str(number)).exists():
                done(unit.num_bytes, 0)
            else:
                todo.append(number)
        _tokenize_all(parts, order, todo, num_processes, done)
        manifest = _join(folder, parts, order, tokenizer)
        manifest.write(folder)
        shutil.rmtree(parts)
    return manifest


def _tokenize_all(
    parts: Path, order: Order, todo: deque[int], num_processes: int, done: Done
) -> None:
    num_workers = max(1, min(num_processes, len(todo)))
    num_threads = max(1, num_processes // num_workers)
    # Never forked: what else runs in this process must not be copied.
    context = get_context("spawn")
    counts = Counts(context)
    pool = ProcessPoolExecutor(
        num_workers, context, initializer=_begin, initargs=(os.getpid(), num_threads, counts)
    )
    # A corpus may have a million files, and each is sent its own only.
    options = replace(order, units=())
    running: set[Future[None]] = set()
    try:
        while todo or running:
            while todo and len(running) < 2 * num_workers:
                number = todo.popleft()
                unit, part = order.units[number], parts / str(number)
                running.add(pool.submit(_tokenize, part, options, unit, number, num_threads))
            ended, running = wait(running, _SHOW_S, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()
            counts.report(done)
    finally:
        pool.shutdown(cancel_futures=True)


def _claim(folder: Path, parts: Path, order: Order) -> None:
    """Refuse a folder that holds something else, or a part of another corpus."""
    if (folder / NAME).exists():
        raise ValueError(f"{folder} has a prepared corpus already; give another --output")
    claim = parts / "order"
    if claim.exists():
        # A first try with a wrong option has no parts that could be of use to anyone.
        has_parts = has_records(parts) or any(path.name.isdigit() for path in parts.iterdir())
        if has_parts and claim.read_text() != order.digest():
            raise ValueError(
                f"{folder} has parts of a corpus with other files or options, or made by another "
                "version of outlast; delete it, or give another --output"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give another --output")
    parts.mkdir(parents=True, exist_ok=True)
    claim.write_text(order.digest())


@contextmanager
def _alone(parts: Path) -> Iterator[None]:
    """Refuse to work in a folder that another process works in."""
    with (parts / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{parts.parent} is being prepared by another process") from error
        yield


def _begin(parent: int, num_threads: int, counts: Counts) -> None:
    """What a process has before its first unit.

    It ends with `parent`: the next call does its unit again, in the same folder. How many threads
    Hugging Face's library has is read here: more where units are few.
    """
    global _counts
    die_with(parent)
    _counts = counts
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = str(num_threads > 1).lower()


def _tokenize(part: Path, options: Order, unit: Unit, number: int, num_threads: int) -> None:
    """One unit, in a process of its own."""
    tokenizer = _loaded(options.tokenizer, num_threads)
    is_text = is_text_file(unit, options.fields)
    digest = replace(options, units=(unit,)).digest()
    # Another version may cut a text elsewhere.
    identity = f"part {number} of outlast {__version__}: {digest}"
    with Partial(part, tokenizer.token_type, identity) as partial:
        if is_text:
            left = _tokenize_text(partial, options, unit, number, tokenizer)
        else:
            left = _tokenize_documents(partial, options, unit, number, tokenizer)
        partial.finish()
    _counts.add(*left)


def _tokenize_text(
    partial: Partial, options: Order, unit: Unit, number: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """A text file, some pieces at a time, and what is behind it.

    Gives the bytes and tokens that are not counted yet.
    """
    writer = partial.writers[_split_of(number, Fraction(str(options.validation_fraction)))]
    start = long_text.BEGINNING if partial.position is None else long_text.parsed(partial.position)
    found = long_text.pieces(Path(unit.path), tokenizer, start)
    _counts.add(start.byte, 0)
    num_left = unit.num_bytes - start.byte
    while batch := list(islice(found, _BATCH_CHARACTERS // long_text.PIECE_CHARACTERS)):
        num_tokens = 0
        for ids in long_text.encoded(batch, tokenizer):
            num_tokens += len(ids)
            writer.add_piece(ids)
        num_bytes = sum(piece.num_bytes for piece in batch)
        num_left -= num_bytes
        _counts.add(num_bytes, num_tokens)
        partial.keep(asdict(batch[-1].next))
    if tokenizer.end_of_document is not None:
        writer.add_piece(np.array([tokenizer.end_of_document]))
    writer.end_document()
    # Some of a file that an earlier run has read to its end.
    return num_left, 0


def _tokenize_documents(
    partial: Partial, options: Order, unit: Unit, number: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Lines or rows, some at a time.

    Gives the bytes and tokens that are not counted yet.
    """
    fraction = Fraction(str(options.validation_fraction))
    at = 0 if partial.position is None else partial.position.integer("documents")
    num_tokens = 0
    found = documents(unit, options.fields, lambda num_bytes: _counts.add(num_bytes, 0))
    # What an earlier run has done is read again, as a packed file has no other way to a line.
    for batch in _batches(islice(found, at, None)):
        for parts in _all_encoded(batch, tokenizer):
            if len(parts[-1]):
                num_tokens += sum(map(len, parts))
                # The number of the unit moves the first: each may have few documents.
                partial.writers[_split_of(at + number, fraction)].add(*parts)
            at += 1
        if not is_small(unit):
            _counts.add(0, num_tokens)
            num_tokens = 0
            partial.keep({"documents": at})
    return 0 if is_packed(unit) else unit.num_bytes, num_tokens


def _split_of(at: int, fraction: Fraction) -> str:
    is_held_out = floor((at + 1) * fraction) > floor(at * fraction)
    return "validation" if is_held_out else "train"


@lru_cache(maxsize=1)
def _loaded(name: str, num_threads: int) -> Tokenizer:
    return load(name, num_threads)


def _batches(found: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """The texts of some documents at a time."""
    waiting: list[tuple[str, ...]] = []
    size = 0
    for texts in found:
        waiting.append(texts)
        size += sum(map(len, texts))
        if size >= _BATCH_CHARACTERS:
            yield waiting
            waiting, size = [], 0
    yield waiting


def _all_encoded(
    found: Sequence[tuple[str, ...]], tokenizer: Tokenizer
) -> Iterator[list[NDArray[Any]]]:
    ids = iter(tokenizer.encode_all([text for texts in found for text in texts]))
    for texts in found:
        parts = [next(ids) for _ in texts]
        if tokenizer.end_of_document is not None:
            parts[-1] = np.append(parts[-1], tokenizer.end_of_document)
        yield parts


def _join(folder: Path, parts: Path, order: Order, tokenizer: Tokenizer) -> Manifest:
    splits = {}
    for split in SPLITS:
        pairs = [parts / str(number) / split for number in range(len(order.units))]
        if join_pairs(pairs, folder / split, tokenizer.token_type):
            splits[split] = _described(folder / split)
    if "train" not in splits:
        raise ValueError("the corpus has no documents to train on")
    has_prompts = len(order.fields) > 1
    digests = [split.sha256 for split in splits.values()]
    # Where prompts end is in the index alone.
    if has_prompts:
        digests += [_digest(folder / f"{split}.idx") for split in splits]
    return Manifest(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer_digest(tokenizer.name),
        vocab_size=tokenizer.vocab_size,
        token_type=tokenizer.token_type,
        end_of_document=tokenizer.end_of_document,
        source=_sources(order.units),
        has_prompts=has_prompts,
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        splits=splits,
    )


def _sources(units: Sequence[Unit]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(unit.path for unit in units))


def _described(name: Path) -> Split:
    path = name.with_name(f"{name.name}.bin")
    index = read_index(name.with_name(f"{name.name}.idx"))
    return Split(
        tokens=path.stat().st_size // np.dtype(index.token_type).itemsize,
        documents=index.num_documents,
        sha256=_digest(path),
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
