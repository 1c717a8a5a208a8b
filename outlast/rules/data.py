"""Rules of where tokens come from, and of how many there must be."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, only_with, shown
from outlast.rules.places import scheme_of, wrong_with_place
from outlast.rules.sizes import LARGEST

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# The text that ships with Python.
PYTHON_STDLIB = "python-stdlib"
# What is read of it unless the spec says otherwise: nobody means to train on all of it.
STDLIB_BYTES = 16 * 2**20
# Long enough to read in context, short enough that 2 % of 100 kB is some blocks.
BLOCK_TOKENS = 8192

# Held-out sets: each has its place in every record of an evaluation and its column of the curve.
MAX_VALIDATION_SETS = 16
# Names are parts of those of figures and columns, and have so many bytes in a black box.
MAX_SET_NAME = 48
SET_NAME = re.compile(rf"[A-Za-z0-9][-A-Za-z0-9_.]{{0,{MAX_SET_NAME - 1}}}")

# What data.packing = whole puts behind documents: an id that every vocabulary has. What is
# computed of it goes nowhere.
PADDING = 0


def _check_source(spec: JobSpec) -> list[FieldProblem]:
    source = spec.data.source
    if spec.data.tokens is not None:
        return []
    if source == PYTHON_STDLIB or (source.startswith("/") and source.isprintable()):
        return []
    if scheme_of(source) is not None:
        what = "a URL, and text is read from files that every node has"
    elif not source.isprintable():
        what = "no path: it has characters that cannot be printed"
    else:
        what = "a relative path, which would be another place on every node"
    return [
        FieldProblem(
            field="data.source",
            message=f"is {shown(source)}, {what}; allowed: {PYTHON_STDLIB}, or the absolute path "
            "of a text file or of a folder with some",
        )
    ]


def bytes_read(source: str, max_bytes: int | None) -> int | None:
    """How much of a source is read at most, if the spec has this `max_bytes`; None: all of it."""
    return STDLIB_BYTES if max_bytes is None and source == PYTHON_STDLIB else max_bytes


def _check_length(spec: JobSpec) -> list[FieldProblem]:
    """However much text there is, no more than `max_bytes` is read."""
    given = spec.data.max_bytes
    if spec.data.tokens is not None:
        return []
    most = bytes_read(spec.data.source, given)
    # A larger one is a problem of its own, and no float holds all of its digits.
    if most is None or most > LARGEST["data.max_bytes"]:
        return []
    origin = f"data.max_bytes = {most}" if given is not None else f"read of {PYTHON_STDLIB}"
    return check_tokens(spec, most, origin)


def check_tokens(spec: JobSpec, num_tokens: int, origin: str) -> list[FieldProblem]:
    """Both splits of so many tokens must hold a sequence; `origin` says where they come from."""
    length = spec.model.seq_len
    fraction = spec.data.validation_fraction
    train, held_out = split_sizes(num_tokens, fraction)
    splits = {"training": train, f"data.validation_fraction = {fraction:g}": held_out}
    split, fewest = min(splits.items(), key=lambda item: item[1])
    # The last token of a sequence needs a successor.
    if fewest > length:
        return []
    remedy = f"allowed: 1 to {fewest - 1}, or more text" if fewest > 1 else "give more text"
    if fewest == held_out:
        remedy += ", or a larger data.validation_fraction"
    return [
        FieldProblem(
            field="model.seq_len",
            message=f"is {length}; of {num_tokens} tokens ({origin}) {fewest} are for {split}, "
            f"fewer than one sequence and its next token; {remedy}",
        )
    ]


def split_sizes(num_tokens: int, fraction: float) -> tuple[int, int]:
    """How many of so many tokens are trained on, and how many are held out.

    Every so many blocks one is held out: block i where i x fraction passes a whole number.
    """
    block = block_tokens(num_tokens, fraction)
    num_blocks = -(-num_tokens // block)
    held_blocks = math.floor(num_blocks * fraction)
    held = held_blocks * block
    if held_blocks > math.floor((num_blocks - 1) * fraction):
        # The last block is one of them, and may not be full.
        held -= num_blocks * block - num_tokens
    return num_tokens - held, held


def block_tokens(num_tokens: int, fraction: float) -> int:
    """Tokens of a block; a small source gets small ones, so that it has some to hold out."""
    return max(1, min(BLOCK_TOKENS, int(num_tokens * fraction)))


def _check_text_only(spec: JobSpec) -> list[FieldProblem]:
    """Fields of text beside tokens, and of tokens beside text."""
    data = spec.data
    given: dict[str, object]
    if data.tokens is not None:
        given = {
            "source": data.source if data.source != PYTHON_STDLIB else None,
            "max_bytes": data.max_bytes,
        }
        why = "is of text, and data.tokens is given, too; keep one of them"
    else:
        given = {
            "validation_tokens": data.validation_tokens,
            "blend_changes": data.blend_changes or None,
            "document_mask": data.document_mask,
            "reset_positions": data.reset_positions,
            "packing": data.packing if data.packing != "stream" else None,
            "check_ids": data.check_ids if data.check_ids != "whole" else None,
        }
        why = "is given without data.tokens, which it needs"
    return [
        FieldProblem(field=f"data.{name}", message=why)
        for name, value in given.items()
        # What could not be read is not looked at here.
        if value
    ]


def _check_positions(spec: JobSpec) -> list[FieldProblem]:
    """Distances to tokens of other documents have no beginning, and no positions have none."""
    data, kind = spec.data, spec.model.positions
    if data.tokens is None or not data.reset_positions or data.keeps_documents_apart:
        return []
    if kind in ("learned", "rope"):
        return []
    needed = "model.positions = learned or rope, or with data.document_mask = true"
    return [only_with("data.reset_positions", "true", needed, kind)]


def _check_token_paths(spec: JobSpec) -> list[FieldProblem]:
    named = [("data.tokens", path) for path in spec.data.weights]
    named += [("data.validation_tokens", path) for path in spec.data.validation_sets.values()]
    wrong = ((field, wrong_with_tokens(path)) for field, path in named)
    return [FieldProblem(field=field, message=why) for field, why in wrong if why is not None]


def wrong_with_tokens(name: str) -> str | None:
    """Why no tokens can be of this name whatever the node, with what is allowed; else None."""
    if name.startswith("/") and name.isprintable():
        return None
    if scheme_of(name) is not None:
        return wrong_with_place(name, "corpus")
    return (
        f"is {shown(name)}; allowed: the path or URL of a folder of `outlast data prepare`, "
        "of a pair NAME.bin and NAME.idx, or of a .npy file"
    )


def _check_weights(spec: JobSpec) -> list[FieldProblem]:
    data = spec.data
    blends = [("data.tokens", data.weights)] if data.tokens is not None else []
    blends += [
        (f"data.blend_changes[{number}].tokens", change.tokens)
        for number, change in enumerate(data.blend_changes)
    ]
    problems = []
    for field, weights in blends:
        wrong = [path for path, weight in weights.items() if not 0 <= weight < math.inf]
        unknown = [path for path in weights if path not in data.weights]
        if wrong:
            weight = shown(weights[wrong[0]])
            message = f"has the weight {weight} for {wrong[0]}; allowed: a number, 0 or more"
        elif unknown and data.tokens is not None:
            message = f"has {unknown[0]}, which data.tokens has not; give it weight 0 there"
        elif not any(weights.values()):
            message = "has weights that sum to nothing; allowed: one more than 0 at least"
        else:
            continue
        problems.append(FieldProblem(field=field, message=message))
    steps = [1, *(change.from_step for change in data.blend_changes)]
    problems += [
        FieldProblem(
            field=f"data.blend_changes[{number}].from_step",
            message=f"is {now}, not after step {before}; give changes in the order of steps",
        )
        for number, (before, now) in enumerate(pairwise(steps))
        if now <= before
    ]
    return problems


def _check_validation_names(spec: JobSpec) -> list[FieldProblem]:
    given = spec.data.validation_tokens
    if not isinstance(given, dict):
        return []
    wrong = [name for name in given if SET_NAME.fullmatch(name) is None]
    if wrong:
        why = (
            f"has the name {shown(wrong[0])}; allowed: letters, digits, '-', '_' and '.', at most "
            f"{MAX_SET_NAME} of them, the first a letter or digit"
        )
    elif not 0 < len(given) <= MAX_VALIDATION_SETS:
        why = f"has {len(given)} sets; allowed: 1 to {MAX_VALIDATION_SETS}"
    else:
        return []
    return [FieldProblem(field="data.validation_tokens", message=why)]


RULES = (
    *(_check_source, _check_length, _check_text_only, _check_token_paths, _check_weights),
    *(_check_validation_names, _check_positions),
)
