"""`outlast evaluate`: how often a checkpoint's model knows how texts go on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.hugging_face import SpecIn, Step, as_messages
from outlast.cli.job_folder import Folder
from outlast.cli.loaded_model import TokenizerName, load_model
from outlast.cli.options import Controller, Json, StateDir
from outlast.cli.progress import count_bar

_Questions = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="JSON lines: text, whose last word is asked for; or context and target; or context, "
        "choices and answer (the number of the right choice, from 0).",
    ),
]
_Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N lines.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("evaluate")(evaluate)


def evaluate(
    job: Folder,
    questions: _Questions,
    spec: SpecIn = None,
    step: Step = None,
    limit: _Limit = None,
    tokenizer: TokenizerName = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Ask a checkpoint's model how texts go on: LAMBADA, cloze tests, multiple choice.

    It runs on this machine's CPU, in one process. A cloze test is right if every token of it
    is the likeliest one; of several choices the likeliest is taken.
    """
    from trainer import evaluation

    with as_messages():
        # All of them are read first: the last line may be the wrong one.
        asked = list(islice(evaluation.read_questions(questions.expanduser()), limit))
        if not asked:
            raise CliError(f"{questions} has no questions")
        it = load_model(job, spec, step, tokenizer, controller, state_dir)
        with count_bar("asking", len(asked), quiet=json) as done:
            totals = evaluation.evaluate(it.model, it.tokenizer, asked, done)
    facts = {"step": it.step, "tokenizer": it.tokenizer.name, **totals.as_facts()}
    if json:
        output.print_json(facts)
    else:
        output.print_lines(_summary(facts))


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("step", f"{facts['step']:,}"),
        ("questions", f"{facts['questions']:,}"),
        ("accuracy", f"{facts['accuracy']:.4f} ± {facts['accuracy_error']:.4f}"),
    ]
    if "accuracy_by_length" in facts:
        lines.append(("by length", f"{facts['accuracy_by_length']:.4f}, with nats per byte"))
    lines += [
        (
            "perplexity",
            f"{facts['perplexity']:.4g} of what is right, {facts['perplexity_per_token']:.4g} "
            "per token",
        ),
    ]
    if facts["truncated"]:
        lines.append(
            ("truncated", f"{facts['truncated']:,} contexts, whose beginning was left out")
        )
    return lines
