"""`outlast data`: a corpus becomes files of tokens, and what a spec trains on is shown."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.describe_tokens import describe
from outlast.cli.errors import CliError, ExitCode, bad_input
from outlast.cli.options import Assignments, Json, SpecFile
from outlast.cli.progress import tokens_bar
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from outlast.sources import Source
    from outlast.spec import JobSpec
    from outlast.tokens.files import TokenSource
    from outlast.tokens.fit import TokenSources
    from outlast.tokens.manifest import Manifest
    from outlast.tokens.packing import Packing
    from trainer.data.corpus.run import Order
    from trainer.data.corpus.units import Corpus

_HEADER = ("SOURCE", "DOCUMENTS", "TOKENS", "SEQUENCES", "SAMPLES", "EPOCHS")
# Of data.packing whole.
_PACKED_HEADER = ("PADDING", "CUT", "NO LOSS")


_Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE...",
        help="Text files (.txt, .md, .rst, .py), JSON lines (.jsonl, .jsonl.gz, "
        ".jsonl.zst), Parquet (.parquet), or folders of them.",
    ),
]
_OutputFolder = Annotated[
    Path, typer.Option("--output", metavar="DIR", help="Folder to make, for data.tokens.")
]
_Tokenizer = Annotated[
    str,
    typer.Option(
        metavar="byte|FILE",
        help="byte; a tokenizer.json of Hugging Face's; a SentencePiece .model; tiktoken:NAME; or "
        "llama3:FILE or qwen:FILE for a file in tiktoken's format.",
    ),
]
_TextField = Annotated[
    str, typer.Option(metavar="NAME", help="Field of a JSON line, or column, that has the text.")
]
_PromptField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Field that has a prompt, which is not predicted."),
]
_CompletionField = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field that has its completion.")
]
_ValidationFraction = Annotated[
    float,
    typer.Option(metavar="SHARE", min=0, max=0.5, help="Share of the documents to hold out."),
]
_Processes = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Processors that tokenise; 0: all of them."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(no_args_is_help=True, help="Files of tokens, which data.tokens trains on.")
    group.command("prepare")(prepare)
    group.command("describe")(describe)
    group.command("show")(show)
    app.add_typer(group, name="data")


def prepare(
    sources: _Sources,
    output_folder: _OutputFolder,
    tokenizer: _Tokenizer = "byte",
    text_field: _TextField = "text",
    prompt_field: _PromptField = None,
    completion_field: _CompletionField = None,
    validation_fraction: _ValidationFraction = 0.01,
    processes: _Processes = 0,
    json: Json = False,
) -> None:
    """Turn text into files of tokens, in Megatron-LM's format.

    Each text file, JSON line and row of a table is a document. With --prompt-field and
    --completion-field a document is both, and only completions have a loss. Interrupted,
    the same command goes on where it was.
    """
    from trainer.data.corpus.run import Order
    from trainer.data.corpus.tokenizer import absolute
    from trainer.data.corpus.units import find_units

    began_s = time.monotonic()
    with bad_input():
        fields = _fields(text_field, prompt_field, completion_field)
        corpus = find_units([each.expanduser().resolve() for each in sources])
    order = Order(
        units=corpus.units,
        tokenizer=absolute(tokenizer),
        fields=fields,
        validation_fraction=validation_fraction,
    )
    # Fewer processes where files are few; then each has several threads.
    made, num_new = _run(output_folder.expanduser(), order, processes or os.cpu_count() or 1, json)
    seconds = time.monotonic() - began_s
    facts = {
        **_prepared(made, output_folder, corpus),
        "seconds": round(seconds, 3),
        # Of those that an earlier call has made nobody knows how long they took.
        "tokens_per_s": round(num_new / seconds),
    }
    if json:
        output.print_json(facts)
    else:
        output.print_lines(_summary(facts))


def _fields(text: str, prompt: str | None, completion: str | None) -> dict[str, str]:
    if prompt is None and completion is None:
        return {"--text-field": text}
    if prompt is None or completion is None:
        given, lacking = "--prompt-field", "--completion-field"
        given, lacking = (given, lacking) if completion is None else (lacking, given)
        raise ValueError(f"{given} is given without {lacking}, which it needs")
    return {"--prompt-field": prompt, "--completion-field": completion}


def _run(folder: Path, order: Order, num_processes: int, quiet: bool) -> tuple[Manifest, int]:
    """What was made, and how many tokens of it by this call."""
    from concurrent.futures.process import BrokenProcessPool

    from trainer.data.corpus.run import prepare

    total, num_new = sum(unit.num_bytes for unit in order.units), 0
    try:
        with tokens_bar("tokenising", total, quiet=quiet) as advance, bad_input():

            def done(num_bytes: int, num_tokens: int) -> None:
                nonlocal num_new
                num_new += num_tokens
                advance(num_bytes, num_tokens)

            return prepare(folder, order, num_processes=num_processes, done=done), num_new
    except OSError as error:
        raise CliError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    except KeyboardInterrupt as error:
        raise CliError("stopped; the same command goes on", ExitCode.INTERRUPTED) from error
    except BrokenProcessPool as error:
        raise CliError(
            "a process that tokenises was killed, perhaps for want of memory; the same command "
            "goes on, with fewer --processes if need be",
            ExitCode.JOB_FAILED,
        ) from error


def _prepared(made: Manifest, folder: Path, corpus: Corpus) -> dict[str, Any]:
    splits = {
        name: {"tokens": split.tokens, "documents": split.documents}
        for name, split in made.splits.items()
    }
    return {
        "folder": str(folder.expanduser().resolve()),
        "tokenizer": made.tokenizer,
        "vocab_size": made.vocab_size,
        "end_of_document": made.end_of_document,
        "has_prompts": made.has_prompts,
        "source_bytes": sum(unit.num_bytes for unit in corpus.units),
        "skipped": [str(path) for path in corpus.skipped],
        "splits": splits,
        "digest": made.digest,
    }


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from trainer.data.corpus.units import summary_of

    lines = [("folder", facts["folder"])]
    for name, split in facts["splits"].items():
        lines.append((name, f"{split['tokens']:,} tokens in {split['documents']:,} documents"))
    if "validation" not in facts["splits"]:
        lines.append(("validation", "no documents: too few for --validation-fraction"))
    if facts["skipped"]:
        what = summary_of([Path(each) for each in facts["skipped"]])
        lines.append(("skipped", f"{what}; names of their kind are not read"))
    if facts["has_prompts"]:
        lines.append(("loss", "of completions, not of prompts"))
    end = facts["end_of_document"]
    behind = "nothing" if end is None else f"id {end}"
    return [
        *lines,
        ("tokenizer", f"{facts['tokenizer']}: {facts['vocab_size']:,} ids, {behind} behind each"),
        ("speed", f"{facts['tokens_per_s']:,} tokens/s, {facts['seconds']:.1f} s in all"),
        ("digest", facts["digest"]),
        ("spec", f"data.tokens: {facts['folder']}, model.vocab_size: {facts['vocab_size']}"),
    ]


def show(
    spec: SpecFile,
    set_: Assignments = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Show what a spec trains on: documents, tokens, and how often each source is passed over.

    Of text each file that is read is a document, and each byte a token.

    With data.packing whole also which part of sequences is padding, how many documents are
    longer than a sequence and lose their end, and in how many nothing is predicted.
    """
    from outlast.cli.places import Nodes
    from outlast.cli.specfile import load_spec
    from outlast.sources import Source

    checked = load_spec(spec, set_, Nodes.HERE)
    found = checked.seen.source
    if found is None:
        raise CliError("the spec has a script, which reads data of its own")
    if isinstance(found, Source):
        rows = [_of_text(checked.spec, found)]
    else:
        rows = _shown(checked.spec, found)
    if json:
        output.print_json({"sources": rows})
        return
    is_packed = checked.spec.data.packing == "whole"
    header = (*_HEADER, *_PACKED_HEADER) if is_packed else _HEADER
    output.print_table(header, [_cells(row) for row in rows], empty="")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    cells = (
        row["source"],
        "unknown" if row["documents"] is None else f"{row['documents']:,}",
        f"{row['tokens']:,}",
        f"{row['sequences']:,}",
        f"{row['samples']:,}",
        f"{row['epochs']:.3g}",
    )
    if "padding_share" not in row:
        return cells
    counts = (row["documents_cut"], row["documents_without_loss"])
    return (*cells, f"{row['padding_share']:.1%}", *(f"{count:,}" for count in counts))


def _shown(spec: JobSpec, found: TokenSources) -> list[dict[str, Any]]:
    from trainer.core.blend import blend_of

    changes = [(each.from_step, each.tokens) for each in spec.data.blend_changes]
    blend = blend_of(spec.data.weights, changes, global_batch=spec.data.global_batch)
    samples = blend.before(spec.steps * spec.data.global_batch)
    rows = []
    for source, number in zip(found.sources, samples, strict=True):
        sequences = _trained_on(spec, found, source)
        rows.append(
            {
                "source": source.name,
                "documents": source.train.num_documents,
                "tokens": source.train.num_tokens,
                "sequences": sequences,
                "samples": number,
                "epochs": number / sequences,
                **_packed(found.packings.get(source.train.name)),
            }
        )
    return rows


def _of_text(spec: JobSpec, found: Source) -> dict[str, Any]:
    """What `trainer.data` makes of text: blocks are held out, the rest is one row of tokens."""
    from outlast.rules.data import split_sizes

    train, _ = split_sizes(found.num_tokens, spec.data.validation_fraction)
    # The last token of a sequence needs a successor.
    sequences = (train - 1) // spec.model.seq_len
    samples = spec.steps * spec.data.global_batch
    return {
        "source": found.name,
        "documents": found.num_documents,
        "tokens": found.num_tokens,
        "sequences": sequences,
        "samples": samples,
        "epochs": samples / sequences,
    }


def _packed(packing: Packing | None) -> dict[str, Any]:
    """What packing whole documents makes of all of a file."""
    if packing is None:
        return {}
    return {
        "padding_share": packing.padding_share,
        "documents_cut": packing.num_cut,
        "tokens_cut": packing.num_tokens_cut,
        "documents_without_loss": packing.num_without_loss,
    }


def _trained_on(spec: JobSpec, found: TokenSources, source: TokenSource) -> int:
    from outlast.tokens.holdout import Holdout

    number = found.num_sequences(source.train, spec.model.seq_len)
    if found.validation or source.validation is not None:
        return number
    fraction = spec.data.validation_fraction
    return Holdout(num_sequences=number, fraction=fraction).num_trained_on
