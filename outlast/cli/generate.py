"""`outlast generate`: what a checkpoint's model makes of a prompt."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.hugging_face import SpecIn, Step, as_messages
from outlast.cli.job_folder import Folder
from outlast.cli.loaded_model import TokenizerName, load_model
from outlast.cli.options import Controller, Json, StateDir

_Prompt = Annotated[str, typer.Option("--prompt", metavar="WORDS", help="What to go on with.")]
_MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        help="At most so many more; 32 unless given, or what model.seq_len leaves.",
    ),
]
_USUAL = 32
_Temperature = Annotated[
    float,
    typer.Option(metavar="T", min=0, help="0: always the likeliest token; 1: as they are likely."),
]
_Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of what is drawn.")]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=1, help="After that it is an error.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("generate")(generate)


def generate(
    job: Folder,
    prompt: _Prompt,
    spec: SpecIn = None,
    step: Step = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    tokenizer: TokenizerName = "",
    timeout_s: _Timeout = 600.0,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Go on with a text as a checkpoint's model would, to see what it has learnt.

    It runs on this machine's CPU, in one process, and ends at the tokenizer's end of a
    document.
    """
    from trainer.generation import Sampling

    until_s = time.monotonic() + timeout_s
    with as_messages():
        it = load_model(job, spec, step, tokenizer, controller, state_dir)
        given = it.tokenizer.encode(prompt).tolist()
        how = Sampling(
            max_tokens=max_tokens or min(_USUAL, max(1, it.spec.model.seq_len - len(given))),
            temperature=temperature,
            seed=seed,
            stop=it.tokenizer.end_of_document,
        )
        try:
            tokens = list(it.model.go_on(given, how, until_s=until_s))
        except TimeoutError as error:
            raise CliError(f"--timeout {timeout_s:g}: {error}", ExitCode.JOB_FAILED) from error
    text = it.tokenizer.decode([*given, *tokens])
    if json:
        facts = {"step": it.step, "tokenizer": it.tokenizer.name, "prompt": prompt, "text": text}
        output.print_json({**facts, "tokens": tokens})
        return
    print(text)
